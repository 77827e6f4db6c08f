"""Layers that the members of a worker divide, and the refusal of tied parameters that would be divided apart."""

from collections.abc import Collection, Mapping

from torch import nn

from ....dependency import ConfigError
from ..sequences.slices import Divide, Layers


def refuse_untied(before: Mapping[str, object], after: Mapping[str, nn.Parameter]) -> None:
    """Refuse a division that has made two parameters of one.

    Raises:
        ConfigError: layers or blocks that shared a parameter have been divided apart.
    """
    first: dict[object, str] = {}
    for name, parameter in before.items():
        other = first.setdefault(parameter, name)
        if after.get(name) is not after.get(other):
            why = f"members: {other} and {name} are one parameter, and would be divided apart"
            raise ConfigError(f"{why}; put both into one layer or block, or on two stages")


def divide_layers(slice: Layers, divide: Divide, done: Collection[nn.Module]) -> None:
    """Divide the layers of a stage that are not `done` among the members of a worker."""
    before = _by_any_name(slice)
    for place, (index, module) in enumerate(slice.layers):
        if module not in done:
            made = divide(module, "", module)
            slice.layers[place] = index, module if made is None else made
    refuse_untied(before, _by_any_name(slice))
    slice.note_modules()


def _by_any_name(slice: Layers) -> dict[str, nn.Parameter]:
    """Return the parameters by each of their names."""
    layers = ((index, module.named_parameters(remove_duplicate=False)) for index, module in slice.layers)
    return {f"{index}.{name}": parameter for index, named in layers for name, parameter in named}
