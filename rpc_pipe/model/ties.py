"""Parameters that layers of a list share across a cut (tied weights).

Each stage has a copy of a tied weight by the parameter's first name in the unsplit model. The copies' gradients are
summed before every update, so the copies stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from ..dependency import ModelError
from .parameter_hooks import refuse_hooks
from .weight_views import refuse_parted


class Ties:
    """Parameters that the layers of a list share across a cut.

    Args:
        layers: modules are searched; layers that callables build share nothing.
        ranges: the layers of each stage.

    Attributes:
        names: `<layer>.<name>` of a parameter -> its first name in the unsplit model, if that differs.
        shared: parameter that several stages hold -> these stages.

    Raises:
        ModelError: a module with buffers is in several stages, or a hook would see a part of a gradient.
    """

    def __init__(self, layers: Sequence[object], ranges: Sequence[range]) -> None:
        self.names: dict[str, str] = {}
        self.shared: dict[str, list[int]] = {}
        first: dict[int, str] = {}
        parameters: dict[str, nn.Parameter] = {}
        held: dict[str, set[int]] = {}
        buffers: dict[int, tuple[int, int]] = {}
        for stage, i in ((stage, i) for stage, own in enumerate(ranges) for i in own):
            layer = layers[i]
            if not isinstance(layer, nn.Module):
                continue
            for name, parameter in layer.named_parameters(f"{i}", remove_duplicate=False):
                known = first.setdefault(id(parameter), name)
                parameters[known] = parameter
                held.setdefault(known, set()).add(stage)
                if known != name:
                    self.names[name] = known
            for name, buffer in layer.named_buffers():
                other, other_stage = buffers.setdefault(id(buffer), (i, stage))
                if other_stage != stage:
                    raise ModelError(
                        f"model: layers {other} and {i} of stages {other_stage} and {stage} share the buffer {name}; "
                        "choose a split that keeps them together"
                    )
        self.shared = {name: sorted(stages) for name, stages in held.items() if len(stages) > 1}
        refuse_parted(parameters, held)
        for name, stages in self.shared.items():
            refuse_hooks(parameters[name], name, stages)

    def copied(self, stage: int, layers: Iterable[tuple[int, nn.Module]]) -> tuple[list[nn.Module], set[int]]:
        """Return the layers of a stage that share parameters with an earlier stage, and the ids of these parameters.

        Args:
            layers: the layers with their indices in the whole model.
        """
        earlier = {name for name, stages in self.shared.items() if min(stages) < stage}
        found: list[nn.Module] = []
        parameters: set[int] = set()
        for i, layer in layers:
            for name, parameter in layer.named_parameters(f"{i}", remove_duplicate=False):
                if self.names.get(name) in earlier:
                    parameters.add(id(parameter))
                    found.append(layer)
        return list(dict.fromkeys(found)), parameters
