"""What brings messages from worker to worker: what `messages.py` stands on."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ...dependency import PipeError
from .outbox import Answer, Key
from .wakeup import Wakeup


class Message(NamedTuple):
    """All that one worker has to say to another at one moment."""

    asks: list[Key]
    taken: list[Key]
    answers: list[tuple[Key, Answer]]
    #: why there will be no more answers
    failure: PipeError | None = None
    #: a request between two carriers: its number, what is asked for, a plain value; or the reply to it, without a name
    note: tuple[int, str, Any] | None = None


NOTHING = Message([], [], [])


class Ears(NamedTuple):
    """Whom a link tells what it hears, in any of its threads."""

    #: a peer has said this
    on_message: Callable[[int, Message], None]
    #: a peer can be reached no more, and why
    on_lost: Callable[[int, str], None]
    #: entered by the link's own threads: what goes wrong there, where nobody would hear it, is the worker's failure
    guard: AbstractContextManager[None]


class Link(Protocol):
    """Sends messages, hears them, and loses peers. Nothing is lost or doubled; what is sent may overtake."""

    #: what the compute thread of this worker sleeps on
    wakeup: Wakeup
    #: whether to send something costs the compute thread no more than to have another thread do so
    sends_cheaply: bool
    #: called when the compute thread looks for what has come, if it may have to hear that itself
    look: Callable[[], None] | None

    def open(self, ears: Ears) -> None:
        """Meet the other workers; return when all have come.

        Raises:
            ConfigError: they did not come, or the address cannot be used.
        """

    def send(self, peer: int, message: Message) -> None:
        """Send; return at once. That it cannot be is told to `on_lost`.

        Raises:
            ConfigError: a payload in it cannot travel; the text says whose.
        """

    def wait(self, timeout_s: float) -> bool:
        """Let the compute thread sleep until notified; False: nobody did, in time."""

    def close(self) -> None:
        """Hear and say nothing more, once what has been sent is on its way."""


class AnsweringForErrors:
    """A context for what another thread does: the worker fails with what goes wrong there, where nobody would hear it.

    Entered for each message, so no generator.
    """

    def __init__(self, fault: Callable[[BaseException], None]) -> None:
        self._fault = fault

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> bool:
        if error is None or isinstance(error, KeyboardInterrupt):  # Ctrl-C comes to the compute thread, as it hears
            return False
        # SystemExit, or a panic of a library: raised again in the compute thread, it would end the script instead.
        self._fault(error if isinstance(error, Exception) else PipeError(f"a thread of the worker ended: {error!r}"))
        return True
