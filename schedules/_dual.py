"""The order that DualPipe and DualPipeV share: two streams that meet on a worker."""

from functools import cached_property

from ..dependency import Action, B, F, I, W
from ._vee import Listed, Listing


class Dual(Listed):
    """A schedule whose backward is split where the lists of its workers say so."""

    @cached_property
    def _split(self) -> set[Action]:
        return {action for order in self._orders for action in order if action.kind is I}

    def splits(self, stage: int, microbatch: int) -> bool:
        return I(stage, microbatch) in self._split


def dual_order(depth: int, count: int, worker: int, down: int, up: int) -> list[Action]:
    """Return the order of a worker on which the streams of stages `down` and `up` meet.

    `worker` counts from the stream's ends, of which there are `depth`; each stream has `count` microbatches,
    2 `depth` at least, numbered by stream. Where the published code overlaps a forward with a backward, they are
    neighbours here, forward first.
    """
    near, far = worker + 1, depth - worker - 1
    todo = Listing()
    todo.add(*[(F, down)] * (2 * far))
    todo.add(*[(F, down), (F, up)] * near)
    todo.add(*[(I, up), (W, up), (F, up)] * far)
    todo.add(*[(F, down), (B, up), (F, up), (B, down)] * (count - 2 * depth + near))
    todo.add(*[(B, up), (F, up), (B, down)] * far)
    for turn, stage in enumerate([up, down] * near):
        todo.add((B if turn < near else I, stage))
    for _ in range(far):
        todo.add((W, todo.split[0].stage), (I, down))
    todo.add(*[(W, action.stage) for action in todo.split])
    return todo.actions
