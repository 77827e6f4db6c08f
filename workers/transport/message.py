"""Messages from worker to worker as bytes, beside tensors too large to be among them; and links, which carry them."""

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import msgspec
from torch import Tensor

from ...dependency import Disagreement, Malformed, PipeError, WorkerFailure
from .form import INLINE_BYTES, Look, assemble, describe, form_of
from .outbox import Answer, Key
from .values import decode_value, encode_value, malformed, padding, refuse_heavy
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


#: of all that is written here and in `form.py`
VERSION = 6
#: the values of fewer bytes of a message take less than 1 MiB, as no array of it is shorter than a key
_LITTLE = 3 * 2**13
#: fewer questions and answers need no padding
_FEW = 500


class _Written(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A message as it travels."""

    version: int
    asks: list[Key]
    taken: list[Key]
    #: run, name, the form of the payload, the contents of its small tensors
    answers: list[tuple[int, str, bytes, bytes]]
    #: the failure's parts, or its text; empty if there is none
    failure: bytes
    #: number, name, value
    note: tuple[int, str, bytes] | None
    padding: bytes = b""


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(_Written)


def encode(message: Message) -> tuple[bytes, list[Tensor]]:
    """Write a message, small tensors included; large ones travel beside it.

    Raises:
        ConfigError: a payload cannot travel; the text names the payload.
    """
    asks, taken, answers, failure, note = message
    answered: list[tuple[int, str, bytes, bytes]] = []
    large: list[Tensor] = []
    for (run, name), answer in answers:
        form, tensors = (b"", []) if answer is None else describe(name, answer)
        # TensorPipe sends each tensor on a separate channel, which costs more than copying a small one.
        small: list[bytes] = []
        for tensor in tensors:
            if (size := tensor.nbytes) <= INLINE_BYTES:
                small.append(ctypes.string_at(tensor.data_ptr(), size))
            else:
                large.append(tensor)
        answered.append((run, name, form, small[0] if len(small) == 1 else b"".join(small)))
    told = b""
    if failure is not None:
        told = encode_value(vars(failure) if isinstance(failure, WorkerFailure) else str(failure))
    noted = None if note is None else (note[0], note[1], encode_value(note[2]))
    written = _Written(VERSION, asks, taken, answered, told, noted)
    data = _encoder.encode(written)
    if failure is None and len(asks) + len(taken) + len(answers) < _FEW:
        return data, large
    if missing := padding(data):
        written.padding = bytes(missing)
        data = _encoder.encode(written)
    return data, large


def decode(data: bytes, large: Callable[[Look], Tensor]) -> Message:
    """Read a result of `encode`.

    Args:
        large: returns the next of the tensors beside it, which looks so.

    Raises:
        Malformed: it has not, or a worker of another version of rpc-pipe has.
    """
    try:
        return _read(data, large)
    except Exception as error:  # bytes that are no message fail in many ways
        raise malformed(error) from error


def _read(data: bytes, large: Callable[[Look], Tensor]) -> Message:
    refuse_heavy(data, _LITTLE)
    said = _decoder.decode(data)
    if said.version != VERSION:
        raise Malformed(f"message of version {said.version}, not {VERSION}: do all workers run the same rpc-pipe?")
    answers: list[tuple[Key, Answer]] = []
    for run, name, written, content in said.answers:
        answers.append(((run, name), _answer(written, content, large) if written else None))
    failure: PipeError | None = None
    if said.failure:
        told = decode_value(said.failure)
        failure = WorkerFailure(**told) if isinstance(told, dict) else Disagreement(str.__str__(told))
    note = None if said.note is None else (said.note[0], said.note[1], decode_value(said.note[2]))
    return Message(said.asks, said.taken, answers, failure, note)


def _answer(written: bytes, content: bytes, large: Callable[[Look], Tensor]) -> Answer:
    """Return a payload from its form and the contents of its small tensors."""
    form = form_of(written)
    if form.inline_bytes != len(content):
        raise Malformed(f"malformed message: {len(content)} bytes for tensors of {form.inline_bytes}")
    contents, at = [], 0
    for look in form.looks:
        if (size := look.num_bytes) > INLINE_BYTES:
            contents.append(large(look))
            look.refuse(contents[-1])
        else:
            contents.append(look.filled(content if size == len(content) else content[at : at + size]))
            at += size
    return assemble(form, contents)
