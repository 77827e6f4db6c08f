"""Weights that are moved outside of an update, as by an optimizer to an average for an evaluation and back."""

from torch import Tensor

from ...dependency import ConfigError
from .stash import VersionStore
from .updating import Updating


class OutsideUpdates:
    """Finds such moves of a shard's weights, where other copies of them stay behind.

    With `zero=1` an optimizer has its replica's weights alone; no module has the reference that `avgpipe` evaluates.

    Args:
        pulled: the versions of weights that are pulled to a reference; None: there is no reference.
    """

    def __init__(self, stage: int, updating: Updating, pulled: VersionStore | None) -> None:
        self._stage, self._updating, self.pulled = stage, updating, pulled
        self.note()

    def note(self) -> None:
        """Know that the present weights were put there by the pipeline."""
        self._noted = self._now()

    def _now(self) -> dict[Tensor, tuple[int, int]]:
        return {weight: (weight._version, weight.data_ptr()) for weight in self._updating.parameters.values()}

    def refuse(self) -> None:
        """Refuse a move of all weights that the optimizer has, and of no other ones; or of any that are pulled.

        Raises:
            ConfigError: there is one.
        """
        optimizer, now = self._updating.optimizer, self._now()
        changed = {weight for weight in now if now[weight] != self._noted[weight]}
        if changed and self.pulled is not None and self.pulled.reference is not None:
            why = f"pull: weights of stage {self._stage} were changed outside of an update, unlike the reference"
            raise ConfigError(f"{why}; change them before the first step or by pipe.weights, or take another schedule")
        if not changed or optimizer is None or self.pulled is not None:
            return
        has = {weight for group in optimizer.param_groups for weight in group["params"] if weight.requires_grad}
        if (has & optimizer.state.keys() or has) <= changed <= has:
            why = f"zero=1: {type(optimizer).__name__} moves weights of stage {self._stage} outside of an update"
            raise ConfigError(f"{why}, and other replicas do not follow; leave zero out")
