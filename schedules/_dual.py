"""The order that DualPipe and DualPipeV share: two streams that meet on a worker."""

from ..dependency import B, F, I, W
from ._vee import Listed, Listing, slots


class Dual(Listed):
    """A schedule whose backward is split where the timetables of its workers say so."""

    def splits(self, stage: int, microbatch: int) -> bool:
        backward = I(stage, microbatch)
        return backward in slots(self, self.worker(backward))


def dual_order(depth: int, count: int, worker: int, down: int, up: int) -> Listing:
    """Return the timetable of a worker on which the streams of stages `down` and `up` meet.

    `worker` counts from the stream's ends, of which there are `depth`; each stream has `count` microbatches,
    2 `depth` at least, numbered by stream. Where the published code overlaps a forward with a backward, they are
    neighbours here, forward first. When there are no more forwards, their slots stay empty.
    """
    near, far = worker + 1, depth - worker - 1
    todo = Listing(begin=worker)
    todo.add(*[(F, down)] * (2 * far))
    todo.add(*[(F, down), (F, up)] * near)
    todo.add(*[(I, up), (W, up), (F, up)] * far)
    todo.add(*[(F, down), (B, up), (F, up), (B, down)] * (count - 2 * depth + near))
    todo.add(*[(B, up), (F, up), None, (B, down)] * far)
    for turn, stage in enumerate([up, down] * near):
        todo.add((B if turn < near else I, stage))
    for _ in range(far):
        todo.add(todo.longest_waiting()[0], (I, down))
    todo.add(*todo.longest_waiting())
    return todo
