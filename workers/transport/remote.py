"""A carrier between processes, less what brings a message from one to the other: see `rpc.py` for that.

A pull is a long poll, and what is said in both directions shares messages: see `exchange.py`. Whoever handles a request
only notes what it brings, so no thread is held and none computes. What the compute thread has to say it sends itself
where that is cheap or it has waited a short while ago, and else leaves to the sender's thread.
Answers to a worker of the same host take a shorter way: see `shared_memory.py`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor

from ...dependency import PipeError
from .carrier import LEFT, Carrier, Delivered
from .exchange import Exchange
from .message import NOTHING, Message, decode, encode
from .outbox import Answer, Key
from .shared_memory import Channels, Offer, Written
from .values import decode_value, encode_value
from .wakeup import Wakeup

logger = logging.getLogger(__name__)

#: how long a leaving worker waits for the others to take what it has made
_DRAIN_S = 300.0
#: how long a leaving worker waits for the others to read its last message
_LEAVE_S = 5.0
#: how long what a worker said before it left may take from one thread to another
_LAST_WORDS_S = 1.0
#: how often to look whether what was lent has been taken, while nothing else is to be done
_LENT_LOOK_S = 0.001
#: a compute thread that has waited within so many polls has time to send by itself
_RECENTLY = 5

#: answers a request, once
Reply = Callable[[Any], None]


class AnsweringForErrors:
    """A context for what another thread does: the worker fails with what goes wrong there, where nobody would hear it.

    Entered for each message, so no generator.
    """

    def __init__(self, fault: Callable[[BaseException], None]) -> None:
        self._fault = fault

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        if error is None:
            return False
        # SystemExit, or a panic of a library: raised again in the compute thread, it would end the script instead.
        self._fault(error if isinstance(error, Exception) else PipeError(f"a thread of the worker ended: {error!r}"))
        return True


def nothing(value: Any) -> None:
    """What to do with an answer that says nothing."""


class RemoteCarrier(Carrier):
    """Says in messages to other processes what is pulled and answered.

    Args:
        shared_memory: whether workers of one host answer each other through it, where that is possible.
    """

    #: whether to send something costs the compute thread no more than to have another thread do so
    _sends_cheaply = False

    def __init__(self, worker: int, num_workers: int, *, shared_memory: bool = True) -> None:
        wakeup = Wakeup()
        super().__init__(worker, num_workers, wakeup)
        self.answering_for_errors = AnsweringForErrors(self.fault)
        self._exchanges: dict[int, Exchange] = {}
        self._gathered: deque[int] = deque()  # peers that the compute thread has something to say to
        self._compute_thread = threading.get_ident()
        #: for so many polls the compute thread sends by itself
        self._has_time = 0
        self._to_send: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # peers; None: no more
        self._closed = False
        #: to and from workers of this host
        self.channels = Channels(wakeup, wanted=shared_memory)
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)

    @abstractmethod
    def _request(self, peer: int, what: str, args: tuple[Any, ...], then: Callable[[Any], None]) -> None:
        """Have `handle` called at `peer`, and `then` here with its reply; call `_failed` if there will be none."""

    @abstractmethod
    def _clock_of(self, peer: int) -> int:
        """Return `perf_counter_ns` of `peer`, as it is asked.

        Raises:
            RuntimeError: it does not answer.
        """

    def clock_offset(self, peer: int) -> tuple[int, int]:
        """Of eight pings the fastest counts, as its asymmetry can be the least (Cristian 1989)."""
        best = (0, 2**62)
        for _ in range(8):
            sent = time.perf_counter_ns()
            there = self._clock_of(peer)
            error = (time.perf_counter_ns() - sent) // 2
            if error < best[1]:
                best = there - (sent + error), error
        return best

    # --- the compute thread

    def _ask(self, peer: int, keys: list[Key]) -> None:
        self.exchange(peer).ask(keys)
        self._gathered.append(peer)  # until the thread polls or waits: more may follow

    def poll(self, runs: Container[int]) -> list[Delivered]:
        self._compute_thread = threading.get_ident()
        self._has_time -= 1
        if self._gathered:
            self._hand_on()
        for peer, key, answer, at_ns in self.channels.read():
            if isinstance(answer, OSError):
                self._break_soon(peer, f"its memory cannot be read: {answer}")
            else:
                self._arrive(peer, key, answer, at_ns)
        self._see_taken()
        return super().poll(runs)

    def wait(self, timeout_s: float) -> bool:
        try:
            return super().wait(timeout_s)
        finally:
            self.channels.wake()

    def _has_come(self) -> bool:
        return self.channels.sleep() or super()._has_come()

    def fail(self, failure: PipeError) -> None:
        if self.outbox.failure is not None:
            return  # that others know already
        super().fail(failure)
        self._has_time = _RECENTLY
        for peer, exchange in list(self._exchanges.items()):
            exchange.fail(failure)
            self._say(peer)

    def _send_gathered(self) -> None:
        self._has_time = _RECENTLY
        self._hand_on()

    def _hand_on(self) -> None:
        while self._gathered:
            peer = self._gathered.popleft()
            if self._sends_cheaply or self._has_time > 0:
                self._send(peer)
            else:
                self._to_send.put(peer)

    def close(self) -> None:
        # The others take what this worker has made. Its last words may then have been an answer that is still under
        # way, and the peers wait for them; so it says goodbye.
        super().close()
        if self.outbox.failure is None and self._fault is None:
            with suppress(PipeError):
                self.wait_taken(None, _DRAIN_S)
        self._closed = True
        self._to_send.put(None)
        if self._sender.is_alive():
            self._sender.join(_LEAVE_S)
        talking = {peer: exchange for peer, exchange in list(self._exchanges.items()) if not exchange.closed}
        unread, deadline = set(talking), time.monotonic() + _LEAVE_S
        for peer, exchange in talking.items():
            message, held = exchange.close()
            for reply in held:  # so that none breaks when this process ends
                reply(encode(NOTHING))
            self._request(peer, "leave", encode(message), lambda _, peer=peer: unread.discard(peer))  # type: ignore[misc]
        while unread - self._lost.keys() and time.monotonic() < deadline:
            time.sleep(0.005)

    # --- any thread

    def exchange(self, peer: int) -> Exchange:
        """This worker's end of its exchange with `peer`."""
        exchange = self._exchanges.get(peer)
        # setdefault, in one step of the interpreter: handlers and the compute thread may both come first
        return self._exchanges.setdefault(peer, Exchange()) if exchange is None else exchange

    def handle(self, what: str, peer: int, reply: Reply | None, *args: Any) -> None:
        """Do what a request of `peer` wants and `reply`, now or, to an exchange, when there is something to say.

        Where connections tell by themselves that a peer has died, an exchange needs no reply, and has none.
        """
        if what == "exchange":
            if reply is not None:
                self.exchange(peer).hold(reply)
            self.received(peer, decode(*args), own=False)
            return
        assert reply is not None, f"worker {peer} wants no answer to {what}"
        if what == "hurry":
            self.exchange(peer).hurry()
            self._say(peer)
            reply(None)
        elif what == "offer":
            reply(self.channels.accept(peer, Offer.read(decode_value(*args))))
        elif what == "leave":
            self.received(peer, decode(*args), own=False)
            self._gone(peer)
            self._break_soon(peer, LEFT)
            reply(None)

    def received(self, peer: int, message: Message, own: bool) -> None:
        """Take in a message of `peer`; `own`: it answers a request of this worker."""
        self.exchange(peer).received(message, own)
        for key, answer in message.answers:
            by_poll = self._arrive(peer, key, answer, time.perf_counter_ns())
            if by_poll and answer is not None and (offer := self.channels.offer(peer, answer.num_bytes)) is not None:
                self._request(peer, "offer", (encode_value(tuple(offer)),), partial(self._decided, peer))
        if message.failure is not None:
            self.channels.gone(peer)
            self._break(peer, message.failure)
        self._taken(message.taken, peer)
        self._asked(peer, message.asks)
        self._say(peer)

    def _break_soon(self, peer: int, reason: str) -> None:
        """Break with `peer` when what it said before, as why it failed, has come out of other threads' hands."""
        timer = threading.Timer(_LAST_WORDS_S, self._break, (peer, reason))
        timer.daemon = True
        timer.start()

    def _decided(self, peer: int, accepted: bool) -> None:
        if not accepted:
            self.channels.refused(peer)
        else:
            how = self.channels.accepted(peer)
            logger.info("worker %d: large payloads of worker %d are %s", self.worker, peer, how)

    def _see_taken(self) -> None:
        for peer, key in self.channels.returned():
            self.outbox.taken([key], peer)

    def _answer(self, peer: int, key: Key, answer: Answer | PipeError) -> bool:
        exchange = self.exchange(peer)
        if isinstance(answer, PipeError):
            exchange.fail(answer)
        elif written := self.channels.write(peer, key, answer):
            return written is Written.COPIED
        else:
            exchange.answer(key, answer)
        self._say(peer)
        return False

    def _say(self, peer: int) -> None:
        """Send what there is to say to `peer`, if that should not wait."""
        if not self.exchange(peer).urgent:
            return
        if threading.get_ident() == self._compute_thread:
            self._gathered.append(peer)
            self._hand_on()
        else:
            self._send(peer)

    def _send_all(self) -> None:
        """The sender's thread."""
        while (peer := self._to_send.get()) is not None:
            with self.answering_for_errors:
                self._send(peer)

    def _send(self, peer: int) -> None:
        exchange = self.exchange(peer)
        outgoing = exchange.outgoing()
        if outgoing is None:
            return
        try:
            message = encode(outgoing.message)
        except BaseException:
            exchange.unsent(outgoing.held)
            raise
        if outgoing.held is not None:
            outgoing.held(message)
        else:
            self._request(peer, "exchange", message, partial(self._answered, peer))

    def _answered(self, peer: int, message: tuple[bytes, list[Tensor]]) -> None:
        self.received(peer, decode(*message), own=True)

    def _sleep_until_taken(self, timeout_s: float) -> None:
        super()._sleep_until_taken(min(timeout_s, _LENT_LOOK_S))
        self._see_taken()

    def _hurry(self, peer: int) -> None:
        self._request(peer, "hurry", (), nothing)

    def _failed(self, peer: int, text: str) -> None:
        """`peer` cannot be reached."""
        exchange = self.exchange(peer)
        if exchange.closed and not self._closed:
            return  # it has said goodbye
        self._gone(peer)
        # Goodbye is said to those one has talked to.
        self._break(peer, text.strip().split("\n")[0] if exchange.heard else LEFT)

    def _gone(self, peer: int) -> None:
        """`peer` takes and says nothing more."""
        self.channels.gone(peer)
        self.outbox.leaves(peer)
        _, held = self.exchange(peer).close()
        for reply in held:
            reply(encode(NOTHING))
