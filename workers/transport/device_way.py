"""Payloads from the device of one process to that of another of the same host, without a copy by a processor.

    producer: payload ── copy stream ──> block of a pool ─ event ─> in a record of the channel: form, block, handles
    consumer: in its channel's order    block, opened once ── copy stream, behind the event ──> tensors of its own

Neither host waits: the consumer's compute stream waits for its event. When the copy is done the consumer raises a
counter, and the block is free. A pool belongs to one consumer.

Blocks are memory of the device. Where another process cannot open such memory, since a driver forbids it, blocks are
memory of the host (`HostMemory`). Processes share no events there, so a record is written when the producer's copy
has ended; a helper thread of the producer waits for it.
"""

from __future__ import annotations

import itertools
import logging
import mmap
import os
import secrets
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...dependency import Malformed
from .form import Form, Look, Moving, assemble, describe, form_of
from .payload import Laid, Payload, Staying
from .peer_memory import HANDLES, ON_HOST
from .values import decode_value, encode_value

logger = logging.getLogger(__name__)
#: of the process, the descriptor, and the name, as a producer writes them
_TYPES = (int, int, str)


class HostMemory:
    """Makes and opens blocks of such memory.

    Args:
        cuda: the device's library, such as `accelerator.Cuda`.
    """

    name = "copied through memory of the host that both devices reach"

    def __init__(self, cuda: Any) -> None:
        self._cuda, self._registers, self._warned = cuda, False, False

    def block(self, size: int, number: int) -> tuple[Tensor, Any, bytes]:
        """Return a new block: memory, no event, and the encoded name with which a consumer opens it.

        Raises:
            OSError: the system gives no memory, or the device does not reach it.
        """
        name = f"rpc-pipe {secrets.token_hex(16)}"
        descriptor = os.memfd_create(name)
        os.ftruncate(descriptor, -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        view = memoryview(mmap.mmap(descriptor, 0))
        weakref.finalize(view, os.close, descriptor)  # the consumer opens it once, at any time
        memory = self._tensor(view)
        self._register(view, memory)
        return memory, None, encode_value((os.getpid(), descriptor, name))

    def opened(self, shared: bytes) -> tuple[Tensor, Any]:
        """Return the memory of another process's block, and no event.

        Raises:
            OSError: it cannot be mapped; or no block could be registered so far.
        """
        described = decode_value(shared)
        if type(described) is not tuple or tuple(map(type, described)) != _TYPES:
            raise Malformed("malformed message: no block of memory")
        process, descriptor, name = described
        path = f"/proc/{process}/fd/{descriptor}"
        if os.readlink(path) != f"/memfd:{name} (deleted)":
            raise OSError("another process has its number")
        mine = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            view = memoryview(mmap.mmap(mine, 0))
        finally:
            os.close(mine)
        memory = self._tensor(view)
        try:
            self._register(view, memory)
        except OSError as error:
            if not self._registers:
                raise
            if not self._warned:  # a copy from memory that is not registered is slow, and right
                logger.info("a block of %d bytes is copied by the driver alone: %s", memory.nbytes, error)
            self._warned = True
        return memory, None

    def _tensor(self, view: memoryview) -> Tensor:
        with torch.inference_mode(False):  # tensors of that mode cannot be written in another
            return torch.frombuffer(view, dtype=torch.uint8)

    def _register(self, view: memoryview, memory: Tensor) -> None:
        self._cuda.register(memory)
        self._registers = True
        # The last tensor on the memory holds the view. When a process ends, its driver unregisters.
        weakref.finalize(view, self._cuda.unregister, memory.data_ptr()).atexit = False


#: the part of a device's library that a backend needs, such as `accelerator.Cuda`
_Device = Any
#: tensors begin at multiples of it in a block, as kernels read this many bytes at once
_ALIGNED = 512
_PROOF_BYTES = 16
#: of blocks, in this process
_numbers = itertools.count(1)
#: number of a payload without a record for its consumer
_UNTOLD = 2**64


@dataclass(eq=False)
class _SharedBlock:
    memory: Tensor
    #: of the last copy to it, which other processes can wait for; None: of the host
    event: Any
    #: the number and handles with which a consumer opens it
    shared: bytes
    #: of the payload that is in it; it is free when the consumer has taken the payloads up to this number
    number: int = 0


@dataclass(slots=True)
class _LaidOnHost(Laid):
    """A payload in memory of the host, where its tensors are dense until the copy has ended."""

    def unfold(self) -> Payload:
        shown = assemble(form_of(self.form), self.tensors)  # copies a tensor with gaps, so not before
        return Laid(shown.tensors, shown.skeleton, self.form, self.block, self.event)


class DeviceMemory:
    """Makes blocks of the device's memory, and opens them by handles."""

    name = "copied from its device to this one, by handles of its memory"

    def __init__(self, cuda: _Device) -> None:
        self._cuda = cuda

    def block(self, size: int, number: int) -> tuple[Tensor, Any, bytes]:
        """Return a new block: memory, event, and the encoded number and handles with which a consumer opens it."""
        cuda = self._cuda
        with torch.inference_mode(False):  # tensors of that mode cannot be written in another
            memory, event = torch.empty(size, dtype=torch.uint8, device=cuda.device), cuda.shared_event()
        handles = number, cuda.identity(), cuda.share(memory), cuda.share_event(event)
        return memory, event, encode_value(handles)

    def opened(self, shared: bytes) -> tuple[Tensor, Any]:
        """Return memory and event of another process's block."""
        _, identity, memory, event = decode_value(shared)
        with torch.inference_mode(False):
            return self._cuda.opened(identity, memory), self._cuda.opened_event(event)


class DeviceWay:
    """One end of the way, which every worker with a device makes for itself.

    Args:
        out, entry: the streams of leaving and entering payloads.
    """

    name = "copied from device to device"

    def __init__(self, cuda: _Device, out: Any, entry: Any) -> None:
        self._cuda, self._out, self._in, self.device = cuda, out, entry, cuda.device
        self._memories: dict[int, Any] = {HANDLES: DeviceMemory(cuda), ON_HOST: HostMemory(cuda)}
        self._proofs: list[_SharedBlock] = []

    def page(self) -> Any:
        """Return, for each memory, plain values with which a consumer tries it, or the error if it fails."""
        return tuple([self._proof(memory) for memory in self._memories.values()])

    def _proof(self, memory: Any) -> tuple[bytes, bytes] | str:
        try:
            proof = secrets.token_bytes(_PROOF_BYTES)
            with self._cuda.on(self._out):
                block = _SharedBlock(*memory.block(_PROOF_BYTES, 0))
                block.memory[:_PROOF_BYTES].copy_(torch.frombuffer(bytearray(proof), dtype=torch.uint8))
                if block.event is not None:
                    block.event.record(self._out)
            self._proofs.append(block)
            return block.shared, proof
        except (OSError, RuntimeError) as error:
            return _first_line(error)

    def lending(self, kind: int) -> BlockLending:
        """Return the pool for one consumer, of blocks of the kind that it opens."""
        return BlockLending(self._cuda, self._out, self._memories[kind])

    def reach(self, page: Any) -> BlockFetching:
        """Return a function that fetches a payload of the producer of this page, by its place.

        Raises:
            OSError: no memory can be opened, and why.
        """
        why = ""
        for (kind, memory), tried in zip(self._memories.items(), page, strict=True):
            try:
                if isinstance(tried, str):
                    raise OSError(tried)
                how = memory.name + (f", since they cannot be {why}" if why else "")
                fetching = BlockFetching(self._cuda, self._in, memory, kind, how)
                fetching.prove(*tried)
                return fetching
            except (OSError, RuntimeError) as error:
                why += f"{', nor ' if why else ''}{memory.name}: {_first_line(error)}"
        raise OSError(why)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


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
    """Blocks of memory that one consumer copies from. For one thread at a time.

    Args:
        memory: makes the blocks.
    """

    def __init__(self, cuda: _Device, out: Any, memory: Any) -> None:
        self._cuda, self._out, self._memory = cuda, out, memory
        self._blocks: list[_SharedBlock] = []
        self._count = 0

    def lay(self, name: str, payload: Staying, taken: int) -> Laid:
        """Have a payload copied to a block; return it with its form, and where it lies.

        Args:
            taken: how many of this pool's payloads the consumer has copied.

        Raises:
            RuntimeError, OSError: there is no memory, or the device is broken.
        """
        with self._cuda.on(self._out):
            self._out.wait_event(payload.event)
            form, tensors = describe(name, payload, self._cuda.device)
            looks = form_of(form).looks
            places, size = _places(looks)
            block = self._free(max(size, _ALIGNED), taken)
            parts = [_place(block.memory, at, look) for at, look in zip(places, looks, strict=True)]
            for tensor, part in zip(tensors, parts, strict=True):
                if part.nbytes:
                    self._cuda.copy(part, tensor)
                    self._cuda.hold(tensor, self._out)
            block.number = _UNTOLD
            if block.event is not None:
                block.event.record(self._out)
                return Laid(payload.tensors, payload.skeleton, form, block, block.event)
            return _LaidOnHost(parts, form_of(form).skeleton, form, block, self._cuda.recorded(self._out))

    def told(self, block: _SharedBlock) -> int:
        """Number the payload in a block that has a record for the consumer."""
        self._count += 1
        block.number = self._count
        return self._count

    def untold(self, block: _SharedBlock) -> None:
        """Note that the payload in a block takes another way, from the block if that is memory of the host."""
        block.number = 0
        if block.event is None:
            self._blocks.remove(block)

    def _free(self, size: int, taken: int) -> _SharedBlock:
        free = [block for block in self._blocks if block.number <= taken]
        fits = [block for block in free if size <= block.memory.nbytes]
        if not fits:
            for block in free:  # consumers keep them open, so blocks may only be replaced by larger ones
                self._blocks.remove(block)
            fits = [_SharedBlock(*self._memory.block(1 << (size - 1).bit_length(), next(_numbers)))]
            self._blocks += fits
        return min(fits, key=lambda block: block.memory.nbytes)


class BlockFetching:
    """Copies payloads out of the blocks of one producer.

    Args:
        memory: opens the blocks.
        kind: number of the memory.
        how: how payloads travel, in a sentence about them.
    """

    def __init__(self, cuda: _Device, entry: Any, memory: Any, kind: int, how: str) -> None:
        self._cuda, self._in, self._memory, self.kind, self.how = cuda, entry, memory, kind, how
        self._opened: dict[bytes, tuple[Tensor, Any]] = {}

    def prove(self, shared: bytes, proof: bytes) -> None:
        """Raise OSError or RuntimeError if a block cannot be copied from."""
        with self._cuda.on(self._in):
            memory = self._block(shared)
            found = torch.empty(len(proof), dtype=torch.uint8, device=self._cuda.device).copy_(memory[: len(proof)])
            self._cuda.recorded(self._in).synchronize()
        if bytes(found.tolist()) != proof:
            raise OSError("its memory holds something else")

    def _block(self, shared: bytes) -> Tensor:
        """Return a block's memory, behind its event."""
        if shared not in self._opened:
            self._opened[shared] = self._memory.opened(shared)
        memory, event = self._opened[shared]
        if event is not None:
            self._in.wait_event(event)
        return memory

    def __call__(self, where: bytes, form: Form) -> tuple[Payload, Any]:
        """Have a payload copied; return it, and the event of its copy."""
        try:
            with self._cuda.on(self._in):
                memory = self._block(where)
                contents, device = [], self._cuda.device
                for look, at in zip(form.looks, _places(form.looks)[0], strict=True):
                    tensor = torch.empty_strided(look.dense_shape, look.dense_strides, dtype=look.dtype, device=device)
                    contents.append(self._cuda.copy(tensor, _place(memory, at, look)) if look.num_bytes else tensor)
                there = self._cuda.recorded(self._in)
        except RuntimeError as error:
            raise OSError(_first_line(error)) from error
        return Moving(contents, form.skeleton, form.looks, there), there

    def release(self) -> None:
        """Release the producer's memory."""
        self._opened.clear()
