"""A message as RPC carries it: bytes, and the tensors that are too large to be among them."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
from torch import Tensor

from .exchange import Message
from .payload import Payload, compact

#: tensors up to this size travel inside the bytes
_INLINE_BYTES = 2**15


def to_wire(message: Message) -> tuple[bytes, list[Tensor]]:
    """Pickle a message, small tensors included; large ones travel beside it."""
    large: list[Tensor] = []

    def sendable(tensor: Tensor) -> tuple[Any, ...]:
        # TensorPipe sends each tensor on a channel of its own, which costs more than copying a small one.
        if 0 < tensor.nbytes <= _INLINE_BYTES and tensor.is_contiguous():
            return ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype, tuple(tensor.shape)
        large.append(compact(tensor))
        return ()

    answers = [
        (key, ([sendable(t) for t in answer.tensors], answer.skeleton) if isinstance(answer, Payload) else answer)
        for key, answer in message.answers
    ]
    return pickle.dumps((message.asks, message.taken, answers), pickle.HIGHEST_PROTOCOL), large


def from_wire(data: bytes, large: list[Tensor]) -> Message:
    asks, taken, answers = pickle.loads(data)
    beside = iter(large)

    def tensor(sent: tuple[Any, ...]) -> Tensor:
        if not sent:
            return next(beside)
        content, dtype, shape = sent
        return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)

    received = [
        (key, Payload([tensor(sent) for sent in answer[0]], answer[1]) if isinstance(answer, tuple) else answer)
        for key, answer in answers
    ]
    return Message(asks, taken, received)
