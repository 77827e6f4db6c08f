"""Trees of tensors in the values that modules pass to each other: containers, dataclasses and plain objects.

Payloads between workers (`workers.transport.payload`) allow fewer types; they carry only the tensors found here.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

#: from the root to a tensor: ("[]", index or key) or (".", attribute) for each level
Path = tuple[tuple[str, Any], ...]

PLAIN = (type(None), bool, int, float, complex, str, bytes, type, torch.dtype, torch.device, torch.Size)
#: types with attributes that are not searched
CLOSED = (nn.Module, torch.Generator, FunctionType, BuiltinFunctionType, MethodType, ModuleType)


def leaves(tree: Any) -> list[tuple[Path, Tensor]]:
    """Return every tensor of `tree` with its path, in a fixed order; cycles are cut."""
    found: list[tuple[Path, Tensor]] = []
    _collect(tree, (), found, set())
    return found


def tensors(tree: Any) -> list[Tensor]:
    """Return every tensor of `tree`, as `leaves` without paths, which take most of the time."""
    found: list[Tensor] = []
    _gather(tree, found, set())
    return found


def _gather(tree: Any, found: list[Tensor], above: set[int]) -> None:
    if isinstance(tree, Tensor):
        found.append(tree)
    elif not isinstance(tree, PLAIN) and id(tree) not in above:
        above.add(id(tree))
        for child in tree if isinstance(tree, (tuple, list)) else [child for _, child in children(tree)]:
            _gather(child, found, above)
        above.discard(id(tree))


def _collect(tree: Any, path: Path, found: list[tuple[Path, Tensor]], above: set[int]) -> None:
    if isinstance(tree, Tensor):
        found.append((path, tree))
    elif not isinstance(tree, PLAIN) and id(tree) not in above:
        above.add(id(tree))
        for step, child in children(tree):
            _collect(child, (*path, step), found, above)
        above.discard(id(tree))


def children(tree: Any) -> list[tuple[tuple[str, Any], Any]]:
    """Return the direct children of a tree, with the step that leads to each."""
    if isinstance(tree, (tuple, list)):
        return [(("[]", i), child) for i, child in enumerate(tree)]
    if isinstance(tree, Mapping):
        return [(("[]", key), child) for key, child in tree.items()]
    if isinstance(tree, CLOSED):
        return []
    named = dict(getattr(tree, "__dict__", {}))
    if dataclasses.is_dataclass(tree):
        named |= {field.name: getattr(tree, field.name, None) for field in dataclasses.fields(tree)}
    return [((".", name), child) for name, child in named.items()]


def at(tree: Any, path: Path) -> Any:
    """Return the part at `path`."""
    for how, key in path:
        tree = tree[key] if how == "[]" else getattr(tree, key)
    return tree


def replaced(tree: Any, new: Mapping[Path, Any]) -> Any:
    """Return a copy of `tree` with new values at some paths; everything beside these paths is shared."""
    if () in new:
        return new[()]
    below: dict[tuple[str, Any], dict[Path, Any]] = {}
    for path, value in new.items():
        below.setdefault(path[0], {})[path[1:]] = value
    if not below:
        return tree
    children = {step: replaced(at(tree, (step,)), inner) for step, inner in below.items()}
    if isinstance(tree, tuple):
        items = [children.get(("[]", i), item) for i, item in enumerate(tree)]
        # named tuples take their fields one by one, torch's results (torch.return_types) take a sequence
        return type(tree)(*items) if hasattr(tree, "_make") else type(tree)(items)
    result = copy.copy(tree)
    for (how, key), child in children.items():
        if how == "[]":
            result[key] = child
        else:
            object.__setattr__(result, key, child)
    return result


def mapped(tree: Any, change: Callable[[Tensor], Any]) -> Any:
    """Return a copy of `tree` with every tensor replaced by `change(tensor)`."""
    return replaced(tree, {path: change(tensor) for path, tensor in leaves(tree)})
