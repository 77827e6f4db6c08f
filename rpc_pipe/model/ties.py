"""Parameters that layers of a list share across a cut (tied weights).

Each stage has a copy of a tied weight by the parameter's first name in the unsplit model. The copies' gradients are
summed before every update, so the copies stay equal. Different weights on the same memory, such as a weight that is
another's transpose, are refused.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..dependency import ModelError
from ..workers.transport.payload import extent
from .parameter_hooks import refuse_hooks

_KINDS = (Tensor, nn.Parameter)


def overlapping(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Yield the names of pairs of tensors that reach over the same memory."""
    spans = []
    for name, tensor in named:
        fake = getattr(tensor, "fake", None)  # of a placeholder
        if (fake is not None or type(tensor) in _KINDS) and tensor.layout is torch.strided and tensor.numel():
            storage = (tensor if fake is None else fake).untyped_storage()._cdata
            begin = int(tensor.storage_offset()) * tensor.itemsize
            spans.append((storage, begin, begin + extent(tensor.shape, tensor.stride()) * tensor.itemsize, name))
    last, end, of = None, 0, ""
    for storage, begin, reach, name in sorted(spans):
        if storage == last and begin < end:
            yield of, name
        if storage != last or reach > end:
            last, end, of = storage, reach, name


def refuse_parted(
    named: Mapping[str, Tensor], stages: Mapping[str, Iterable[int]], written: Iterable[str] = ()
) -> None:
    """Raise if training would write only one of two tensors on the same memory.

    Args:
        stages: the stages of each parameter that is kept as it is given; buffers are copies.
        written: names of buffers that forwards write.

    Raises:
        ModelError: there are two.
    """
    changing = {name for name, tensor in named.items() if tensor.requires_grad} | set(written)
    for one, other in overlapping(named.items()):
        first, second = (set(stages.get(name, ())) for name in (one, other))
        if {one, other} & changing and not (first == second and len(first) == 1):
            why = f"{one} and {other} are views of the same memory, and stages would have copies that part"
            raise ModelError(f"model: {why}; make them one, or compute one of the other (as by weight.t())")


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
                    shared = f"layers {other} and {i} of stages {other_stage} and {stage} share the buffer {name}"
                    raise ModelError(f"model: {shared}; choose a split that keeps them together")
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
