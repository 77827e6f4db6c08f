"""The order that DualPipe and DualPipeV share: two streams that meet on a worker."""

from ..dependency import B, F, I, W
from ._vee import Listed, Listing


class Dual(Listed):
    """A schedule with a split backward where the timetable of the worker lists `I`."""

    def splits(self, stage: int, microbatch: int) -> bool:
        return self.run(I(stage, microbatch)) is not None


def dual_order(depth: int, count: int, worker: int, down: int, up: int) -> Listing:
    """Return the timetable of a worker on which the streams of stages `down` and `up` meet.

    `worker` is the distance from the streams' ends, 0 to `depth` - 1. Each stream has `count` microbatches, at least
    2 `depth`, numbered by stream. Where the published code overlaps a forward with a backward, they are neighbours
    here, forward first. When there are no more forwards, their slots stay empty.
    """
    near, far = worker + 1, depth - worker - 1
    todo = Listing(begin=worker)
    todo.add((F, down), times=2 * far)
    todo.add((F, down), (F, up), times=near)
    todo.add((I, up), (W, up), (F, up), times=far)
    todo.add((F, down), (B, up), (F, up), (B, down), times=count - 2 * depth + near)
    todo.add((B, up), (F, up), None, (B, down), times=far)
    todo.alternate([(B, up)], [(B, down)], near)
    first, second = (down, up) if near % 2 else (up, down)
    todo.alternate([(I, first)], [(I, second)], near)
    # The oldest waiting W first: from both streams in turn, then from the stream down.
    turns = min(near, far)
    todo.alternate([(W, first), (I, down)], [(W, second), (I, down)], turns)
    todo.add((W, down), (I, down), times=far - turns)
    if turns % 2:
        first, second = second, first
    todo.alternate([(W, first)], [(W, second)], near - turns)
    todo.add((W, down), times=turns)
    return todo
