"""The time between two steps of `train`, for the caller, although forwards of the next step may have run."""

from typing import Any

from torch import nn

from ..dependency import ConfigError
from .compute.modules.module_state import HOOKS, ModuleState, OfWeight, fingerprint
from .compute.shard import Shard
from .step import Context, Step

#: by holder and name, values that can be changed by hand
_Values = dict[tuple[nn.Module | str, str], Any]


class BetweenSteps:
    """The time between two steps, when the caller may evaluate, save, or change modules by hand."""

    def __init__(self, worker: Context) -> None:
        self._worker = worker
        #: the state of modules behind forwards of the open step
        self._under_way: dict[Shard, ModuleState] = {}
        #: by shard, the values that show changes by hand
        self._notes: list[tuple[Shard, _Values]] = []
        #: evaluations before the pause between the steps
        self._evaluated = 0

    def begin(self, step: Step | None) -> None:
        """Show the caller the modules as they were before the forwards of `step`; None: no step has begun."""
        self._evaluated = self._worker.evaluated
        for shard, before in () if step is None else step.before.items():
            shard.turn()
            self._under_way[shard] = before.now()
            before.put_back()
        for shard in self._worker.shards.values():
            if not shard.is_guest:
                shard.turn()
        # All shards, also without a forward so far: the refusal of a change must not depend on timing.
        self._notes = [] if step is None else [(s, _values(s)) for s in self._worker.shards.values()]

    def end(self, step: Step | None) -> None:
        """Give modules back the state that forwards of `step` have left.

        Raises:
            ConfigError: the caller, or an evaluation, has changed state that these forwards had read.
        """
        notes, self._notes = self._notes, []
        has_evaluated = self._evaluated != self._worker.evaluated
        for shard, note in notes:
            if changed := _change(note, _values(shard), has_evaluated):
                fix = "call `step` for each batch, or `flush` before, if the schedule is not synchronous"
                raise ConfigError(f"stage {shard.stage}: {changed} between steps of `train`, the next one begun; {fix}")
        if step is not None and has_evaluated:
            for shard in self._under_way:
                if step.before[shard].overwritten(shard.slice.own):  # those of other stages follow the user's
                    why = "an evaluation changed what forwards of the next step have read"
                    raise ConfigError(f"stage {shard.stage}: {why}; call `step` for each batch, or evaluate behind")
        for shard, module_state in self._under_way.items():
            shard.turn()
            module_state.put_back()
        self._under_way = {}

    def abandon(self, step: Step) -> None:
        """Restore modules as they were before `step`, which is given up."""
        for shard, module_state in () if self._under_way else step.before.items():
            shard.turn()
            module_state.put_back()
        self._under_way, self._notes = {}, []


def _values(shard: Shard) -> _Values:
    """Return the values of a shard that can be changed by hand."""
    found: _Values = {}
    written = set(shard.state.weights)  # by forwards, also of an evaluation
    for name, parameter in shard.updating.parameters.items():
        if parameter not in written:
            version, address, trained, hooks = OfWeight.now(parameter)
            found |= {(name, "value"): (version, address), (name, "requires_grad"): trained, (name, "hooks"): hooks}
    for module in shard.slice.modules:
        found[module, "hooks"] = sum(len(vars(module).get(name) or ()) for name in HOOKS)
        found |= {(module, what): value for what, value in fingerprint(module).items()}
    return found


def _change(before: _Values, now: _Values, has_evaluated: bool) -> str:
    """Return a sentence on a change; "" if there is none.

    Args:
        has_evaluated: whether forwards have run since, which may have written attributes.
    """
    for of, what in before | now:
        if now.get((of, what)) == before.get((of, what)):
            continue
        if isinstance(of, str):
            return f"{what} of parameter {of} was changed"
        if what == "training" or not has_evaluated:
            return f"{what} of a {type(of).__name__} was changed"
    return ""
