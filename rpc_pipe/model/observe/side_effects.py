"""Side effects of blocks: recorded where a block runs, and reproduced where it does not.

Hooks see the calls of modules; a block sets attributes, and puts tensors into containers that it is given.
"""

from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .observation import SideEffect
from .placeholder import NEEDS_NUMBERS
from .trees import CLOSED, PLAIN, Path, at, children, tensors

#: a container with its path and a copy of its contents
_Box = tuple[Path, Any, Any]


def hooked(module: nn.Module) -> list[nn.Module]:
    """Return the modules inside with hooks of their calls, except torch's hooks that compute weights."""
    found = [(inner, {**inner._forward_pre_hooks, **inner._forward_hooks}) for inner in module.modules()]
    return [m for m, hooks in found if any(not type(h).__module__.startswith("torch.") for h in hooks.values())]


def num_hooks(module: nn.Module) -> int:
    """Return the number of hooks of a module's calls."""
    return len(module._forward_pre_hooks) + len(module._forward_hooks)


@contextmanager
def watching(modules: Iterable[nn.Module]) -> Iterator[list[tuple[nn.Module, Any]]]:
    """Return a context that notes calls of modules as their first hooks see them: (module, (args, kwargs, result))."""
    begun: list[tuple[Any, Any]] = []
    seen: list[tuple[nn.Module, Any]] = []

    def begin(module: nn.Module, args: Any, kwargs: Any) -> None:
        begun.append((args, kwargs))

    def end(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
        seen.append((module, (*begun.pop(), result)))

    handles = []
    for module in dict.fromkeys(modules):
        handles.append(module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
        handles.append(module.register_forward_hook(end, prepend=True, with_kwargs=True))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def contents(box: Any) -> Any:
    """Return a copy of the contents of a list, dict or object; None: nothing can be put into it."""
    if isinstance(box, list):
        return list(box)
    if isinstance(box, MutableMapping):
        return dict(box)
    return dict(vars(box)) if hasattr(box, "__dict__") and not isinstance(box, (*CLOSED, type)) else None


def boxes(tree: Any) -> list[_Box]:
    """Return the containers in a tree, each once."""
    found: dict[int, _Box] = {}

    def walk(node: Any, path: Path) -> None:
        if isinstance(node, (Tensor, *PLAIN)) or id(node) in found:
            return
        if (held := contents(node)) is not None:
            found[id(node)] = path, node, held
        for step, child in children(node):
            walk(child, (*path, step))

    walk(tree, ())
    return list(found.values())


def differ(some: Any, other: Any) -> bool:
    """Return whether two contents hold other objects."""
    if isinstance(some, dict) and isinstance(other, dict):
        some, other = [*some, *some.values()], [*other, *other.values()]
    return type(some) is not type(other) or list(map(id, some)) != list(map(id, other))


class LeftAttributes:
    """The attributes of modules before a block has run.

    Args:
        inside: the modules of the block.
        around: modules around the blocks, which hooks may refer to.
    """

    def __init__(self, inside: Iterable[nn.Module], around: Iterable[nn.Module]) -> None:
        self._inside, self._around = list(inside), list(around)
        self._before = {id(m): {n: (v, _listed(v)) for n, v in _public(m)} for m in (*self._inside, *self._around)}

    def left(self, is_new: Callable[[Tensor], bool], known: Iterable[Any]) -> Iterator[tuple[Any, SideEffect]]:
        """Yield the attributes that the block has left tensors in.

        Args:
            is_new: whether the block has made a tensor.
            known: trees that other stages get besides.
        """
        others = {id(tensor) for tensor in tensors(list(known))}
        for module in (*self._inside, *self._around):
            before = self._before[id(module)]
            for name, tree in _public(module):
                if not isinstance(tree, (Tensor, tuple, list, dict)):
                    continue
                was, listed = before.get(name, (None, None))
                filled = tree is was and isinstance(tree, (list, dict))
                found = tensors(tree)
                new = list(filter(is_new, found))
                changed = found and (tree is not was or (filled and differ(_listed(tree), listed)))
                if any(id(tensor) not in others for tensor in new) if module in self._around else new or changed:
                    yield tree, SideEffect(module, name, inside=filled)


def _public(module: nn.Module) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in vars(module).items() if not name.startswith("_")]


def _listed(value: Any) -> Any:
    return contents(value) if isinstance(value, (list, dict)) else None


def left_in(given: Iterable[_Box]) -> Iterator[tuple[Any, SideEffect]]:
    """Yield the contents of containers into which a block has put tensors."""
    for path, box, before in given:
        now = contents(box)
        if differ(now, before) and {id(t) for t in tensors(now)} - {id(t) for t in tensors(before)}:
            yield now, SideEffect(path=path)


def reproduce(effect: SideEffect, tree: Any, given: Any, needed: bool) -> None:
    """Reproduce a side effect of a block that is not run.

    Args:
        given: (args, kwargs) of the block.
        needed: whether this stage has tensors of `tree`.
    """
    module = effect.module
    if module is None:
        fill(at(given, effect.path), tree)
    elif not effect.name:
        _call_hooks(module, *tree)
    elif effect.inside and type(held := getattr(module, effect.name, None)) is type(tree):
        fill(held, tree)
    elif needed:
        setattr(module, effect.name, tree)


def fill(box: Any, held: Any) -> None:
    """Let a container hold other contents."""
    if isinstance(box, list):
        box[:] = held
        return
    box = box if isinstance(box, MutableMapping) else vars(box)
    for key in [key for key in box if key not in held]:
        del box[key]
    for key, value in held.items():
        box[key] = value


def _call_hooks(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
    own = vars(module).get("forward")
    module.forward = lambda *args, **kwargs: result
    try:
        module._call_impl(*args, **kwargs)
    except NEEDS_NUMBERS:  # a hook that only logs, where the numbers are
        pass
    finally:
        del module.forward
        if own is not None:
            module.forward = own
