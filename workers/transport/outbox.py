"""The finished payloads of a worker that some consumer has not taken yet.

A consumer asks by key, before or after the payload is there; the answer leaves when it is. A payload stays
until every consumer has confirmed its arrival: no worker leaves with a payload that another still needs. Methods may
be called from any thread; they neither block nor compute.
"""

import threading
from collections.abc import Callable, Iterable

from ...dependency import Malformed, PipeError
from .payload import Payload

#: (run, what): unique for the life of a worker
Key = tuple[int, str]
#: suffix of an action's name, to pull its end without a payload
DONE = " done"
#: a payload, or None where the end of the action alone counts
Answer = Payload | None


class Outbox:
    """Thread-safe store of finished payloads, by key, until taken.

    Args:
        answer: gives an answer to a worker; returns whether the worker has it for good.
    """

    def __init__(self, answer: Callable[[int, Key, Answer | PipeError], bool]) -> None:
        self._answer = answer
        self._lock = threading.Lock()
        #: the last run that has begun, and the runs that have not ended
        self._run = 0
        self._open: set[int] = set()
        #: runs without further payloads
        self._abandoned: set[int] = set()
        #: payload (None while it is on its way here from the device) and the consumers that have not taken it
        self._payloads: dict[Key, tuple[Payload | None, set[int]]] = {}
        #: finished actions of runs that have not ended; in an ended run all are finished
        self._finished: set[Key] = set()
        self._asked: dict[Key, set[int]] = {}
        #: consumers that take nothing more
        self._left: set[int] = set()
        self.failure: PipeError | None = None
        #: whether a peer has an open pull for a run abandoned on this worker
        self.asked_in_vain = False

    def __len__(self) -> int:
        return len(self._payloads)

    def begin(self, run: int) -> None:
        """`run` has begun; runs begin in the order of their numbers, and may end in another."""
        with self._lock:
            self._run = run
            self._open.add(run)

    def end(self, run: int) -> None:
        """`run` is over: all its actions are finished for any later question."""
        with self._lock:
            self._open.discard(run)
            self._finished = {key for key in self._finished if key[0] != run}

    def abandon(self, run: int) -> None:
        """`run` is given up by all workers: keep nothing of it and answer no question, unless by a failure."""
        with self._lock:
            self._open.discard(run)
            self._abandoned.add(run)
            self.asked_in_vain |= any(key[0] == run for key in self._asked)
            self._finished = {key for key in self._finished if key[0] != run}
            self._payloads = {key: kept for key, kept in self._payloads.items() if key[0] != run}
            self._asked = {key: asked for key, asked in self._asked.items() if key[0] != run}

    def promise(self, key: Key, consumers: Iterable[int]) -> None:
        """Announce that `offer` will be called later; from now the outbox is not empty."""
        with self._lock:
            self._payloads[key] = None, set(consumers) - self._left

    def offer(self, key: Key, payload: Payload, consumers: Iterable[int]) -> None:
        """Let each consumer take `payload` once."""
        with self._lock:
            waiting = set(consumers) - self._left
            if key[0] in self._abandoned:
                return
            self._payloads[key] = payload, waiting
            if not waiting:
                del self._payloads[key]
            asked = self._asked.pop(key, set()) - self._left
        if not asked <= waiting:
            raise Malformed(f"workers {sorted(asked - waiting)} asked for {key}, which is for {sorted(waiting)}")
        for consumer in asked:
            self._say(consumer, key, payload)

    def finish(self, key: Key) -> None:
        """Mark `key` as finished, for consumers that need its end alone."""
        with self._lock:
            self._finished.add(key)
            asked = self._asked.pop(key, ())
        for consumer in asked:
            self._say(consumer, key, None)

    def ask(self, keys: Iterable[Key], consumer: int) -> None:
        """Answer `consumer`'s questions, now or when the answer is there. Asking again does no harm."""
        answers: list[tuple[Key, Answer | PipeError]] = []
        with self._lock:
            for key in keys:
                payload, _ = self._payloads.get(key, (None, None))
                if key[0] in self._abandoned and self.failure is None:
                    self.asked_in_vain = True
                    continue
                is_done = key in self._finished or (key[0] <= self._run and key[0] not in self._open)
                over = is_done and key not in self._payloads
                answer = self.failure or payload
                if answer is None and not over:
                    self._asked.setdefault(key, set()).add(consumer)
                else:
                    answers.append((key, answer))
        for key, answer in answers:
            self._say(consumer, key, answer)

    def _say(self, consumer: int, key: Key, answer: Answer | PipeError) -> None:
        if self._answer(consumer, key, answer) and answer is not None:
            self.taken([key], consumer)

    def taken(self, keys: Iterable[Key], consumer: int) -> None:
        """Free the payloads that have arrived at `consumer`; a repeated confirmation does no harm."""
        with self._lock:
            for key in keys:
                kept = self._payloads.get(key)
                if kept is not None:
                    kept[1].discard(consumer)
                    if not kept[1]:
                        del self._payloads[key]

    def leaves(self, consumer: int) -> None:
        """`consumer` takes nothing more."""
        with self._lock:
            self._left.add(consumer)
            waited = [key for key, (_, waiting) in self._payloads.items() if consumer in waiting]
        self.taken(waited, consumer)

    def has_left(self, consumer: int) -> bool:
        """Whether `consumer` takes nothing more."""
        return consumer in self._left

    def fail(self, failure: PipeError) -> None:
        """Answer every question, now and from now on, with the reason why there is no payload."""
        with self._lock:
            self.failure = self.failure or failure
            asked, self._asked = self._asked, {}
        for key, consumers in asked.items():
            for consumer in consumers:
                self._say(consumer, key, self.failure)

    def untaken(self, before: int | None = None, since: int = 0) -> dict[Key, set[int]]:
        """Return the payloads of runs `since` to `before` - 1 that were not taken, with their consumers."""
        with self._lock:
            return {
                key: set(waiting)
                for key, (_, waiting) in self._payloads.items()
                if since <= key[0] and (before is None or key[0] < before)
            }
