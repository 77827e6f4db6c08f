"""What one worker says to another, as bytes: a typed binary form that is written and read without pickle.

    message   version, number and size of what follows; answers; questions, news of arrivals, a failure and a note
    answer    run, sizes of what follows; name; form (none: it is finished, which is all); contents of its tensors

Tensors that are too large to be among the bytes travel beside them, in order.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

from torch import Tensor

from ...dependency import Disagreement, PipeError, WorkerFailure
from .form import Look, assemble, describe, form_of
from .link import Message
from .outbox import Answer, Key
from .values import Malformed, decode_value, encode_value

#: of all that is written here, in `form.py` and in `values.py`
VERSION = 4
#: tensors up to this size travel inside a message
_INLINE_BYTES = 2**15
#: version, number of answers, size of what is behind them (0: nothing)
_HEAD = struct.Struct("<BxHI")
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
        ConfigError: a payload cannot travel; the text says whose.
    """
    asks, taken, answers, failure, note = message
    more = b""
    if asks or taken or failure is not None or note is not None:
        more = encode_value([_told(failure), note, [*chain(*asks)], [*chain(*taken)]])
    parts, large = [_HEAD.pack(VERSION, len(answers), len(more))], []
    for (run, name), answer in answers:
        text, (form, tensors) = name.encode(), (b"", ()) if answer is None else describe(name, answer)
        parts += (_ANSWER.pack(run, len(text), len(form)), text, form)
        for tensor in tensors:
            # TensorPipe sends each tensor on a channel of its own, which costs more than copying a small one.
            if (size := tensor.nbytes) <= _INLINE_BYTES:
                parts.append(ctypes.string_at(tensor.data_ptr(), size))
            else:
                large.append(tensor)
    parts.append(more)
    return b"".join(parts), large


def decode(data: bytes, large: Iterable[Tensor] | Callable[[Look], Tensor]) -> Message:
    """Read what `encode` has written.

    Args:
        large: the tensors beside it, in order; or what returns the next one that travels, which looks so.

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


def _listed(large: Iterator[Tensor]) -> Callable[[Look], Tensor]:
    def beside(look: Look) -> Tensor:
        tensor = next(large, None)
        if tensor is None or tensor.shape != look.dense_shape or tensor.dtype != look.dtype:
            raise Malformed(f"malformed message: a tensor of shape {look.shape} is not beside it")
        return tensor

    return beside


def _decode(data: bytes, beside: Callable[[Look], Tensor]) -> Message:
    _, count, more_size = _HEAD.unpack_from(data)
    at = _HEAD.size

    def contents(look: Look) -> Tensor:
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
        answer: Answer = None
        if form_size:
            form = form_of(data[form_at:at])
            answer = assemble(form, [contents(look) for look in form.looks])
        answers.append(((run, str(data[name_at:form_at], "utf-8")), answer))
    if at + more_size != len(data):
        raise Malformed(f"malformed message: {at + more_size} bytes wanted, {len(data)} there")
    if not more_size:
        return Message([], [], answers)
    told, note, asks, taken = decode_value(data[at:])
    return Message(_keys(asks), _keys(taken), answers, _failure(told), _note(note))


def _keys(flat: Any) -> list[Key]:
    keys = [*zip(flat[::2], flat[1::2], strict=True)]
    if not all([type(run) is int and type(name) is str for run, name in keys]):
        raise Malformed("malformed message: a question or an arrival without run and name")
    return keys


def _told(failure: PipeError | None) -> tuple[int | str, ...] | None:
    """Return what is told of a failure, as plain values."""
    if isinstance(failure, WorkerFailure):
        return tuple(getattr(failure, field) for field in _FAILURE)
    return None if failure is None else (str(failure),)


def _failure(told: Any) -> PipeError | None:
    if told is None:
        return None
    kinds = [type(part) for part in told]
    if kinds == list(_FAILURE.values()):
        return WorkerFailure(*told)
    if kinds == [str]:
        return Disagreement(*told)
    raise Malformed("malformed message: a failure without worker, action, step, summary or traceback")


def _note(note: Any) -> Any:
    if note is not None and (type(note) is not tuple or [type(part) for part in note[:-1]] != [int, str]):
        raise Malformed("malformed message: a note without number, name and value")
    return note
