"""Channels: answers between workers of one host, through memory that both have mapped.

    worker 0: compute thread ── writes 0F5, wakes ──> worker 1: compute thread reads it

A message of RPC wakes four threads one after the other: the network's thread here and there, an RPC thread, the
compute thread. A channel wakes one. Questions and everything between hosts go by RPC, which also tells when a peer
dies; so does what does not fit into the channel. Where that is so because payloads are larger than it was made for,
its reader offers a larger one. (TensorPipe's own shared memory polls: a core per process, see `rpc.py`.)

The reader of a channel makes it and offers it to the writer, in memory without a name (memfd_create(2)): nothing is
left behind, however a process ends, and the size of /dev/shm, 64 MB in many containers, does not matter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import pickle
import platform
import secrets
import struct
import sys
import threading
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .outbox import Answer, Key
from .payload import Payload, Place
from .ring_buffer import LINE, OVERHEAD_BYTES, TOKEN_BYTES, WRITTEN, RingBuffer
from .wakeup import Notifier, Wakeup

#: what the first channel takes, bytes of a payload; where payloads turn out to be larger, so is the next one
_FIRST = 2**18
#: what is larger yet goes by RPC: time is then that of touching memory, which should not be wasted on channels
LARGEST = 2**22
#: how many of the largest payloads a channel holds; who reads too slowly gets the rest by RPC
_ROOM = 4
#: size of the whole record, ns when it was written, run, number of its form, sizes of its name and of a new form
_HEAD = struct.Struct("<QqqIII")
#: number of the form of what has no payload, and of those that have no number
_NO_PAYLOAD, _UNNUMBERED = 0, 2**32 - 1
_MOST_FORMS = 1000
#: a copy of up to so many bytes is not worth letting other threads in between
_LITTLE = 2**15
_copy_little = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.PyDLL(None))
)
#: whether there can be channels here: others see what an x86 processor stores in the order in which it does
POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64" and hasattr(os, "memfd_create")


class Offer(NamedTuple):
    """Where the reader's memory is, for a process of the same host."""

    host: tuple[str, ...]
    process: int
    #: descriptors of that process: of the memory, and of the wakeup
    memory: int
    wakeup: int
    #: of the memory
    size: int
    #: what is at its beginning, so that no other memory is taken for it
    token: bytes


class Told(NamedTuple):
    """An answer that came by a channel, and when it was written, by the host's `perf_counter_ns`."""

    key: Key
    answer: Answer
    at_ns: int


def _host() -> tuple[str, ...]:
    """What processes share that may use channels: kernel, process numbers, and network, or they count as two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")


class Channels:
    """A worker's channels, in both directions; where there can be none, nothing is offered, accepted or written.

    Args:
        wakeup: notified when there is something to read.
        wanted: whether to have any.
    """

    def __init__(self, wakeup: Wakeup, *, wanted: bool = True) -> None:
        self.wakeup = wakeup
        #: who is on this host; None: no channels
        self._host: tuple[str, ...] | None = None
        if wanted and POSSIBLE:
            with suppress(OSError):  # a sandbox that does not say
                self._host = _host()
        self._gone: set[int] = set()
        self._lock = threading.Lock()
        #: what payloads the peers can write, bytes; the largest there are if they are not to be asked again
        self._offered: dict[int, int] = {}
        #: (peer, the channel's reader, its counters); channels that have been replaced too, as they may not be empty
        self._readers: tuple[tuple[int, _Reader, memoryview], ...] = ()
        self._writers: dict[int, _Writer] = {}

    def offer(self, peer: int) -> Offer | None:
        """Return a channel that `peer` may write; None: it has been offered one, or there is none."""
        with self._lock:
            return None if self._host is None or peer in self._offered else self._offer(peer, self._host, _FIRST)

    def offer_larger(self, peer: int, payload_bytes: int) -> Offer | None:
        """Return a channel with room for such payloads, if `peer` has one that is too small for them."""
        with self._lock:
            if self._host is None or not self._offered.get(peer, LARGEST) < payload_bytes <= LARGEST:
                return None
            return self._offer(peer, self._host, 1 << (payload_bytes - 1).bit_length())

    def _offer(self, peer: int, host: tuple[str, ...], largest: int) -> Offer | None:
        try:
            memory, reader = _new_reader(_ROOM * largest + OVERHEAD_BYTES)
        except OSError:  # the system does not give any, or not so much
            self._offered[peer] = LARGEST
            return None
        self._offered[peer] = largest
        self._readers = (*self._readers, (peer, reader, reader.ring.counters))
        return Offer(host, os.getpid(), memory, self.wakeup.descriptor, reader.ring.size, reader.ring.token)

    def refused(self, peer: int) -> None:
        """`peer`, on another host, will not write the channel that it was offered last; offer no more."""
        with self._lock:
            self._offered[peer] = LARGEST
            last = max(i for i, (reads_from, *_) in enumerate(self._readers) if reads_from == peer)
            self._readers = self._readers[:last] + self._readers[last + 1 :]

    def accept(self, peer: int, offer: Offer) -> bool:
        """Write to `peer` through the channel that it offers, if it is on this host; return whether it is."""
        if offer.host != self._host:
            return False
        writer = _accepted(offer)
        if writer is None:
            return False
        with self._lock:
            if peer in self._gone:
                return False
            before = self._writers.get(peer)
            if before is not None and before.size > writer.size:  # offers may overtake each other
                before.before = writer
            else:
                writer.before = before
                self._writers[peer] = writer
        return True

    def write(self, peer: int, key: Key, answer: Answer) -> bool:
        """Say `answer` to the question of `peer` for `key`; False: this is not the way. Thread-safe."""
        writer = self._writers.get(peer)
        return writer is not None and writer.write(key, answer)

    def read(self) -> list[tuple[int, Told]]:
        """Return (peer, what it wrote) for all that has come. For one thread."""
        found = []
        for peer, reader, counters in self._readers:
            while counters[0] != counters[WRITTEN] and (record := reader.read()) is not None:
                found.append((peer, record))
        return found

    def gone(self, peer: int) -> None:
        """`peer` reads nothing more."""
        with self._lock:
            self._gone.add(peer)
            self._writers.pop(peer, None)

    def unread(self) -> set[int]:
        """Return the peers that have not read everything yet."""
        return {peer for peer, writer in self._writers.copy().items() if not writer.empty}


def _new_reader(size: int) -> tuple[int, _Reader]:
    """Return the reading end of a new channel, and the descriptor of its memory, which lives as long."""
    memory = os.memfd_create("rpc-pipe channel")
    try:
        os.posix_fallocate(memory, 0, size)  # now, rather than a SIGBUS later
        ring = RingBuffer(mmap.mmap(memory, size))
    except BaseException:
        os.close(memory)
        raise
    ring.token = secrets.token_bytes(TOKEN_BYTES)
    reader = _Reader(ring)
    weakref.finalize(reader, os.close, memory)
    return memory, reader


def _accepted(offer: Offer) -> _Writer | None:
    """Return the writer's end of a channel on this host, None if it cannot be reached."""
    with suppress(OSError):
        memory = os.open(f"/proc/{offer.process}/fd/{offer.memory}", os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(memory).st_size == offer.size:
                ring = RingBuffer(mmap.mmap(memory, offer.size))
                if ring.token == offer.token:
                    return _Writer(ring, Notifier.of(offer.process, offer.wakeup))
        finally:
            os.close(memory)
    return None


class _Form(NamedTuple):
    """What payloads have in common that differ in their numbers only."""

    number: int
    #: what it is, until the reader knows
    definition: bytes
    #: of the tensors
    sizes: list[int]
    #: of the tensors with what aligns them
    total: int


class _Writer:
    """The writing end of a channel. Thread-safe."""

    def __init__(self, ring: RingBuffer, notifier: Notifier) -> None:
        self._ring = ring
        self._notifier = notifier
        self._largest = ring.size // _ROOM
        #: the smaller channel that this one replaces
        self.before: _Writer | None = None
        self._lock = threading.Lock()
        #: shapes and structure of payloads, told once
        self._forms: dict[Any, _Form] = {None: _Form(_NO_PAYLOAD, b"", [], 0)}

    @property
    def size(self) -> int:
        """Of its memory, bytes."""
        return self._ring.size

    @property
    def empty(self) -> bool:
        """Whether everything written has been read."""
        return self._ring.empty and (self.before is None or self.before.empty)

    def write(self, key: Key, answer: Answer) -> bool:
        """Say `answer` to the question for `key`; False: it does not fit, say it otherwise."""
        tensors: list[Tensor] = []
        described: Any = None
        if isinstance(answer, Payload):
            tensors = answer.tensors
            if not all([_plain(tensor) for tensor in tensors]):
                return False
            described = answer.skeleton, tuple([(t.shape, t.stride(), t.dtype) for t in tensors])
        elif answer is not None:
            return False
        run, name = key[0], key[1].encode()
        with self._lock:
            known = described is None or _comparable(described[0])
            form = self._forms.get(described) if known else None
            if form is None:
                form = self._new_form(described, tensors, known)
            begin = _HEAD.size + len(name)
            parts = _aligned(begin + len(form.definition))
            size = parts + form.total
            at = self._ring.room(size) if form.total <= self._largest else None
            if at is None:
                return False
            data = self._ring.data
            _HEAD.pack_into(data, at, size, time.perf_counter_ns(), run, form.number, len(name), len(form.definition))
            data[at + _HEAD.size : at + begin] = name
            to = self._ring.address + at + parts
            for tensor, nbytes in zip(tensors, form.sizes, strict=True):
                _copy(to, tensor.data_ptr(), nbytes)
                to += _aligned(nbytes)
            if form.definition:
                data[at + begin : at + begin + len(form.definition)] = form.definition
                if form.number != _UNNUMBERED:
                    self._forms[described] = form._replace(definition=b"")
            self._ring.written(size)
        self._notifier.notify()
        return True

    def _new_form(self, described: Any, tensors: list[Tensor], known: bool) -> _Form:
        number = len(self._forms) if known and len(self._forms) <= _MOST_FORMS else _UNNUMBERED
        sizes = [tensor.nbytes for tensor in tensors]
        return _Form(number, pickle.dumps(described), sizes, sum(map(_aligned, sizes)))


class _Reader:
    """The reading end of a channel."""

    def __init__(self, ring: RingBuffer) -> None:
        self.ring = ring
        self._forms: dict[int, Any] = {}

    def read(self) -> Told | None:
        """Take the oldest record out; None if there is none."""
        at = self.ring.front()
        if at is None:
            return None
        data = self.ring.data
        size, at_ns, run, number, name_size, definition_size = _HEAD.unpack_from(data, at)
        begin = at + _HEAD.size
        end = begin + name_size
        name = str(data[begin:end], "utf-8")
        if definition_size:
            self._forms[number] = pickle.loads(data[end : end + definition_size])
        answer = None
        if number != _NO_PAYLOAD:
            skeleton, tensors = self._forms[number]
            there = self.ring.address + at + _aligned(end - at + definition_size)
            copies = []
            for shape, strides, dtype in tensors:
                copy = torch.empty_strided(shape, strides, dtype=dtype, device="cpu")
                nbytes = copy.nbytes
                _copy(copy.data_ptr(), there, nbytes)
                there += _aligned(nbytes)
                copies.append(copy)
            answer = Payload(copies, skeleton)
        self.ring.read(size)
        return Told((run, name), answer, at_ns)


_PLAIN = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def _plain(tensor: Tensor) -> bool:
    """Tell whether shape, strides, type and memory say all of a tensor; in that memory are neither gaps nor repeats."""
    return (
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and tensor.dtype in _PLAIN
        and not tensor.is_neg()
        and (tensor.is_contiguous() or _span(tensor) == tensor.numel())
    )


def _span(tensor: Tensor) -> int:
    """Return over how many elements of memory a tensor reaches; fewer than it has if it repeats some."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)])


def _copy(to: int, at: int, size: int) -> None:
    (_copy_little if size <= _LITTLE else ctypes.memmove)(to, at, size)


def _comparable(skeleton: Any) -> bool:
    """Tell whether what is equal to `skeleton` is the same: 1, 1.0 and True are equal, and are not."""
    if type(skeleton) is tuple:
        return all([type(child) is Place for child in skeleton])
    return type(skeleton) is Place or skeleton is None


def _aligned(size: int) -> int:
    return -(-size // LINE) * LINE
