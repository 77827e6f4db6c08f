"""Links, which carry messages from worker to worker, below `messages.py`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ...dependency import PipeError
from .outbox import Answer, Key
from .wakeup import Wakeup


class Message(NamedTuple):
    """All that one worker sends another at one moment."""

    asks: list[Key]
    taken: list[Key]
    answers: list[tuple[Key, Answer]]
    #: why there will be no more answers
    failure: PipeError | None = None
    #: a request between two carriers: its number, its name, a plain value; or the reply to it, without a name
    note: tuple[int, str, Any] | None = None


NOTHING = Message([], [], [])


class LinkCallbacks(NamedTuple):
    """Receiver of a link's events, called in any of its threads."""

    #: a peer has sent this
    on_message: Callable[[int, Message], None]
    #: a peer can be reached no more, and why
    on_lost: Callable[[int, str], None]
    #: entered by the link's threads: an error there, which would otherwise be lost, is the worker's failure
    guard: AbstractContextManager[None]


class MessageLink(Protocol):
    """Sends and receives messages, and loses peers. No message is lost or doubled; messages may overtake."""

    #: the compute thread of this worker sleeps on it
    wakeup: Wakeup
    #: whether to send something costs the compute thread no more than to have another thread do so
    sends_cheaply: bool
    #: called when the compute thread polls for arrivals, if it may have to receive them itself
    look: Callable[[], None] | None

    def open(self, ears: LinkCallbacks) -> None:
        """Meet the other workers; return when all have joined.

        Raises:
            ConfigError: they are missing, or the address cannot be used.
        """

    def send(self, peer: int, message: Message) -> None:
        """Send; return at once. A failure is reported to `on_lost`.

        Raises:
            ConfigError: a payload in it cannot travel; the text names the payload.
        """

    def wait(self, timeout_s: float) -> bool:
        """Let the compute thread sleep until notified; return False on timeout."""

    def close(self) -> None:
        """Receive and send nothing more, once sent messages are on their way."""


class AnsweringForErrors:
    """A context for work on another thread: the worker fails with an error there, which would otherwise be lost.

    Entered for each message, so no generator.
    """

    def __init__(self, fault: Callable[[BaseException], None]) -> None:
        self._fault = fault

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        if error is None or isinstance(
            error, KeyboardInterrupt
        ):  # Ctrl-C comes to the compute thread while it receives
            return False
        # SystemExit, or a panic of a library: raised again in the compute thread, it would end the script instead.
        self._fault(error if isinstance(error, Exception) else PipeError(f"thread of the worker ended: {error!r}"))
        return True
