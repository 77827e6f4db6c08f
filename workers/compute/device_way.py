"""Payloads from the device of one process to that of another of the same host, without a copy on the host.

    producer: payload ── copy stream ──> block of a pool ─ event ─> in a record of the channel: form, block, handles
    consumer: in its channel's order    block, opened once ── copy stream, behind the event ──> tensors of its own

Neither host waits: the consumer's event is waited for by its compute stream, and when the copy is done the consumer
says so by a counter, from where the block is free. A pool belongs to one consumer.
"""

from __future__ import annotations

import itertools
import secrets
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..transport.form import Form, Look, assemble, describe, form_of
from ..transport.payload import Payload, Staying
from ..transport.values import decode_value, encode_value
from .moving import Moving

#: the part of a device's library that a backend needs, such as `accelerator.Cuda`
_Device = Any
#: where tensors begin in a block, as kernels read so many bytes at once
_ALIGNED = 512
_PROOF_BYTES = 16
#: of blocks, in this process
_numbers = itertools.count(1)
#: a block serves payloads down to such a part of its size
_MOST_ROOM = 4


@dataclass(eq=False)
class _SharedBlock:
    memory: Tensor
    event: Any
    #: what a consumer opens it with: its number, its handles
    shared: bytes
    #: of the payload that is in it; it is free when the consumer has taken so many
    number: int = 0


@dataclass(slots=True)
class _Fetched(Moving):
    """A payload that comes from another device, and its form, which it has when it is there."""

    form: Form

    def unfold(self) -> Payload:
        return assemble(self.form, self.tensors)


class BlockWay:
    """One end of the way, which every worker with a device makes for itself.

    Args:
        out, entry: the streams on which payloads leave and enter.
    """

    name = "copied from its device to this one, by handles of its memory"

    def __init__(self, cuda: _Device, out: Any, entry: Any) -> None:
        self._cuda, self._out, self._in, self.device = cuda, out, entry, cuda.device

    def page(self) -> Any:
        """Return what a consumer tries this with, a plain value.

        Raises:
            OSError: the device does not share its memory.
        """
        try:
            proof = secrets.token_bytes(_PROOF_BYTES)
            with self._cuda.on(self._out):
                self._proof = _block(self._cuda, _PROOF_BYTES, 0)
                self._proof.memory.copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))
                self._proof.event.record(self._out)
            return self._cuda.identity(), self._proof.shared, proof
        except RuntimeError as error:
            raise OSError(str(error)) from error

    def lending(self) -> BlockLending:
        """Return the pool for one consumer."""
        return BlockLending(self._cuda, self._out)

    def reach(self, page: Any) -> BlockFetching:
        """Return what fetches a payload from the producer of this page, by where it lies.

        Raises:
            OSError: this way does not work, and why.
        """
        identity, shared, proof = page
        fetching = BlockFetching(self._cuda, self._in, identity)
        try:
            with self._cuda.on(self._in):
                memory, event = fetching.opened(shared)
                self._in.wait_event(event)
                found = torch.empty_like(memory, device=self._cuda.device).copy_(memory)
                self._cuda.recorded(self._in).synchronize()
            if bytes(found.tolist()) != proof:
                raise OSError("its memory holds something else")
        except RuntimeError as error:
            raise OSError(str(error).partition("\n")[0]) from error
        return fetching


def _block(cuda: _Device, size: int, number: int) -> _SharedBlock:
    with torch.inference_mode(False):  # tensors of that mode cannot be written in another
        memory, event = torch.empty(size, dtype=torch.uint8, device=cuda.device), cuda.shared_event()
    handles = encode_value((number, cuda.share(memory), cuda.share_event(event)))
    return _SharedBlock(memory, event, handles)


def _place(memory: Tensor, at: int, look: Look) -> Tensor:
    """Return the part of a block that holds a tensor which looks so."""
    part = memory[at : at + look.num_bytes].view(look.dtype)
    return part.as_strided(look.dense_shape, look.dense_strides)


def _places(looks: tuple[Look, ...]) -> tuple[list[int], int]:
    """Return where tensors begin, and how many bytes they take."""
    places, end = [], 0
    for look in looks:
        places.append(end)
        end += look.num_bytes + -look.num_bytes % _ALIGNED
    return places, end


class BlockLending:
    """Blocks of device memory that one consumer copies from. For one thread at a time."""

    def __init__(self, cuda: _Device, out: Any) -> None:
        self._cuda, self._out = cuda, out
        self._blocks: list[_SharedBlock] = []
        self.count = 0

    def lay(self, name: str, payload: Staying, taken: int) -> tuple[bytes, bytes]:
        """Have a payload copied to a block; return its form, and where it lies.

        Args:
            taken: how many of this pool's payloads the consumer has copied.

        Raises:
            RuntimeError: there is no memory, or the device is broken.
        """
        with self._cuda.on(self._out):
            self._out.wait_event(payload.event)
            form, tensors = describe(name, payload, self._cuda.device)
            looks = form_of(form).looks
            places, size = _places(looks)
            block = self._free(max(size, _ALIGNED), taken)
            for tensor, at, look in zip(tensors, places, looks, strict=True):
                if look.num_bytes:
                    self._cuda.copy(_place(block.memory, at, look), tensor)
                    self._cuda.hold(tensor, self._out)
            block.event.record(self._out)
        self.count += 1
        block.number = self.count
        return form, block.shared

    def _free(self, size: int, taken: int) -> _SharedBlock:
        free = [block for block in self._blocks if block.number <= taken]
        fits = [block for block in free if size <= block.memory.nbytes <= _MOST_ROOM * size]
        if not fits:
            for block in free:  # payloads have another size now
                self._blocks.remove(block)
            fits = [_block(self._cuda, 1 << (size - 1).bit_length(), next(_numbers))]
            self._blocks += fits
        return min(fits, key=lambda block: block.memory.nbytes)


class BlockFetching:
    """Copies payloads out of the blocks of one producer."""

    def __init__(self, cuda: _Device, entry: Any, identity: str) -> None:
        self._cuda, self._in, self._identity = cuda, entry, identity
        self._opened: dict[bytes, tuple[Tensor, Any]] = {}

    def opened(self, shared: bytes) -> tuple[Tensor, Any]:
        """Return a block's memory and event."""
        if shared not in self._opened:
            _, memory, event = decode_value(shared)
            with torch.inference_mode(False):
                self._opened[shared] = self._cuda.opened(self._identity, memory), self._cuda.opened_event(event)
        return self._opened[shared]

    def __call__(self, where: bytes, form: Form) -> tuple[Payload, Any]:
        """Have a payload copied; return it, and the event of its copy."""
        try:
            with self._cuda.on(self._in):
                memory, event = self.opened(where)
                self._in.wait_event(event)
                contents, device = [], self._cuda.device
                for look, at in zip(form.looks, _places(form.looks)[0], strict=True):
                    tensor = torch.empty_strided(look.dense_shape, look.dense_strides, dtype=look.dtype, device=device)
                    contents.append(self._cuda.copy(tensor, _place(memory, at, look)) if look.num_bytes else tensor)
                there = self._cuda.recorded(self._in)
        except RuntimeError as error:
            raise OSError(str(error).partition("\n")[0]) from error
        return _Fetched(contents, form.skeleton, [], there, form), there

    def release(self) -> None:
        """Let go of the producer's memory."""
        self._opened.clear()
