"""What one worker says to another, as bytes: a typed binary form that is written and read without pickle.

    message   version, numbers and sizes of what follows; questions; news of arrivals; a failure and a note; answers
    answer    run, sizes of what follows; name; form (none: it is finished, which is all); contents of its tensors

Tensors that are too large to be among the bytes travel beside them, in order.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor

from ...dependency import Disagreement, PipeError, WorkerFailure
from .form import Dense, assemble, describe, form_of
from .link import Message
from .outbox import Answer, Key
from .values import Malformed, decode_value, encode_value

#: of all that is written here, in `form.py` and in `values.py`
VERSION = 3
#: tensors up to this size travel inside a message
_INLINE_BYTES = 2**15
#: version, number of answers, sizes of: questions, arrivals, failure and note
_HEAD = struct.Struct("<BxHIII")
#: run, sizes of: name, form
_ANSWER = struct.Struct("<qII")
#: what is told of a worker that failed; of any other failure, its text
_FAILURE = {"worker": int, "action": str, "step": int, "summary": str, "remote_traceback": str, "place": str}
#: a copy of up to so many bytes is not worth letting other threads in between
_LITTLE = 2**15
_copy_little = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)


def copy_memory(to: int, content: int | bytes, size: int) -> None:
    """Copy memory."""
    (_copy_little if size <= _LITTLE else ctypes.memmove)(to, content, size)


def encode(message: Message) -> tuple[bytes, list[Tensor]]:
    """Write a message, small tensors included; large ones travel beside it.

    Raises:
        TypeError: a payload cannot travel; the text says whose.
    """
    asks, taken = _write_keys(message.asks), _write_keys(message.taken)
    nothing_more = message.failure is None and message.note is None
    more = b"" if nothing_more else encode_value((_told(message.failure), message.note))
    parts = [_HEAD.pack(VERSION, len(message.answers), len(asks), len(taken), len(more)), asks, taken, more]
    large: list[Tensor] = []
    for (run, name), answer in message.answers:
        text, (form, tensors) = name.encode(), (b"", ()) if answer is None else describe(name, answer)
        parts += (_ANSWER.pack(run, len(text), len(form)), text, form)
        for tensor in tensors:
            # TensorPipe sends each tensor on a channel of its own, which costs more than copying a small one.
            if (size := tensor.nbytes) <= _INLINE_BYTES:
                parts.append(ctypes.string_at(tensor.data_ptr(), size))
            else:
                large.append(tensor)
    return b"".join(parts), large


def decode(data: bytes, large: Iterable[Tensor] | Callable[[Dense], Tensor]) -> Message:
    """Read what `encode` has written.

    Args:
        large: the tensors beside it, in order; or what returns the next one, which looks so.

    Raises:
        Malformed: it has not, or a worker of another version of rpc-pipe has.
    """
    if data[:1] != bytes((VERSION,)):
        found = data[0] if data else "none"
        raise Malformed(f"a message of version {found}, not {VERSION}: do all workers run the same rpc-pipe?")
    try:
        return _decode(data, large if callable(large) else _listed(iter(large)))
    except (struct.error, ValueError, TypeError) as error:
        raise error if isinstance(error, Malformed) else Malformed(f"malformed message: {error}") from error


def _listed(large: Iterator[Tensor]) -> Callable[[Dense], Tensor]:
    def beside(look: Dense) -> Tensor:
        tensor = next(large, None)
        if tensor is None or tensor.shape != look.shape or tensor.dtype != look.dtype:
            raise Malformed(f"malformed message: a tensor of shape {look.shape} is not beside it")
        return tensor

    return beside


def _decode(data: bytes, beside: Callable[[Dense], Tensor]) -> Message:
    _, count, asks_size, taken_size, more_size = _HEAD.unpack_from(data)
    taken_at = _HEAD.size + asks_size
    more_at = taken_at + taken_size
    at = more_at + more_size  # whether all is there, the end tells

    def contents(look: Dense) -> Tensor:
        nonlocal at
        if look.num_bytes > _INLINE_BYTES:
            return beside(look)
        begin, at = at, at + look.num_bytes
        if at > len(data):
            raise Malformed(f"malformed message: {look.num_bytes} bytes wanted, {len(data) - begin} left")
        tensor = look.empty()
        copy_memory(tensor.data_ptr(), data[begin:at], look.num_bytes)
        return tensor

    answers: list[tuple[Key, Answer]] = []
    for _ in range(count):
        run, name_size, form_size = _ANSWER.unpack_from(data, at)
        name_at = at + _ANSWER.size
        form_at = name_at + name_size
        at = form_at + form_size
        key = run, str(data[name_at:form_at], "utf-8")
        answer: Answer = None
        if form_size:
            form = form_of(data[form_at:at])
            answer = assemble(form, [contents(look) for look in form.dense])
        answers.append((key, answer))
    if at != len(data):
        raise Malformed(f"malformed message: {at} bytes wanted, {len(data)} there")
    asks = _read_keys(data[_HEAD.size : taken_at]) if asks_size else []
    taken = _read_keys(data[taken_at:more_at]) if taken_size else []
    failure, note = _read_more(data[more_at : more_at + more_size]) if more_size else (None, None)
    return Message(asks, taken, answers, failure, note)


def _told(failure: PipeError | None) -> tuple[int | str, ...] | None:
    """Return what is told of a failure, as plain values."""
    if isinstance(failure, WorkerFailure):
        return tuple(getattr(failure, field) for field in _FAILURE)
    return None if failure is None else (str(failure),)


def _read_more(data: bytes) -> tuple[PipeError | None, Any]:
    """Return the failure and the note of a message."""
    told, note = decode_value(data)
    is_note = type(note) is tuple and len(note) == 3 and [type(part) for part in note[:2]] == [int, str]
    if note is not None and not is_note:
        raise Malformed("malformed message: a note without number, name and value")
    if told is None:
        return None, note
    kinds = [type(part) for part in told] if type(told) is tuple else []
    if kinds == list(_FAILURE.values()):
        return WorkerFailure(*told), note
    if kinds == [str]:
        return Disagreement(*told), note
    raise Malformed("malformed message: a failure without worker, action, step, summary or traceback")


def _write_keys(keys: list[Key]) -> bytes:
    """Write keys run by run; most messages are of one."""
    if not keys:
        return b""
    lines = []
    for run in dict(keys):
        lines.append("\0".join([str(run), *[name for of, name in keys if of == run]]))
    text = "\n".join(lines)
    if text.count("\0") != len(keys) or text.count("\n") != len(lines) - 1:
        raise TypeError(f"a name among {keys} has a line break or a zero in it")
    return text.encode()


def _read_keys(data: bytes) -> list[Key]:
    keys: list[Key] = []
    for line in str(data, "utf-8").split("\n"):
        run, *names = line.split("\0")
        of = int(run)
        keys += [(of, name) for name in names]
    return keys
