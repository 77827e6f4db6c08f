"""Lists, dicts, objects and modules that stages, or the loss function, have in common.

Tensors and numbers that are left there beside return values do not reach other stages, so these are refused.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.compute.modules.digest import digest
from ..workers.compute.modules.module_state import LOOKS, OF_TORCH, contents, fingerprint
from ..workers.compute.shard import LossFn
from .observe.closures import inside, modules_in
from .observe.trees import PLAIN, tensors


def separate(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks that share no module, tensor or container with the rest; of nested ones the outer."""
    count = Counter(id(each) for module in model.modules() for each in _held(module))
    nested = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in nested and _is_separate(block, count)]


def _is_separate(block: nn.Module, count: Counter[int]) -> bool:
    parts = list(block.modules())
    if any(isinstance(part, torch.jit.ScriptModule) for part in parts):
        return False
    inside = Counter(id(each) for part in parts for each in _held(part))
    if any(found != count[each] for each, found in inside.items()):
        return False
    return set(parts).issuperset(module for part in parts for module in _mentioned(part))


def _held(module: nn.Module) -> Iterator[Any]:
    """Yield the objects of a module that another module could hold too: members, tensors, and containers."""
    for held in (module._modules, module._parameters, module._buffers):
        yield from (each for each in held.values() if each is not None)
    for name, value in vars(module).items():
        if name not in OF_TORCH and isinstance(value, (list, dict, set, Tensor)):
            yield value


def _mentioned(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules in plain attributes and hooks of a module, such as an owner that it calls back."""
    for name, value in vars(module).items():
        if name not in ("_modules", "_parameters", "_buffers"):
            yield from modules_in([value], 3)


def mentioned(function: Any) -> dict[str, Any]:
    """Return the objects in a function's globals and closure, and the function itself, by name."""
    found = {"": function}
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is not None:
        names = {name for each in (code, *code.co_consts) for name in getattr(each, "co_names", ())}
        known = getattr(function, "__globals__", {})
        found |= {name: known[name] for name in names if name in known}
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
            with suppress(ValueError):  # not set yet
                found[name] = cell.cell_contents
    return found


#: most objects in which a loss function is followed
_MOST = 10_000
_NO_HOLDERS = (nn.Module, Tensor, torch.Generator, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


class Holder(NamedTuple):
    """A list, a dict, an object or a module that a layer or block can put something into."""

    where: str
    name: str
    held: Any
    #: names in the code of a loss function of another stage that has it, too; None: it has not
    read: Collection[str] | None

    def now(self) -> Any:
        """Return a generator's state, or the numbers that the loss function may read here, to compare them later."""
        if (state := _drawn(self.held)) is not None:
            return state.tolist() if isinstance(state, Tensor) else repr(state)
        if self.read is None:
            return None
        from .observe.output_contract import form_of

        tree = self.held
        if not isinstance(tree, (list, dict)):
            held = vars(tree) | vars(tree).get("_buffers", {})
            tree = {name: value for name, value in held.items() if name in self.read}
        return form_of(tree, lambda tensor: (id(tensor), digest([tensor])))


def shared_holders(layers: Sequence[Any], stages: Sequence[range], loss_fn: Any) -> list[list[Holder]]:
    """Return the objects of each stage's layers that other stages, or the loss function on the last, hold too."""
    layered = [(stage, i, layers[i]) for stage, own in enumerate(stages) for i in own]
    parts = [(stage, i, part) for stage, i, m in layered if isinstance(m, nn.Module) for part in m.modules()]
    read, names = read_by(loss_fn, {part for _, _, part in parts})
    found = [
        (stage, Holder(f"layer {i}", name, held, names if id(held) in read else None))
        for stage, i, part in parts
        for name, held in (*_holders(part), *[(f"an attribute of {type(part).__name__}", part)] * (id(part) in read))
    ]
    users: dict[int, set[int]] = defaultdict(set, {each: {len(stages) - 1} for each in read})
    for stage, holder in found:
        users[id(holder.held)].add(stage)
    return [[h for at, h in found if at == stage and users[id(h.held)] - {stage}] for stage in range(len(stages))]


def shared_generators(paired: Sequence[tuple[str, nn.Module, nn.Module]], own: Collection[nn.Module]) -> list[Holder]:
    """Return the generators of a stage's modules that modules of other stages hold, too.

    Args:
        paired: (path, the user's module, the stage's or its stand-in).
        own: modules of the stage.
    """
    drawing = [(path, part, vars(module)) for path, module, part in paired]
    held = {id(value) for _, part, values in drawing if part not in own for value in values.values()}
    values = ((path, part, *each) for path, part, values in drawing if part in own for each in values.items())
    drawn = [(path, part, name) for path, part, name, v in values if id(v) in held and _drawn(v) is not None]
    return [Holder(f"block {path}", name, vars(part)[name], None) for path, part, name in drawn]


def look(holders: Sequence[Holder]) -> Callable[[], None]:
    """Look at objects that other stages hold too, before a forward of a stage; the returned function looks behind it.

    It raises ModelError if one has a tensor with a graph then, if a loss function would read other numbers, or if a
    generator was drawn from.
    """
    before = [holder.now() for holder in holders]

    def end() -> None:
        for holder, was in zip(holders, before, strict=True):
            tree = vars(holder.held) if isinstance(holder.held, nn.Module) else holder.held
            if any(tensor.grad_fn is not None for tensor in tensors(tree)) or holder.now() != was:
                why = f"{holder.where} leaves numbers in {holder.name}, or draws from it, as other stages or loss_fn do"
                fix = "return it beside the output, take a generator for each layer, or cut elsewhere (split=)"
                raise ModelError(f"model: {why}: {fix}")

    return end


def read_by(function: Any, parts: Collection[nn.Module]) -> tuple[dict[int, Any], set[str]]:
    """Return the objects that a function can reach, by id, and the names in its code and in methods that it calls.

    Args:
        parts: modules of the model; of these, it calls the methods that it names.
    """
    found: dict[int, Any] = {}
    names, todo = set[str](), [function]
    for value in todo:
        if id(value) in found or len(found) == _MOST or isinstance(value, (Tensor, ModuleType, *PLAIN)):
            continue
        found[id(value)] = value
        if isinstance(value, FunctionType):
            if not (value.__module__ or "").startswith("torch."):
                todo += [value.__code__, value.__defaults__, value.__kwdefaults__, *mentioned(value).values()]
        elif isinstance(value, CodeType):
            names.update(value.co_names, (each for each in value.co_consts if isinstance(each, str)))
            todo += [*value.co_consts, *(method for each in found.values() for method in _methods(each, names))]
        elif isinstance(value, nn.Module) and value in parts:
            found |= {id(part): part for part in value.modules()}
            todo += _methods(value, names)
        else:
            more = [getattr(value, name, None) for name in ("__func__", "fget", "__dict__")]
            todo += [*inside(value), *more, *_methods(value, names | {"forward", "__call__"})]
    return found, names


def _methods(value: Any, names: Collection[str]) -> list[Any]:
    """Return the methods and properties of an object with one of these names."""
    found = [getattr(type(value), name, None) for name in names]
    return [each for each in found if isinstance(each, (FunctionType, property))]


def _holders(part: nn.Module) -> Iterator[tuple[str, Any]]:
    values = {name: value for name, value in vars(part).items() if name not in OF_TORCH}
    if not type(part).__module__.startswith("torch."):
        values |= mentioned(part.forward)
    for name, value in values.items():
        has_names = hasattr(value, "__dict__") and not isinstance(value, _NO_HOLDERS)
        if isinstance(value, (list, dict)) or has_names or _drawn(value) is not None:
            yield name, value


def _drawn(value: Any) -> Any:
    """Return the state of a generator of random numbers; None if it is none."""
    return None if isinstance(value, Collection) else contents(value)


def unchanging(loss_fn: LossFn) -> LossFn:
    """Return a loss function that is refused where it counts or averages, as DINO's does: several workers have it."""
    owner = getattr(loss_fn, "__self__", loss_fn)
    parts: list[Any] = [*owner.modules()] if isinstance(owner, nn.Module) else [owner] * hasattr(owner, "__dict__")
    looks = iter(range(LOOKS))

    def unchanged(output: Any, target: Any) -> Any:
        if next(looks, None) is None:
            return loss_fn(output, target)
        before = [fingerprint(part, tensors=False) for part in parts]
        found = loss_fn(output, target)
        if [fingerprint(part, tensors=False) for part in parts] != before:
            why = f"loss_fn {type(owner).__name__} changes what it holds, and replicas see parts of the batch"
            raise ModelError(f"{why}; take a schedule without replicas, such as 1f1b")
        return found

    return unchanged
