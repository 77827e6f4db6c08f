"""Messages between processes: sends to peers in the fewest messages, and receives messages of peers.

A `MessageLink` (`rpc.py`, `zeromq.py`) sends messages, receives them and loses peers. Payloads between processes of one
host travel beside the messages by a shorter way, see `shared_memory.py`.

A message carries everything in one direction: questions, answers, and confirmations of arrivals. Confirmations can
wait: they are sent with the next message, or alone once there are many. The compute thread sends a message itself where
that is cheap or it waits anyway; an answer, which a peer may wait for, also if it has waited a short while ago. All
other messages are left to the sender's thread; questions to workers of the same host only behind the first action that
can run: so the threads do not compete for the interpreter while a peer waits for the result of that action. Questions
to other hosts leave before it, because their way may be longer than the action.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent import futures
from functools import partial
from typing import TYPE_CHECKING, Any

from ...dependency import Malformed, PipeError
from .carrier import LEFT, Carrier
from .message import NOTHING, AnsweringForErrors, LinkCallbacks, Message, MessageLink
from .outbox import Answer, Key
from .payload import Payload, Staying

if TYPE_CHECKING:
    from .device_way import DeviceWay
    from .shared_memory import Channels

#: number of arrivals, and of their bytes, that are confirmed in a separate message
_UNTOLD_LIMIT, _UNTOLD_BYTES = 8, 4 * 2**20
#: polls since its last wait within which a compute thread has time to send by itself
_RECENTLY = 5
#: seconds between two checks that lent payloads have been taken, while there is nothing else to do
_LENT_LOOK_S = 0.001
#: seconds that a leaving worker waits for peers to read its last message
_LEAVE_S = 5.0
#: by request: the type of its reply
_REPLIES: dict[str, Any] = {
    "clock": int, "look": bytes, "offer": (dict, type(None)), "hurry": type(None), "leave": type(None),
    "stop": type(None),
}  # fmt: skip
#: seconds that the last messages of a worker may take from one thread to another
_LAST_WORDS_S = 1.0


class PeerQueue:
    """The queue of messages to one peer. Thread-safe.

    A message that is to be sent now makes the queue `urgent`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._gathered = Message([], [], [])
        self._taken_bytes = 0
        #: whether one of the two has left
        self.closed = False
        #: whether there is something to send now
        self.urgent = False
        #: whether the peer has ever sent a message
        self.heard = False

    def ask(self, keys: list[Key]) -> None:
        """Ask for all of `keys`."""
        with self._lock:
            self._gathered.asks.extend(keys)
            self.urgent = True

    def answer(self, key: Key, answer: Answer) -> None:
        """Queue `answer` to the peer's question for `key`."""
        with self._lock:
            self._gathered.answers.append((key, answer))
            self.urgent = True

    def fail(self, failure: PipeError) -> None:
        """Queue the reason why there are no more answers; a later question gets it again."""
        with self._lock:
            self._gathered = self._gathered._replace(failure=failure)
            self.urgent = True

    def received(self, message: Message) -> None:
        """Record the arrivals of a message."""
        with self._lock:
            self.heard = True
            for key, answer in message.answers:
                if answer is not None:
                    self._gathered.taken.append(key)
                    self._taken_bytes += answer.num_bytes
            self.urgent |= len(self._gathered.taken) >= _UNTOLD_LIMIT or self._taken_bytes >= _UNTOLD_BYTES

    def hurry(self) -> None:
        """Let deferred confirmations be sent."""
        with self._lock:
            self.urgent |= bool(self._gathered.taken)

    def gathered(self) -> Message | None:
        """Return the message to be sent, with all deferred parts; None: there is none."""
        with self._lock:
            return self._take() if self.urgent and not self.closed else None

    def close(self) -> Message:
        """One of the two leaves: return the last message."""
        with self._lock:
            self.closed = True
            return self._take()

    def _take(self) -> Message:
        message, self._gathered = self._gathered, Message([], [], [])
        self._taken_bytes, self.urgent = 0, False
        return message


class Messages:
    """Passes the peers' questions, answers and confirmations to a carrier, and the carrier's to the peers.

    Args:
        link: to the other workers.
        channels: to and from workers of this host; None: there shall be none.
    """

    within_process = False

    def __init__(self, link: MessageLink, channels: Channels | None = None) -> None:
        self.link, self.channels = link, channels
        self.notify = link.wakeup.notify
        self._talks: dict[int, PeerQueue] = {}
        #: requests that peers have not answered, by number
        self._numbers = itertools.count()
        self._requests: dict[int, tuple[int, str, futures.Future[Any]]] = {}
        #: peers that read nothing more
        self._gone: set[int] = set()
        self._closed = False
        #: peers that the compute thread has asked since its last poll, and before it
        self._gathered: deque[int] = deque()
        self._asked_before = self._gathered.copy()
        self._compute_thread = threading.get_ident()
        #: number of polls during which the compute thread sends by itself
        self._has_time = 0
        self._to_send: queue.SimpleQueue[int | None] = queue.SimpleQueue()  # peers; None: no more
        self._sender = threading.Thread(target=self._send_all, name="sender", daemon=True)

    def open(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self.answering_for_errors = AnsweringForErrors(carrier.fault)
        self.link.open(LinkCallbacks(self.received, self.lost, self.answering_for_errors))
        if not self.link.sends_cheaply:
            self._sender.start()

    # --- the compute thread

    def ask(self, peer: int, keys: list[Key]) -> None:
        self._talk(peer).ask(keys)
        near = self.channels is not None and self.channels.reads(peer)
        # Until the thread polls or waits, or has polled twice: more may follow.
        (self._gathered if near else self._asked_before).append(peer)

    def poll(self) -> None:
        self._compute_thread = threading.get_ident()
        self._has_time -= 1
        while self._asked_before:
            self._hand_on(self._asked_before.popleft(), waits=False)
        self._asked_before, self._gathered = self._gathered, self._asked_before
        if self.link.look is not None:
            self.link.look()
        if self.channels is not None:
            for peer, key, answer, at_ns in self.channels.read():
                if isinstance(answer, OSError):
                    self._lose_soon(peer, f"its memory cannot be read: {answer}")
                else:
                    self._carrier.arrive(peer, key, answer, at_ns)
            if self.channels.lent:
                self._see_taken(self.channels)

    def wait(self, timeout_s: float, there: Callable[[], bool]) -> bool:
        self._send_gathered()
        if self.channels is None:
            return there() or self.link.wait(timeout_s)
        try:
            return self.channels.sleep() or there() or self.link.wait(timeout_s)
        finally:
            self.channels.wake()

    def wait_taken(self, timeout_s: float) -> None:
        self._send_gathered()
        self.link.wait(timeout_s if self.channels is None else min(timeout_s, _LENT_LOOK_S))
        if self.link.look is not None:
            self.link.look()
        if self.channels is not None:
            self._see_taken(self.channels)

    def _send_gathered(self) -> None:
        self._has_time = _RECENTLY
        for asked in self._asked_before, self._gathered:
            while asked:
                self._hand_on(asked.popleft(), waits=True)

    def close(self) -> None:
        """Send the last messages, and a goodbye to all contacted peers; wait until they have read them."""
        self._closed = True
        self._to_send.put(None)
        if self._sender.is_alive():
            self._sender.join(_LEAVE_S)
        if self.channels is not None:
            self.channels.release()
        talking = [(peer, talk) for peer, talk in list(self._talks.items()) if not talk.closed]
        futures.wait([self.request(peer, "leave", last=talk.close()) for peer, talk in talking], _LEAVE_S)
        self.link.close()

    # --- any thread

    def answer(self, peer: int, key: Key, answer: Answer | PipeError) -> bool:
        if isinstance(answer, PipeError):
            self._talk(peer).fail(answer)
        elif self.channels is not None and (is_there := self.channels.write(peer, key, answer)) is not None:
            return is_there
        elif isinstance(answer, Staying):  # the peer reaches memory of the host alone, or there is no room
            lay = None if self.channels is None else partial(self.channels.lay_on_host, peer, key, answer)
            answer.leave(partial(self._answer_by_host, peer, key), lay)
            return False
        else:
            self._talk(peer).answer(key, answer)
        self._say(peer)
        return False

    def _answer_by_host(self, peer: int, key: Key, payload: Payload) -> None:
        if self.answer(peer, key, payload):
            self._carrier.taken([key], peer)

    def use_device(self, way: DeviceWay | None) -> None:
        if self.channels is not None and self.channels.device is None:
            self.channels.device = way

    def takes_from_device(self, peer: int, device: Any) -> bool:
        return self.channels is not None and self.channels.takes_from_device(peer, device)

    def fail(self, failure: PipeError) -> None:
        self._has_time = _RECENTLY
        for peer, talk in list(self._talks.items()):
            talk.fail(failure)
            self._say(peer)

    def request(self, peer: int, what: str, value: Any = None, last: Message = NOTHING) -> futures.Future[Any]:
        """Send `peer` a request, and return its reply; raise RuntimeError if there is none.

        Args:
            last: the last message, to be sent with it.
        """
        number, answer = next(self._numbers), futures.Future[Any]()
        self._requests[number] = peer, what, answer
        if peer in self._gone:
            self._give_up_requests(peer)
        else:
            self.link.send(peer, last._replace(note=(number, what, value)))
        return answer

    # --- messages of peers

    def received(self, peer: int, message: Message) -> None:
        """Take in a message of `peer`."""
        talk = self._talk(peer)
        talk.received(message)
        for key, answer in message.answers:
            by_poll = self._carrier.arrive(peer, key, answer, time.perf_counter_ns())
            if self.channels is None or answer is None or not (by_poll or self.channels.device is not None):
                continue
            if (offer := self.channels.offer(peer)) is not None:
                self.request(peer, "offer", offer).add_done_callback(partial(self.channels.decided, peer))
        if message.failure is not None:
            self._takes_nothing(peer)
            self._carrier.lose(peer, message.failure)
        if message.taken:
            self._carrier.taken(message.taken, peer)
        if message.asks:
            self._carrier.asked(peer, message.asks)
        if message.note is not None:
            self._noted(peer, *message.note)
        if talk.urgent:
            self._say(peer)

    def _noted(self, peer: int, number: int, what: str, value: Any) -> None:
        """Serve a request of `peer` and reply; or take in its reply, which needs no answer."""
        if what:
            self.link.send(peer, NOTHING._replace(note=(number, "", self._serve(peer, what, value))))
        elif (found := self._requests.get(number)) is not None and found[0] == peer:
            if not isinstance(value, _REPLIES[found[1]]):
                raise Malformed(f"malformed message: worker {peer} replies {type(value).__name__} to {found[1]}")
            del self._requests[number]
            found[2].set_result(value)

    def _serve(self, peer: int, what: str, value: Any) -> Any:
        if what == "clock":
            return time.perf_counter_ns()
        if what == "look" and type(value) is int:
            return b"" if self._carrier.serve_board is None else self._carrier.serve_board(value)
        if what == "offer":
            return None if self.channels is None else self.channels.accept(peer, value)
        if what == "stop":
            self._carrier.stop_requested = True
        elif what == "hurry":
            if self.channels is not None:
                self.channels.settle(wait=True)
            self._talk(peer).hurry()
            self._say(peer)
        elif what == "leave":
            self._end(peer)
            self._lose_soon(peer, LEFT)
        else:
            raise Malformed(f"malformed message: worker {peer} requests {what[:40]!r}")
        return None

    def _see_taken(self, channels: Channels) -> None:
        for peer, key in channels.returned():
            self._carrier.outbox.taken([key], peer)

    # --- lost peers

    def lost(self, peer: int, reason: str) -> None:
        """`peer` cannot be reached."""
        talk = self._talk(peer)
        if talk.closed and not self._closed:
            return  # its goodbye has arrived
        self._end(peer)
        # Only contacted peers get a goodbye.
        self._carrier.lose(peer, reason.strip().split("\n")[0] if talk.heard else LEFT)

    def _lose_soon(self, peer: int, reason: str) -> None:
        """Lose `peer` when its earlier messages, such as the reason of its failure, have left other threads."""
        timer = threading.Timer(_LAST_WORDS_S, self._carrier.lose, (peer, reason))
        timer.daemon = True
        timer.start()

    def _end(self, peer: int) -> None:
        """`peer` takes and sends nothing more."""
        self._takes_nothing(peer)
        self._talk(peer).close()
        self._gone.add(peer)
        self._give_up_requests(peer)

    def _takes_nothing(self, peer: int) -> None:
        self._carrier.outbox.leaves(peer)
        if self.channels is not None:
            self.channels.gone(peer)

    def _give_up_requests(self, peer: int) -> None:
        for number, (asked, _, answer) in list(self._requests.items()):
            if asked == peer and self._requests.pop(number, None) is not None:
                answer.set_exception(RuntimeError(f"worker {peer} cannot be reached"))

    def _talk(self, peer: int) -> PeerQueue:
        talk = self._talks.get(peer)
        # setdefault, in one step of the interpreter: receiving threads and the compute thread may both be first
        return self._talks.setdefault(peer, PeerQueue()) if talk is None else talk

    # --- sending

    def _say(self, peer: int) -> None:
        """Send the queue of `peer`, if that should not wait."""
        if not self._talk(peer).urgent:
            return
        if threading.get_ident() == self._compute_thread:
            self._hand_on(peer, waits=self._has_time > 0)
        else:
            self._send(peer)

    def _hand_on(self, peer: int, *, waits: bool) -> None:
        if self.link.sends_cheaply or waits:
            self._send(peer)
        else:
            self._to_send.put(peer)

    def _send_all(self) -> None:
        """The sender's thread."""
        while (peer := self._to_send.get()) is not None:
            with self.answering_for_errors:
                self._send(peer)

    def _send(self, peer: int) -> None:
        message = self._talk(peer).gathered()
        if message is not None:
            self.link.send(peer, message)
