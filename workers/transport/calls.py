"""A worker's calls, run by run, compared with the calls that its peers have told. Loads without torch."""

from collections.abc import Callable, Iterable

from ...dependency import Disagreement
from .call import Call, parse

#: number of calls that are remembered for workers that are behind
_REMEMBERED = 1024


class Calls:
    """The calls of a worker, run by run, and the peers' calls.

    Thread-safe without a lock: each change is one step of the interpreter, and the thread that has made a change then
    compares all known calls. So the later of two changes sees both; if both threads do, no harm is done.

    Args:
        differs: called, in any thread, with the difference.
    """

    def __init__(self, worker: int, differs: Callable[[Disagreement], None]) -> None:
        self._worker = worker
        self._differs = differs
        #: runs begun
        self.number = 0
        self._calls: dict[int, Call] = {}
        #: by peer and run, from peers that are ahead
        self._told: dict[tuple[int, int], str] = {}
        #: runs that have not ended, and the oldest one if it does not rest
        self._open: set[int] = set()
        self._goes_on = 0
        self._left = False

    def begin(self, call: Call) -> int:
        """Count another run of all workers, which is for `call`, and return its number."""
        if self._open and not self._goes_on:
            call = call._replace(within=str(min(self._open)))
        run = self.number + 1
        self._calls[run] = call  # before it counts as begun: see `_compare`
        self._open.add(run)
        self.number = run
        self._calls.pop(run - _REMEMBERED, None)
        self._compare()
        return run

    def end(self, run: int) -> None:
        """`run` is over."""
        self._open.discard(run)

    def go_on(self, run: int) -> None:
        """The caller has asked for the result of `run`, the oldest that has begun; 0: it has it, the next one rests."""
        self._goes_on = run
        self._compare()

    def named(self, runs: Iterable[int]) -> str:
        """Return this worker's calls in `runs`."""
        return " and ".join(self._calls[run].what for run in runs if run in self._calls)

    def told(self, run: int) -> str:
        """Return the text of the call of `run` for peers."""
        return self._calls[run].told()

    def leave(self) -> None:
        """Know that this worker begins no other run."""
        self._left = True
        self._compare()

    def heard(self, peer: int, run: int, text: str) -> None:
        """Compare a call of `peer` with this worker's call of that run, now or when it is made."""
        parse(peer, text)
        self._told[peer, run] = text
        self._compare()

    def missed(self, peer: int, run: int) -> Disagreement:
        """Report that `peer`, which has left, takes no part in `run`."""
        from .call_difference import left

        return left(peer, self._calls[run])

    def _compare(self) -> None:
        begun, goes_on = self.number, self._goes_on
        for (peer, run), text in list(self._told.items()):
            call = self._calls.get(run)
            if call is not None or run <= begun:
                self._told.pop((peer, run), None)
            if call is not None and text == call.told():
                continue
            from .call_difference import differ, difference, left  # few calls differ

            other, found = parse(peer, text), None
            if call is not None:
                found = difference(call, peer, text)
            elif self._left:
                found = left(self._worker, other)
            elif goes_on and other.within == str(goes_on):  # it waits for this worker before a run that continues here
                found = differ(self._calls[goes_on], other)
            if found is not None:
                self._differs(found)
