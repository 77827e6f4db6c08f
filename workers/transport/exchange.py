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
from typing import Any, NamedTuple

from ...dependency import PipeError
from .message import Message
from .outbox import Answer, Key

#: so many requests may lie here unanswered, for want of anything to say
_HELD_LIMIT = 32
#: arrivals are told with the next message, or alone once there are so many, or so many bytes, of them
_UNTOLD_LIMIT, _UNTOLD_BYTES = 8, 4 * 2**20


class Outgoing(NamedTuple):
    """What to send, and the held request that it answers; None: it is a request of its own."""

    message: Message
    held: Any


class Exchange:
    """One worker's end of its exchange with one peer. Thread-safe.

    What is said here makes it `urgent` if it is to be sent now; whoever says it then has `outgoing` called until that
    returns None.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._asks: list[Key] = []
        self._taken: list[Key] = []
        self._taken_bytes = 0
        self._answers: list[tuple[Key, Answer]] = []
        self._failure: PipeError | None = None
        self._held: deque[Any] = deque()  # the peer's requests
        self._outstanding = 0  # our requests that the peer holds
        #: whether one of the two has left
        self.closed = False
        #: whether `outgoing` has something to say now
        self.urgent = False
        #: whether the peer has ever said anything
        self.heard = False

    def ask(self, keys: list[Key]) -> None:
        """Ask for all of `keys`."""
        with self._lock:
            self._asks += keys
            self.urgent = True

    def answer(self, key: Key, answer: Answer) -> None:
        """Say `answer` to the peer's question for `key`."""
        with self._lock:
            self._answers.append((key, answer))
            self.urgent = True

    def fail(self, failure: PipeError) -> None:
        """Say why there are no more answers; to be said again to who asks again."""
        with self._lock:
            self._failure = failure
            self.urgent = True

    def hold(self, request: Any) -> None:
        """Keep a request of the peer, to answer it when there is something to say."""
        with self._lock:
            self.heard = True
            self._held.append(request)
            self.urgent |= len(self._held) > _HELD_LIMIT

    def received(self, message: Message, own: bool) -> None:
        """Note what a message has brought; `own`: it is the answer to a request of ours."""
        with self._lock:
            self.heard = True
            self._outstanding -= own
            for key, answer in message.answers:
                if answer is not None:
                    self._taken.append(key)
                    self._taken_bytes += answer.num_bytes
            self.urgent |= len(self._taken) >= _UNTOLD_LIMIT or self._taken_bytes >= _UNTOLD_BYTES
            self.urgent |= not self._outstanding

    def hurry(self) -> None:
        """Let what could have waited for company be sent."""
        with self._lock:
            self.urgent |= bool(self._taken)

    def close(self) -> tuple[Message, list[Any]]:
        """One of the two leaves: return what is still to be said, and the peer's requests that are still held."""
        with self._lock:
            self.closed, self.urgent = True, False
            held, self._held = list(self._held), deque()
            return self._gathered(), held

    def outgoing(self) -> Outgoing | None:
        """Return what is to be sent next, with all that has gathered; None: nothing."""
        with self._lock:
            if not self.urgent or self.closed:
                return None
            self.urgent = False
            message = self._gathered()
            # The last one stays, as the peer's lifeline; and so does one of ours at the peer.
            if len(self._held) > 1 and self._outstanding:
                return Outgoing(message, self._held.popleft())
            self._outstanding += 1
            return Outgoing(message, None)

    def unsent(self, held: Any) -> None:
        """What `outgoing` returned last could not be sent."""
        with self._lock:
            if held is None:
                self._outstanding -= 1
            else:
                self._held.appendleft(held)

    def _gathered(self) -> Message:
        message = Message(self._asks, self._taken, self._answers, self._failure)
        self._asks, self._taken, self._answers, self._failure, self._taken_bytes = [], [], [], None, 0
        return message
