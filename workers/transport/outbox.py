"""What a worker has finished and others have not taken yet.

A consumer asks by key, before or after the payload is there; the answer comes when it is. A payload stays
until every consumer has said that it arrived: no worker leaves with what another still needs. Handlers
call `ask` and `taken` from any thread; they neither block nor compute.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from ...dependency import PipeError
from .call import Call, difference, is_call, left, parse
from .payload import Payload

#: (run of the pipeline, what): unique for the life of a worker
Key = tuple[int, str]
#: a payload, None for an action whose being finished is all that counts, or why there will be none
Answer = Payload | None | PipeError
Reply = Callable[[Answer], None]

#: so many calls are remembered for workers that are behind
_REMEMBERED = 16


class Outbox:
    """Thread-safe store of finished payloads, by key, until taken."""

    def __init__(self) -> None:
        #: number of the current run; counted here so that it goes on for the life of the worker
        self.run = 0
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        #: whether somebody waits for a change: telling nobody takes as long as everything else here
        self._awaited = False
        #: payload (None while it is on its way here from the device) and who has not taken it
        self._payloads: dict[Key, tuple[Payload | None, set[int]]] = {}
        #: finished actions of this run; of those before it all are
        self._finished: set[Key] = set()
        self._asked: dict[Key, dict[int, Reply]] = {}
        self._failure: PipeError | None = None
        #: by number of the run: what this worker was asked for, and what others say that they were, if it is ahead
        self._calls: dict[int, Call] = {}
        self._told: dict[int, dict[int, str]] = {}
        self._left_by: int | None = None

    def __len__(self) -> int:
        return len(self._payloads)

    def begin(self, call: Call) -> None:
        """Count another run of all workers, which is for `call`.

        Every action of those before it is finished, whoever still asks, so nothing is kept.

        Raises:
            PipeError: this worker has failed before, or others were asked for something else.
        """
        with self._lock:
            self.run += 1
            self._finished.clear()
            self._calls[self.run] = call
            self._calls.pop(self.run - _REMEMBERED, None)
            told = self._told.pop(self.run, {})
        for peer, text in told.items():
            self._compare(call, peer, text)
        self.raise_failure()

    def end(self, worker: int) -> None:
        """Know that `worker`, whose outbox this is, begins no other run."""
        with self._lock:
            self._left_by = worker
            told = [pair for pairs in self._told.values() for pair in pairs.items()]
        for peer, text in told:
            self.fail(left(worker, parse(peer, text)))

    def _heard(self, run: int, text: str, peer: int) -> None:
        """Compare what `peer` says it was asked for with what this worker is, was or will be asked for."""
        with self._lock:
            call = self._calls.get(run)
            if call is None and run > self.run and self._left_by is None:
                self._told.setdefault(run, {})[peer] = text
                return
        if call is not None:
            self._compare(call, peer, text)
        elif self._left_by is not None:
            self.fail(left(self._left_by, parse(peer, text)))

    def _compare(self, call: Call, peer: int, text: str) -> None:
        different = difference(call, peer, text)
        if different is not None:
            self.fail(different)

    def promise(self, key: Key, consumers: Iterable[int]) -> None:
        """Announce that `put` will offer a payload to `consumers` later; from now the outbox is not empty."""
        with self._lock:
            self._payloads[key] = None, set(consumers)

    def put(self, key: Key, payload: Payload, consumers: Iterable[int]) -> None:
        """Offer `payload` under `key`; each consumer takes it once."""
        with self._lock:
            # What was promised counts less those who have left since.
            _, waiting = self._payloads.get(key, (None, set(consumers)))
            self._payloads[key] = payload, waiting
            asked = self._asked.pop(key, {})
        for consumer, reply in asked.items():
            assert consumer in waiting, f"worker {consumer} asked for {key}, which is for {waiting}"
            reply(payload)

    def finish(self, key: Key) -> None:
        """Note that `key` is finished, for those who need to know only that."""
        with self._lock:
            self._finished.add(key)
            asked = self._asked.pop(key, {})
        for reply in asked.values():
            reply(None)

    def ask(self, key: Key, consumer: int, reply: Reply) -> None:
        """Call `reply` with what `key` holds, now or when it is there. Asking again replaces the question.

        What tells a call asks for nothing and gets no reply.
        """
        if is_call(key[1]):
            self._heard(*key, consumer)
            return
        with self._lock:
            answer: Answer = self._failure
            known = key in self._finished or key[0] < self.run
            if answer is None and key in self._payloads:
                answer, known = self._payloads[key][0], False
            if answer is None and not known:
                self._asked.setdefault(key, {})[consumer] = reply
                return
        reply(answer)

    def taken(self, keys: Iterable[Key], consumer: int) -> None:
        """Free what has arrived at `consumer`; saying it twice does no harm."""
        with self._lock:
            for key in keys:
                kept = self._payloads.get(key)
                if kept is not None:
                    kept[1].discard(consumer)
                    if not kept[1]:
                        del self._payloads[key]
            if self._awaited:
                self._changed.notify_all()

    def fail(self, failure: PipeError) -> None:
        """Answer every question, now and from now on, with the reason why there is no payload."""
        with self._lock:
            self._failure = self._failure or failure
            asked, self._asked = self._asked, {}
            if self._awaited:
                self._changed.notify_all()
        for replies in asked.values():
            for reply in replies.values():
                reply(failure)

    def leaves(self, consumer: int) -> None:
        """`consumer` takes nothing more."""
        with self._lock:
            waited = [key for key, (_, waiting) in self._payloads.items() if consumer in waiting]
        self.taken(waited, consumer)

    @property
    def failed(self) -> bool:
        """Whether this worker has failed: then it waits for nobody."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise what `fail` was told first, if it was."""
        if self._failure is not None:
            raise self._failure

    def waiting(self) -> set[int]:
        """Return who has not taken something yet."""
        with self._lock:
            return {consumer for _, consumers in self._payloads.values() for consumer in consumers}

    def holds(self, before: int) -> bool:
        """Tell whether a payload of a run before `before` has not been taken."""
        with self._lock:
            return any(run < before for run, _ in self._payloads)

    def wait_taken(self, before: int, timeout_s: float) -> None:
        """Wait until every payload of the runs before `before` has been taken.

        Raises:
            PipeError: it was not, in time, or never will be.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._awaited = True
            try:
                while kept := [item for item in self._payloads.items() if item[0][0] < before]:
                    self.raise_failure()
                    if not self._changed.wait(deadline - time.monotonic()):
                        names = ", ".join(f"{what} by {sorted(who)}" for (_, what), (_, who) in kept)
                        raise PipeError(f"not taken from the outbox after {timeout_s:g} s: {names}")
            finally:
                self._awaited = False
