"""What one worker says to another, as bytes, and the tensors that are too large to be among them, beside it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from torch import Tensor

from ...dependency import Disagreement, PipeError, WorkerFailure
from .form import Look, assemble, describe, form_of
from .link import Message
from .outbox import Answer, Key
from .values import Malformed, decode_value, encode_value

#: of all that is written here and in `form.py`
VERSION = 5
#: tensors up to this size travel inside a message
_INLINE_BYTES = 2**15


def encode(message: Message) -> tuple[bytes, list[Tensor]]:
    """Write a message, small tensors included; large ones travel beside it.

    Raises:
        ConfigError: a payload cannot travel; the text says whose.
    """
    asks, taken, answers, failure, note = message
    written: list[tuple[Key, bytes, list[bytes]]] = []
    large: list[Tensor] = []
    for key, answer in answers:
        form, tensors = (b"", []) if answer is None else describe(key[1], answer)
        # TensorPipe sends each tensor on a channel of its own, which costs more than copying a small one.
        small: list[bytes] = []
        for tensor in tensors:
            if (size := tensor.nbytes) <= _INLINE_BYTES:
                small.append(ctypes.string_at(tensor.data_ptr(), size))
            else:
                large.append(tensor)
        written.append((key, form, small))
    told = vars(failure) if isinstance(failure, WorkerFailure) else failure and str(failure)
    return encode_value((VERSION, asks, taken, written, told, note)), large


def decode(data: bytes, large: Callable[[Look], Tensor]) -> Message:
    """Read what `encode` has written.

    Args:
        large: returns the next of the tensors beside it, which looks so.

    Raises:
        Malformed: it has not, or a worker of another version of rpc-pipe has.
    """
    version, *said = decode_value(data)
    if version != VERSION:
        raise Malformed(f"a message of version {version}, not {VERSION}: do all workers run the same rpc-pipe?")
    asks, taken, written, told, note = said
    answers: list[tuple[Key, Answer]] = []
    for key, written_form, small in written:
        answer: Answer = None
        if written_form:
            form, inside = form_of(written_form), iter(small)
            contents = [
                large(look) if look.num_bytes > _INLINE_BYTES else look.filled(next(inside)) for look in form.looks
            ]
            answer = assemble(form, contents)
        answers.append((key, answer))
    failure: PipeError | None = None
    if told is not None:
        failure = WorkerFailure(**told) if isinstance(told, dict) else Disagreement(told)
    return Message(asks, taken, answers, failure, note)
