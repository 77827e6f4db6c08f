"""Windows by the sizes of unequal microbatches: as many in flight as have so many tokens together."""

from functools import lru_cache
from itertools import accumulate, product
from typing import Any

from ..dependency import Action, B, ConfigError, F, I, Kind, W

#: slots of actions that may end at the same time: a backward goes first, as others wait for it
_BESIDE = {F: 1, W: 2}
#: place of a worker's stage among its stages, and a microbatch
_Turn = tuple[int, int]


class Windows:
    """The windows of a step whose microbatches have sizes.

    Each worker runs forwards in one order, and ends of microbatches (B or W) in another. A forward waits for the ends
    after which the worker holds sizes of at most `window_tokens`, its own included. The orders of all workers are
    alike, so a forward that waits for no later forward on its own worker does so on none: nothing deadlocks.

    Args:
        spec: a `Windowed`, with sizes.
    """

    def __init__(self, spec: Any) -> None:
        self._workers, self._ends_by = spec.num_workers, W if spec.split_backward else B
        begins, ends = self._turns(spec, F), self._turns(spec, self._ends_by)
        begun, ended = ([0, *accumulate(spec.sizes[m] for _, m in turns)] for turns in (begins, ends))
        place = {turn: number for number, turn in enumerate(begins)}
        free, least = 0, 0.0
        waits = [0]  # by place of a forward, how many ends it waits for
        for number in range(len(begins)):
            while free < number and place[ends[free]] < number:
                free += 1
            least = max(least, begun[number + 1] - ended[free])
            over = begun[number + 1] - spec.window_tokens
            waits.append(next((n for n in range(waits[-1], free) if ended[n] >= over), free))
        if least > spec.window_tokens:
            raise ConfigError(f"window_tokens {spec.window_tokens}: must be at least {least:g} for these microbatches")
        del waits[0]
        self._before = {turn: ends[wanted - 1] for turn, wanted in zip(begins, waits, strict=True) if wanted}
        #: the most microbatches in flight
        self.widest = max(number + 1 - wanted for number, wanted in enumerate(waits))
        self.slots: dict[Action, int] = {}
        self._last: dict[tuple[Kind, int], int] = {}
        done = 0
        for wanted, turn in zip([*waits, len(ends)], [*begins, None], strict=True):
            for kind, end in product((I, W) if spec.split_backward else (B,), ends[done:wanted]):
                self._run(kind, end)
            done = wanted
            if turn is not None:
                self._run(F, turn)

    def _turns(self, spec: Any, kind: Kind) -> list[_Turn]:
        """Return the turns of a worker in the order of its actions of a kind."""
        turns = product(range(spec.num_stages // self._workers), range(spec.num_microbatches))
        return sorted(turns, key=lambda turn: spec.ordinal(kind(turn[0] * self._workers, turn[1])))

    def after(self, a: Action) -> list[Action]:
        """Return the needs of a forward by its window."""
        chunk, worker = divmod(a.stage, self._workers)
        found = self._before.get((chunk, a.microbatch)) if a.kind is F else None
        return [] if found is None else [self._ends_by(found[0] * self._workers + worker, found[1])]

    def _run(self, kind: Kind, turn: _Turn) -> None:
        """Note when an action of each worker can have ended by its needs, if all take 1 and whole backwards 2."""
        workers = range(self._workers)
        for worker in workers if kind is F else reversed(workers):
            s, m = turn[0] * self._workers + worker, turn[1]
            needs = kind(s - kind.way, m), F(s, m), I(s, m), *self.after(kind(s, m))
            known = [self.slots.get(need, 0) // 3 for need in needs]
            end = self._last[kind, worker] = 1 + (kind is B) + max(*known, self._last.get((kind, worker), 0))
            self.slots[kind(s, m)] = 3 * end + _BESIDE.get(kind, 0)


windows = lru_cache(maxsize=16)(Windows)
