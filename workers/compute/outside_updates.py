"""Weights that an optimizer moves outside of an update, as to an average for an evaluation and back."""

from __future__ import annotations

from torch import Tensor

from ...dependency import ConfigError
from .updating import Updating


class OutsideUpdates:
    """Finds such moves of a shard's weights, where other copies of them stay behind.

    With `zero=1` an optimizer has its replica's weights alone; no optimizer has the reference that `avgpipe` evaluates.
    """

    def __init__(self, stage: int, updating: Updating) -> None:
        self._stage, self._updating = stage, updating
        self.note()

    def note(self) -> None:
        """Know that the present weights were put there by the pipeline."""
        self._noted = self._now()

    def _now(self) -> dict[Tensor, tuple[int, int]]:
        return {weight: (weight._version, weight.data_ptr()) for weight in self._updating.parameters.values()}

    def refuse(self) -> None:
        """Refuse a move of all weights that the optimizer has, and of no other ones, since then.

        Raises:
            ConfigError: there is one.
        """
        optimizer, now = self._updating.optimizer, self._now()
        changed = {weight for weight in now if now[weight] != self._noted[weight]}
        if not changed or optimizer is None:
            return
        has = {weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
        if (has & optimizer.state.keys() or has) <= changed <= has:
            where, behind, cure = "zero=1", "other replicas do not follow", "leave zero out"
            if self._updating.owned is None:
                where, behind, cure = "pull", "the reference of all pipelines does not follow", "take another schedule"
            raise ConfigError(
                f"{where}: {type(optimizer).__name__} has moved the weights that it has of stage {self._stage} outside "
                f"of an update, and {behind}; {cure}"
            )
