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


def encode(message: Message) -> tuple[bytes, list[Tensor]]:
    """Pickle a message, small tensors included; large ones travel beside it."""
    large: list[Tensor] = []

    def sendable(tensor: Tensor) -> tuple[Any, ...]:
        # The bytes of such views are not what they show: one is told beside the bytes, the other is rare.
        conjugate, tensor = tensor.is_conj(), tensor.resolve_neg()
        tensor = tensor.conj() if conjugate else tensor
        # TensorPipe sends each tensor on a channel of its own, which costs more than copying a small one.
        if 0 < tensor.nbytes <= _INLINE_BYTES and tensor.is_contiguous():
            return conjugate, ctypes.string_at(tensor.data_ptr(), tensor.nbytes), tensor.dtype, tuple(tensor.shape)
        large.append(compact(tensor))
        return (conjugate,)

    answers = [
        (key, ([sendable(t) for t in answer.tensors], answer.skeleton) if isinstance(answer, Payload) else answer)
        for key, answer in message.answers
    ]
    return pickle.dumps((message.asks, message.taken, answers), pickle.HIGHEST_PROTOCOL), large


def decode(data: bytes, large: list[Tensor]) -> Message:
    asks, taken, answers = pickle.loads(data)
    beside = iter(large)

    def tensor(sent: tuple[Any, ...]) -> Tensor:
        conjugate, *inside = sent
        if inside:
            content, dtype, shape = inside
            received = torch.frombuffer(bytearray(content), dtype=dtype).view(shape)
        else:
            received = next(beside)
        return received.conj() if conjugate else received

    received = [
        (key, Payload([tensor(sent) for sent in answer[0]], answer[1]) if isinstance(answer, tuple) else answer)
        for key, answer in answers
    ]
    return Message(asks, taken, received)
