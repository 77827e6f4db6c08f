"""What two workers say to each other, in as few messages as possible. No thread, no socket, no tensor work.

A message carries everything that goes one way: questions, answers, and the news of what has arrived. It
travels either as a request of its own or as the answer to a request that the peer left here for that purpose
(a long poll), so where payloads go both ways, as forwards and backwards do, each payload costs one message:

    worker 0                                     worker 1
       request: 1 wants 0F0 0F1 .. ───────────────  (held by 0: the lifeline)
       request: 0F5, asks ────────────────────────> held by 1
       <─────────────── answer to it: 1B4, took 0F5

One request of each side, once they talk, always stays with the other: if the peer dies, it breaks, and so tells.
No request has a timeout: TCP delivers or breaks, and a large payload on a slow link may take long. That nothing at
all arrives is the mailbox's to notice.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from .carrier import Deliver
from .outbox import Answer, Key
from .payload import Payload

#: so many requests may lie here unanswered, for want of anything to say
_HELD_LIMIT = 32
#: arrivals are told with the next message, or alone once there are so many, or so many bytes, of them
_UNTOLD_LIMIT, _UNTOLD_BYTES = 8, 2**20


class Message(NamedTuple):
    """All that one worker has to say to another at one moment."""

    asks: list[Key]
    taken: list[Key]
    answers: list[tuple[Key, Answer]]


NOTHING = Message([], [], [])


class Outgoing(NamedTuple):
    """What to send, and the held request that it answers; None: it is a request of its own."""

    message: Message
    held: Any


class Exchange:
    """One worker's end of its exchange with one peer. Thread-safe.

    Every method but `outgoing` says whether something is to be sent now; whoever calls it then has
    `outgoing` called until that returns None.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: dict[Key, Deliver] = {}  # questions without answer
        self._asks: list[Key] = []
        self._taken: list[Key] = []
        self._taken_bytes = 0
        self._answers: list[tuple[Key, Answer]] = []
        self._held: deque[Any] = deque()  # the peer's requests
        self._outstanding = 0  # our requests that the peer holds
        self._urgent = False
        self._closed = False
        #: whether the peer has ever said anything
        self.heard = False

    def ask(self, questions: Mapping[Key, Deliver]) -> None:
        """Ask for all of `questions`; each `deliver` is called once."""
        with self._lock:
            self._open.update(questions)
            self._asks += questions
            self._urgent = True

    def say(self, key: Key) -> None:
        """Send `key`, which needs no answer, with what is asked next."""
        with self._lock:
            self._asks.append(key)

    def answer(self, key: Key, answer: Answer) -> None:
        """Say `answer` to the peer's question for `key`."""
        with self._lock:
            self._answers.append((key, answer))
            self._urgent = True

    def hold(self, request: Any) -> None:
        """Keep a request of the peer, to answer it when there is something to say."""
        with self._lock:
            self.heard = True
            self._held.append(request)
            self._urgent |= len(self._held) > _HELD_LIMIT

    def received(self, message: Message, own: bool) -> list[tuple[Deliver, Answer]]:
        """Take in a message; `own`: it is the answer to a request of ours. Return what is to be delivered."""
        deliveries = []
        with self._lock:
            self._outstanding -= own
            self.heard = True
            for key, answer in message.answers:
                deliver = self._open.pop(key, None)
                if deliver is not None:  # else given up
                    deliveries.append((deliver, answer))
                if isinstance(answer, Payload):
                    self._taken.append(key)
                    self._taken_bytes += answer.num_bytes
            self._urgent |= len(self._taken) >= _UNTOLD_LIMIT or self._taken_bytes >= _UNTOLD_BYTES
            self._urgent |= not self._outstanding
        return deliveries

    def answered(self, key: Key) -> Deliver | None:
        """Note that the answer for `key` came another way; return whom to give it to, None if it was given up."""
        with self._lock:
            return self._open.pop(key, None)

    def broken(self) -> list[Deliver]:
        """The peer cannot be reached: give up. Return who waits for an answer."""
        with self._lock:
            self._outstanding -= 1
            waiting, self._open = list(self._open.values()), {}
            return waiting

    def flush(self) -> None:
        """Let what could have waited for company be sent."""
        with self._lock:
            self._urgent |= bool(self._taken)

    def last_words(self) -> Message:
        """Return all that is still to be said."""
        with self._lock:
            return self._gathered()

    def close(self) -> list[Any]:
        """One of the two leaves: say nothing more. Return the peer's requests that are still held."""
        with self._lock:
            self._closed, self._urgent = True, False
            held, self._held = list(self._held), deque()
            return held

    @property
    def closed(self) -> bool:
        """Whether one of the two has left."""
        return self._closed

    @property
    def urgent(self) -> bool:
        """Whether `outgoing` has something to say now."""
        return self._urgent

    def outgoing(self) -> Outgoing | None:
        """Return what is to be sent next, with all that has gathered; None: nothing."""
        with self._lock:
            if not self._urgent or self._closed:
                return None
            self._urgent = False
            message = self._gathered()
            # The last one stays, as the peer's lifeline; and so does one of ours at the peer.
            if len(self._held) > 1 and self._outstanding:
                return Outgoing(message, self._held.popleft())
            self._outstanding += 1
            return Outgoing(message, None)

    def _gathered(self) -> Message:
        message = Message(self._asks, self._taken, self._answers)
        self._asks, self._taken, self._answers, self._taken_bytes = [], [], [], 0
        return message
