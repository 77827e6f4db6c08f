"""Choice of a model's blocks, between which it can be cut: members of its lists, or other modules that it calls."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from torch import nn

from ...dependency import ConfigError, ModelError
from ...workers.compute.sequences.slices import place_of_state
from .observation import Observation
from .observe_forward import observe_forward
from .skeleton import Skeleton

_LISTS = (nn.ModuleList, nn.Sequential)
#: with fewer calls of blocks, lists inside the blocks are tried instead (the stages of a Swin or a ResNet)
_FEW_CALLS = 8
#: container modules without a forward
_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


def named_blocks(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Return the modules with these names; in place of lists their members.

    Raises:
        ModelError: the model has no module of one of the names.
    """
    found: list[nn.Module] = []
    for name in names:
        try:
            part = module.get_submodule(name)
        except AttributeError:
            known = [known for known, _ in module.named_modules() if known]
            near = "".join(f"; the nearest is {each}" for each in get_close_matches(name, known, 1, 0.0))
            raise ModelError(f"blocks {name!r}: the model has no module of this name{near}") from None
        found += _members(part) if isinstance(part, _LISTS) else [part]
    return found


def stateful_beside(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules beside the blocks that have a state, such as an LSTM: on shapes they take another path."""
    found: list[nn.Module] = []
    inside = {inner for block in blocks for inner in block.modules()}
    for part in model.modules():
        if part not in inside and inside.isdisjoint(part.modules()) and place_of_state(part) is not None:
            found.append(part)
            inside.update(part.modules())
    return found


def find_blocks(skeleton: Skeleton, args: Sequence[Any], kwargs: Mapping[str, Any], at_least: int) -> Observation:
    """Choose blocks by trial observations of the forward, and return the observation with the chosen blocks.

    Tried are first the members of the outermost lists, or of lists inside them if there are few; the children, if the
    model has no lists. With fewer calls than `at_least`, modules beside the lists and inside their members are added
    as long as the model can be cut there. Modules beside the lists are also added if the forward does something around
    the blocks that the stages could not do alike.
    """
    chosen: list[nn.Module] = []
    observation: Observation | None = None
    candidates = _with_parameters(_members(skeleton.module)) or _children(skeleton.module)
    tried: list[set[nn.Module]] = []
    if not candidates:
        raise ModelError(f"model {type(skeleton.module).__name__}: has no parts to cut between")
    while candidates != chosen and set(candidates) not in tried:
        tried.append(set(candidates))
        skeleton.blocks = list(dict.fromkeys(candidates))
        try:
            finer = observe_forward(skeleton, args, kwargs)
        except ConfigError:
            if observation is not None:
                break  # the inside of these blocks cannot be cut
            wider = _beside(skeleton.module, set(candidates))
            if set(wider) == set(candidates):
                raise
            candidates = wider  # operators that are refused around blocks are allowed inside one
            continue
        if observation is not None and not finer.calls:  # the modules are used, but not called
            candidates = chosen if len(observation.calls) >= at_least else _beside(skeleton.module, set(chosen))
            continue
        observation = finer
        chosen = list(dict.fromkeys(event.module for event in observation.calls if event.module is not None))
        candidates = _finer(skeleton.module, chosen, len(observation.calls), at_least)
    assert observation is not None
    skeleton.blocks = chosen
    if len(observation.calls) < at_least:  # calls of pipe_split() may be further places to cut
        skeleton.marked = True
        marked = observe_forward(skeleton, args, kwargs)
        skeleton.marked = len(marked.calls) > len(observation.calls)
        return marked if skeleton.marked else observation
    return observation


def _finer(model: nn.Module, chosen: list[nn.Module], num_calls: int, at_least: int) -> list[nn.Module]:
    """Return the modules to try as blocks instead of `chosen`; the same, if these suffice."""
    # Blocks of one form are layers; blocks of several forms, such as the stages of a Swin, may consist of layers.
    few = num_calls < _FEW_CALLS
    alike = len({tuple(p.shape for p in block.parameters()) for block in chosen}) == 1 < len(chosen)
    candidates = [inner for block in chosen for inner in _inside(block, len(chosen))] if few and not alike else chosen
    if candidates != chosen or num_calls >= at_least:
        return candidates
    beside = _beside(model, set(chosen))
    return beside if set(beside) != set(chosen) else [part for block in chosen for part in _parts(block)]


def _beside(module: nn.Module, chosen: set[nn.Module]) -> list[nn.Module]:
    """Return the chosen modules, and the largest modules with parameters that contain none of them."""
    if module in chosen:
        return [module]
    if not any(inner in chosen for inner in module.modules()):
        return _with_parameters(_parts(module) if isinstance(module, _CONTAINERS) else [module])
    return list(dict.fromkeys(part for child in module.children() for part in _beside(child, chosen)))


def _parts(module: nn.Module) -> list[nn.Module]:
    """Return the children with parameters, in place of lists their members; without such children the module itself."""
    return _with_parameters(_children(module)) or [module]


def _children(module: nn.Module) -> list[nn.Module]:
    """Return the children, in place of lists and dicts their members."""
    found: list[nn.Module] = []
    for child in module.children():
        found += _children(child) if isinstance(child, _CONTAINERS) else [child]
    return found


def _with_parameters(modules: Sequence[nn.Module]) -> list[nn.Module]:
    return [module for module in modules if any(True for _ in module.parameters())]


def _inside(block: nn.Module, among: int) -> list[nn.Module]:
    inner = _with_parameters(_members(block)) or (_children(block) if among == 1 else [])
    most = len(inner) > 1 and num_bytes(inner) >= 0.8 * num_bytes(block)
    return inner if most or (among == 1 and inner) else [block]


def _members(module: nn.Module) -> list[nn.Module]:
    """Return the members of the outermost lists in `module`, in order of declaration."""
    if not isinstance(module, _LISTS):
        return [member for child in module.children() for member in _members(child)]
    found: list[nn.Module] = []
    for child in module.children():
        # a list of lists, or of containers
        has_no_forward = getattr(child.forward, "__func__", None) is nn.Module.forward
        holds_only = isinstance(child, nn.ModuleList) or has_no_forward
        found += (_members(child) or list(child.children())) if holds_only else [child]
    return found


def num_bytes(module: nn.Module | Iterable[nn.Module]) -> int:
    """Return the bytes of the parameters of one or several modules, each counted once."""
    modules = [module] if isinstance(module, nn.Module) else module
    return sum(p.nbytes for p in dict.fromkeys(p for each in modules for p in each.parameters()))
