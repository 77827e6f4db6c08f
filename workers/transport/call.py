"""The user's call on a worker, compared with the peers' calls: workers make the same call or stop. Loads without torch.

A call travels with the first questions of every run and needs no answer: its receiver compares it with the local call
of that number and, if they differ, answers with the difference alone. So no run uses payloads of another call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ...dependency import Disagreement, Malformed

_CALL = "call "
_FIELDS, _PARTS = "\x1f", "\x1e"
#: marks a stage with the digest of weights that its forwards write
WRITTEN = "*"
#: number of calls that are remembered for workers that are behind
_REMEMBERED = 1024


class Call(NamedTuple):
    """One call of the pipeline on one worker. A field is empty where there is nothing to compare."""

    worker: int
    #: such as `step 3`, `evaluate` or `gather state`
    what: str
    #: the pipeline that was called
    pipeline: str = ""
    #: form and digests of the arguments, from `compute.digest.describe`
    inputs: str = ""
    targets: str = ""
    #: digests of the initial weights of stages that several workers hold, such as `0=5f3a 3=77bb`, or of written ones
    weights: str = ""
    #: the run that rests while this call is made: the step that `train` has begun where the body of its loop is
    within: str = ""
    #: numbers of the microbatches in the order in which they run, if it is not the order given
    order: str = ""

    def told(self) -> str:
        """Return this, less the worker, as the name of a question that asks for nothing."""
        # Half of a pair of UTF-16, as in names of files, is no text of a message.
        return _CALL + _FIELDS.join(self[1:]).encode(errors="backslashreplace").decode()


def parse(peer: int, told: str) -> Call:
    """Return the call in a message of `peer`.

    Raises:
        Malformed: there is none.
    """
    fields = told.removeprefix(_CALL).split(_FIELDS)
    if len(fields) != len(Call._fields) - 1 or any(pair.count("=") != 1 for pair in fields[4].split()):
        raise Malformed(f"malformed message: worker {peer} told no call")
    return Call(peer, *fields)


def is_call(what: str) -> bool:
    """Return whether a question was made by `Call.told`."""
    return what.startswith(_CALL)


def pack_description(form: str, digests: list[int]) -> str:
    """Describe inputs or targets: a name, and digests; the last digest may be missing."""
    return _PARTS.join([form, *(f"{digest:x}" for digest in digests)])


def difference(call: Call, peer: int, told: str) -> Disagreement | None:
    """Compare `call` with the call of `peer`; return the difference, None if they agree."""
    if told == call.told():
        return None
    worker, other = call.worker, parse(peer, told)
    if call.what != other.what:
        return _differ(call, other)
    if call.pipeline != other.pipeline:
        return Disagreement(
            f"{call.what}: worker {worker} made the pipeline as {call.pipeline}, worker {peer} as {other.pipeline}: "
            "make it with the same arguments on every worker"
        )
    for name in ("inputs", "targets"):
        mine, theirs = (getattr(of, name).split(_PARTS) for of in (call, other))
        if mine[0] and theirs[0] and any(a != b for a, b in zip(mine, theirs, strict=False)):
            values = ", with other values" if mine[0] == theirs[0] else ""
            return Disagreement(
                f"{call.what}: worker {worker} and worker {peer} were given different {name} ({mine[0]} and "
                f"{theirs[0]}{values}): give every worker the same batch; seed alike on every worker before data are "
                "drawn or shuffled (`torch.manual_seed(0)`), draw nothing on one worker alone (a DataLoader's iterator "
                "draws, too), and use no sampler that gives each worker a share (DistributedSampler)"
            )
    if call.order != other.order:
        return Disagreement(
            f"{call.what}: worker {worker} runs microbatches as {call.order or 'given'}, worker {peer} as "
            f"{other.order or 'given'}: microbatch_order and microbatch_cost must be the same on every worker"
        )
    weights = [dict(pair.split("=") for pair in of.weights.split()) for of in (call, other)]
    for stage in weights[0].keys() & weights[1].keys():
        if weights[0][stage] != weights[1][stage] and stage.endswith(WRITTEN):
            return Disagreement(
                f"{call.what}: workers {worker} and {peer} have different weights of stage {stage.rstrip(WRITTEN)}, "
                "which a forward writes by the rows of each replica: let the model run once before it is given, or "
                "take replicas=1"
            )
        if weights[0][stage] != weights[1][stage]:
            return Disagreement(
                f"{call.what}: workers {worker} and {peer} hold stage {stage} with different initial weights: seed "
                "alike on every worker before the model is built (`torch.manual_seed(0)`), or pass its layers as "
                "callables, whose weights depend on the pipeline's seed alone"
            )
    return None


def _differ(call: Call, other: Call) -> Disagreement:
    return Disagreement(
        f"worker {call.worker} calls {call.what} where worker {other.worker} calls {other.what}: every worker must "
        "make the same calls in the same order; is one made only by some workers, as in `if pipe.worker == 0`?"
    )


def left(peer: int, call: Call) -> Disagreement:
    """Return the error for a `peer` that makes no such call any more."""
    return Disagreement(
        f"worker {call.worker} calls {call.what}, but worker {peer} has ended its script: every worker must make the "
        "same calls; does one of them end its loop early, or was it killed?"
    )


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
        return left(peer, self._calls[run])

    def _compare(self) -> None:
        begun, goes_on = self.number, self._goes_on
        for (peer, run), text in list(self._told.items()):
            call, other, found = self._calls.get(run), parse(peer, text), None
            if call is not None or run <= begun:
                self._told.pop((peer, run), None)
            if call is not None:
                found = difference(call, peer, text)
            elif self._left:
                found = left(self._worker, other)
            elif goes_on and other.within == str(goes_on):  # it waits for this worker before a run that continues here
                found = _differ(self._calls[goes_on], other)
            if found is not None:
                self._differs(found)
