"""Boards in a later epoch of an elastic job: they show the schedule of the workers that are left."""

from __future__ import annotations

from contextlib import suppress

from ..tracing.own_boards import boards, header_of


def show(epoch: int) -> None:
    """Begin the boards of this process anew, without the steps of before."""
    training, written = boards()
    for actor in () if training is None else training.actors:
        assert training is not None
        board, header = written[actor.carrier.plane.rank(actor.worker)], header_of(training, actor, epoch)
        board.write_out()
        board.header = header | {name: board.header[name] for name in ("started", "clock_ns")}
        board._row = list(training.spec.workers).index
        board._steps, board._program, board._most_listed = {}, {}, 0
        with suppress(OSError):  # training does not depend on being watched
            board._begin()
        board._list(header["microbatches"])
