"""Lanes: answers between workers of one host, through memory that both have mapped.

    worker 0: compute thread ── writes 0F5, rings ──> worker 1: compute thread wakes and reads it

A message of RPC wakes four threads one after the other: the network's thread here and there, an RPC thread, the
compute thread. A lane wakes one. It takes what is small; large payloads, all questions and everything between hosts go
by RPC, which also tells when a peer dies. (TensorPipe's own shared memory polls: a core per process, see `rpc.py`.)

The reader of a lane makes it and offers it to the writer, in memory without a name (memfd_create(2)): nothing is left
behind, however a process ends, and the size of /dev/shm, 64 MB in many containers, does not matter.
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
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .bell import BELL_BYTES, SharedBell
from .outbox import Answer, Key
from .payload import Payload, Place

#: payloads larger than this go by RPC, where the network's thread copies them
LARGEST = 2**18
#: of a lane; who reads too slowly gets the rest by RPC
_CAPACITY = 2**20
_TOKEN_BYTES = 16
#: parts of a record begin at cache lines, as do torch's tensors
_LINE = 64
#: size of the whole record, ns when it was written, run, number of its form, sizes of its name and of a new form
_HEAD = struct.Struct("<QqqIII")
#: number of the form of what has no payload, and of those that have no number
_NO_PAYLOAD, _UNNUMBERED = 0, 2**32 - 1
_MOST_FORMS = 1000
#: others see what an x86 processor stores in the order in which it does
_POSSIBLE = sys.platform == "linux" and platform.machine() == "x86_64"


class Offer(NamedTuple):
    """Where the reader's memory is, for a process of the same host."""

    host: tuple[str, ...]
    process: int
    descriptor: int
    token: bytes
    #: of the lane in that memory
    offset: int


class Record(NamedTuple):
    """An answer that came by a lane, and when it was written, by the host's `perf_counter_ns`."""

    key: Key
    answer: Answer
    at_ns: int


def _host() -> tuple[str, ...]:
    """What processes share that may use lanes: kernel, process numbers, and network, or they count as two hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return boot, os.readlink("/proc/self/ns/pid"), os.readlink("/proc/self/ns/net")


class Lanes:
    """A worker's lanes, in both directions; where there can be none, nothing is offered, accepted or written.

    Args:
        wanted: whether to have any.
    """

    def __init__(self, wanted: bool = True) -> None:
        self._inbox: _Inbox | None = None
        if wanted and _POSSIBLE:
            with suppress(OSError):  # the system does not give such memory
                self._inbox = _Inbox()
        self._offered: set[int] = set()
        self._writers: dict[int, _Writer] = {}

    @property
    def bell(self) -> SharedBell | None:
        """What rings when there is something to read."""
        return None if self._inbox is None else self._inbox.bell

    def offer(self, peer: int) -> Offer | None:
        """Return once for each peer a lane that it may write; None: it has been offered, or there is none."""
        if self._inbox is None or peer in self._offered:
            return None
        self._offered.add(peer)
        with suppress(OSError):  # no memory is left for it
            return self._inbox.offer(peer)
        return None

    def accept(self, peer: int, offer: Offer) -> bool:
        """Write to `peer` through the lane that it offers, if it is on this host; return whether it is."""
        writer = None if self._inbox is None else _accepted(offer)
        if writer is not None:
            self._writers[peer] = writer
        return writer is not None

    def write(self, peer: int, key: Key, answer: Answer) -> bool:
        """Say `answer` to the question of `peer` for `key`; False: this is not the way. Thread-safe."""
        writer = self._writers.get(peer)
        return writer is not None and writer.write(key, answer)

    def read(self) -> list[tuple[int, Record]]:
        """Return (peer, what it wrote) for all that has come. For one thread."""
        return [] if self._inbox is None else self._inbox.read()

    def gone(self, peer: int) -> None:
        """`peer` reads nothing more."""
        self._writers.pop(peer, None)

    def unread(self) -> set[int]:
        """Return the peers that have not read everything yet."""
        return {peer for peer, writer in self._writers.copy().items() if not writer.empty}


class _Inbox:
    """The lanes that a worker reads, and the bell that all who write them ring."""

    def __init__(self) -> None:
        self._host = _host()
        self._descriptor = os.memfd_create("rpc-pipe")
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._size = 0
        head = self._grow(mmap.PAGESIZE)
        head[BELL_BYTES : BELL_BYTES + _TOKEN_BYTES] = self._token
        self.bell = SharedBell(head, new=True)
        self._readers: tuple[tuple[int, _Reader], ...] = ()

    def offer(self, peer: int) -> Offer:
        """Make a lane for `peer` to write."""
        offset = self._size
        reader = _Reader(_Ring(self._grow(_CAPACITY)))
        self._readers = (*self._readers, (peer, reader))
        return Offer(self._host, os.getpid(), self._descriptor, self._token, offset)

    def _grow(self, size: int) -> mmap.mmap:
        offset, self._size = self._size, self._size + size
        os.posix_fallocate(self._descriptor, offset, size)  # now, rather than a SIGBUS later
        return mmap.mmap(self._descriptor, size, offset=offset)

    def read(self) -> list[tuple[int, Record]]:
        """Return (peer, what it wrote) for all that has come. For one thread."""
        found = []
        for peer, reader in self._readers:
            while (record := reader.read()) is not None:
                found.append((peer, record))
        return found


def _accepted(offer: Offer) -> _Writer | None:
    """Return the writer's end of a lane, None if its reader is not on this host."""
    if offer.host != _host():
        return None
    with suppress(OSError):
        descriptor = os.open(f"/proc/{offer.process}/fd/{offer.descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            head = mmap.mmap(descriptor, mmap.PAGESIZE)
            if head[BELL_BYTES : BELL_BYTES + _TOKEN_BYTES] == offer.token:
                ring = _Ring(mmap.mmap(descriptor, _CAPACITY, offset=offer.offset))
                return _Writer(ring, SharedBell(head, new=False))
        finally:
            os.close(descriptor)
    return None


class _Ring:
    """Records in shared memory, for one writer and one reader.

    Two counters of bytes, each with one owner, say what has been written and read. A record lies in one piece; where
    none fits before the end, a size of 0 says that the next is at the start.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._counters = memoryview(memory)[: 2 * _LINE].cast("Q")
        self.data = memoryview(memory)[2 * _LINE :]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self._capacity = len(self.data)

    @property
    def empty(self) -> bool:
        """Whether everything written has been read."""
        counters = self._counters
        return counters[0] == counters[_LINE // 8]

    def room(self, size: int) -> int | None:
        """Return where to write a record of `size` bytes, None if there is no room now."""
        read, written = self._counters[0], self._counters[_LINE // 8]
        at: int = written % self._capacity
        skipped = self._capacity - at if at + size > self._capacity else 0
        if written - read + skipped + size > self._capacity:
            return None
        if skipped:
            self.data[at : at + 8] = bytes(8)
            self._counters[_LINE // 8] = written + skipped
            at = 0
        return at

    def written(self, size: int) -> None:
        """Let the reader see the record."""
        self._counters[_LINE // 8] += size

    def front(self) -> int | None:
        """Return where the oldest record is, None if there is none."""
        counters = self._counters
        read = counters[0]
        if read == counters[_LINE // 8]:
            return None
        at: int = read % self._capacity
        if self.data[at : at + 8] != bytes(8):
            return at
        counters[0] = read + self._capacity - at
        return None if self.empty else 0

    def read(self, size: int) -> None:
        """Give the place of the oldest record back."""
        self._counters[0] += size


class _Writer:
    """The writing end of a lane. Thread-safe."""

    def __init__(self, ring: _Ring, bell: SharedBell) -> None:
        self._ring = ring
        self._bell = bell
        self._lock = threading.Lock()
        #: shapes and structure of payloads, told once
        self._forms: dict[Any, int] = {}

    @property
    def empty(self) -> bool:
        """Whether everything written has been read."""
        return self._ring.empty

    def write(self, key: Key, answer: Answer) -> bool:
        """Say `answer` to the question for `key`; False: it does not fit, say it otherwise."""
        tensors: list[Tensor] = []
        if isinstance(answer, Payload):
            tensors = answer.tensors
            if not all(map(_plain, tensors)):
                return False
        elif answer is not None:
            return False
        sizes = [tensor.nbytes for tensor in tensors]
        if sum(sizes) > LARGEST:
            return False
        form = None if answer is None else (answer.skeleton, tuple([(t.shape, t.stride(), t.dtype) for t in tensors]))
        with self._lock:
            number, definition = self._number(form)
            name = key[1].encode()
            begin = _HEAD.size + len(name)
            parts = _aligned(begin + len(definition))
            size = parts + sum([_aligned(size) for size in sizes])
            at = self._ring.room(size)
            if at is None:
                return False
            data = self._ring.data
            _HEAD.pack_into(data, at, size, time.perf_counter_ns(), key[0], number, len(name), len(definition))
            data[at + _HEAD.size : at + begin] = name
            data[at + begin : at + begin + len(definition)] = definition
            to = self._ring.address + at + parts
            for tensor, nbytes in zip(tensors, sizes, strict=True):
                ctypes.memmove(to, tensor.data_ptr(), nbytes)
                to += _aligned(nbytes)
            self._ring.written(size)
            if definition and number != _UNNUMBERED:
                self._forms[form] = number
        self._bell.ring()
        return True

    def _number(self, form: Any) -> tuple[int, bytes]:
        """Return the number of a payload's form and, if the reader does not know it, what it is."""
        if form is None:
            return _NO_PAYLOAD, b""
        skeleton = form[0]
        if not (skeleton is None or type(skeleton) is Place or _all_places(skeleton)):
            return _UNNUMBERED, pickle.dumps(form)  # values that are equal, such as 1 and True, may not be the same
        number = self._forms.get(form)
        if number is not None:
            return number, b""
        number = len(self._forms) + 1
        return number if number <= _MOST_FORMS else _UNNUMBERED, pickle.dumps(form)


class _Reader:
    """The reading end of a lane."""

    def __init__(self, ring: _Ring) -> None:
        self._ring = ring
        self._forms: dict[int, Any] = {}

    def read(self) -> Record | None:
        """Take the oldest record out; None if there is none."""
        at = self._ring.front()
        if at is None:
            return None
        data = self._ring.data
        size, at_ns, run, number, name_size, definition_size = _HEAD.unpack_from(data, at)
        begin = at + _HEAD.size
        end = begin + name_size
        key = run, str(data[begin:end], "utf-8")
        if definition_size:
            form = self._forms[number] = pickle.loads(data[end : end + definition_size])
        answer = None
        if number != _NO_PAYLOAD:
            skeleton, tensors = form if definition_size else self._forms[number]
            there = self._ring.address + _aligned(end - at + definition_size) + at
            copies = []
            for shape, strides, dtype in tensors:
                copy = torch.empty_strided(shape, strides, dtype=dtype)
                nbytes = copy.nbytes
                ctypes.memmove(copy.data_ptr(), there, nbytes)
                there += _aligned(nbytes)
                copies.append(copy)
            answer = Payload(copies, skeleton)
        self._ring.read(size)
        return Record(key, answer, at_ns)


_PLAIN = {
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
}  # fmt: skip


def _plain(tensor: Tensor) -> bool:
    """Tell whether shape, strides, type and memory say all of a tensor, without gaps in that memory."""
    return (
        type(tensor) is Tensor
        and tensor.dtype in _PLAIN
        and tensor.layout is torch.strided
        and tensor.is_cpu
        and not tensor.is_neg()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


def _all_places(skeleton: Any) -> bool:
    return type(skeleton) is tuple and all([type(child) is Place for child in skeleton])


def _aligned(size: int) -> int:
    return -(-size // _LINE) * _LINE
