"""The slice of an observed model that one stage holds, in the form that a shard computes with."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ...dependency import ConfigError, ModelError
from ...workers.compute.randomness import Seed
from ...workers.compute.slices import PartialFields, Times, note, versions_of
from ...workers.transport.payload import Tree
from ..observe.placeholder import Placeholder
from ..observe.unread_fields import FieldNeeded
from .observed_stage import ObservedStage


class ObservedSlice:
    """The `Slice` of a stage of a model that is cut by observation.

    Args:
        cut: the calls of blocks of every stage.
        shared: as in `Slice`.
        buffers: names of the buffers whose valid values this stage has.
    """

    takes_fields = True

    def __init__(
        self, stage: ObservedStage, cut: Sequence[range], shared: Mapping[str, Sequence[int]], buffers: set[str]
    ) -> None:
        self.stage = stage
        self.first = cut[stage.index].start
        self.shared = shared
        self.modules = list(stage.module.modules())
        self.own = stage.own_modules()
        self._buffers = buffers

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.stage.named_parameters())

    def expected_writes(self) -> tuple[Collection[tuple[nn.Module, str]], Collection[Tensor]]:
        return self.stage.writes.observed

    def ranks(self) -> Mapping[str, int]:
        return self.stage.ranks

    def state_dict(self) -> dict[str, Tensor]:
        module = self.stage.module
        buffers = dict(module.named_buffers(remove_duplicate=False))
        others = {id(buffer) for name, buffer in buffers.items() if name not in self._buffers}
        return {
            name: tensor.detach() if isinstance(tensor, Tensor) else tensor
            for name, tensor in module.state_dict(keep_vars=True).items()
            if not isinstance(tensor, Placeholder) and id(tensor) not in others
        }

    def versions(self) -> dict[str, dict[str, Any]]:
        return versions_of(self.stage.module)

    def forward(self, tree: Tree, fields: Tree, seed: Seed, times: Times | None) -> Tree:
        try:
            if not isinstance(fields, PartialFields):
                return self._run(tree, fields, seed)
            try:
                return self._run(tree, self.stage.filled(fields.tree, fields.unread), seed)
            except FieldNeeded as needed:
                if fields.whole is None:
                    raise self._refused(fields, needed) from None
                return self._run(tree, fields.whole(), seed)
        except ConfigError:
            raise
        except Exception as error:
            note(error, f"in stage {self.stage.index} of {type(self.stage.module).__name__}")
            raise

    def _run(self, tree: Tree, fields: Tree, seed: Seed) -> Tree:
        args, kwargs = fields
        handed = None
        if tree and type(tree[-1]) is str:
            *tree, handed = tree
        output = self.stage.forward(tree, args, kwargs, seed)
        script = self.stage.script
        assert script is not None
        if handed is not None:
            script.check_sources(handed)
        if script.is_announced:
            return output
        script.is_announced = True
        return *output, script.sent_from  # once, since each stage has observed the forward itself

    def _refused(self, fields: PartialFields, needed: FieldNeeded) -> ModelError:
        names = ", ".join("".join(f"[{key!r}]" for _, key in path[1:]) for path in fields.unread)
        return ModelError(
            f"model: stage {self.stage.index} uses one of {names} of this batch ({needed}), and was not seen to when "
            f"the model was cut; with readers='first' it cannot read more: cut the model with an example= in which it "
            f"does, or let readers be users"
        )
