"""Channels: answers between workers of one host, through memory that both have mapped.

    worker 0: compute thread ── writes 0F5, wakes ──> worker 1: compute thread reads it

A message of RPC wakes four threads one after the other: the network's thread here and there, an RPC thread, the
compute thread. A channel wakes one, and only if it sleeps. Questions and everything between hosts go by RPC, which also
notices the death of a peer. (TensorPipe's shared memory polls: a core per process, see `rpc.py`.)

    worker 0: tensor stays ── writes where it lies, wakes ──> worker 1: fetches it into a tensor of its own

For a large payload only its form and place go through the channel: it is lent, and stays unchanged until the reader is
done with the record. Where its memory cannot be read, payloads that are too large for a channel go by messages.

The reader of a channel makes it and offers it to the writer, in memory without a name (memfd_create(2)): nothing is
left behind, however a process ends, and the size of /dev/shm, 64 MB in many containers, does not matter.
"""

from __future__ import annotations

import logging
import os
import platform
import secrets
import struct
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from ...dependency import Malformed
from .form import Form, assemble, copy_memory, describe, form_of
from .from_device import FromDevice, ToDevice
from .outbox import Answer, Key
from .payload import Laid, Staying
from .peer_memory import ASLEEP, LENDS, LINE, SIZE, WRITTEN, Fetch, PeerMemory, RingBuffer
from .values import malformed
from .wakeup import Notifier, Wakeup

if TYPE_CHECKING:
    from .device_way import DeviceWay

logger = logging.getLogger(__name__)

#: larger payloads are lent, where a way works
LENT_FROM = 2**21
#: a channel takes payloads up to this size; a reader that is too slow gets the rest by messages
LARGEST = SIZE // 4
#: tensors for payloads of up to this many bytes are made ahead
_SMALL = 2**15
#: size of the whole record, ns when it was written, run, sizes of: name, form (0: no payload), where the contents lie
#: that are not in it
_HEAD = struct.Struct("<QqqIIQ")
_NONE = (-1, 0, 0, 0, 0, 0)
#: names of the pages of a process's memory and of its device; the bit of a place's size that marks the device
_MEMORY, _DEVICE, _ON_DEVICE = "memory", "device", 1 << 63
#: whether there can be channels here: an x86 processor keeps its stores in order, and its loads; but a load may
#: overtake an earlier store. Python has no fence between these, but the release of a lock is one
POSSIBLE = sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and hasattr(os, "memfd_create")


class Offer(NamedTuple):
    """Where the reader's memory is, for a process of the same host."""

    process: int
    #: descriptors of that process: of the memory, and of the wakeup
    memory: int
    wakeup: int
    #: of the memory, so that no other memory is mistaken for it: the reader's network, as a process in another network
    #: counts as another host, and random digits
    name: str


def _network() -> str:
    return os.readlink("/proc/self/ns/net")


class Channels:
    """A worker's channels, in both directions; where there can be none, nothing is offered, accepted or written.

    Args:
        wakeup: notified when there is something to read.
    """

    def __init__(self, worker: int, wakeup: Wakeup) -> None:
        self._worker, self.wakeup, self._memory = worker, wakeup, PeerMemory()
        self._lock = threading.Lock()
        self._offered: set[int] = set()
        #: (peer, the channel's reader, its counters)
        self._readers: tuple[tuple[int, _MappedReader, memoryview], ...] = ()
        self._writers: dict[int, _Writer] = {}
        self._gone: set[int] = set()
        #: lent payloads: peer, its writer, the reader's counter and its value when they are taken, key, tensors
        self.lent: deque[tuple[int, _Writer, int, int, Key, list[Tensor]]] = deque()
        #: of payloads that stay on this worker's device; None: it has none
        self.device: DeviceWay | None = None

    def offer(self, peer: int) -> Offer | None:
        """Return a channel for the answers of `peer`; None if one has been offered, or none is possible."""
        with self._lock, suppress(OSError):  # the system does not give any
            if POSSIBLE and peer not in self._offered:
                self._offered.add(peer)
                name = f"rpc-pipe {_network()} {secrets.token_hex(16)}"
                memory = os.memfd_create(name)
                reader = _MappedReader(memory)
                weakref.finalize(reader, os.close, memory)
                self._readers = (*self._readers, (peer, reader, reader.counters))
                return Offer(os.getpid(), memory, self.wakeup.descriptor, name)
        return None

    def decided(self, peer: int, pages: Future[Any]) -> None:
        """Take the reply of `peer` to an offer: None, or the pages of its memory and of its device."""
        with self._lock:
            ((_, reader, _),) = (entry for entry in self._readers if entry[0] == peer)
            if pages.exception() is not None or pages.result() is None:  # it has left, or is on another host
                self._readers = tuple(entry for entry in self._readers if entry[0] != peer)
                return
        how = reader.choose(self._memory, pages.result().get(_MEMORY))
        logger.info("worker %d: large payloads of worker %d are %s", self._worker, peer, how)
        if self.device is not None:
            how = reader.from_device.choose(self.device, pages.result().get(_DEVICE))
            logger.info("worker %d: payloads on the device of worker %d are %s", self._worker, peer, how)

    def accept(self, peer: int, offer: Offer) -> dict[str, Any] | None:
        """Write to `peer` through the channel that it offers; return the pages of this worker's memory and device.

        None: it is on another host.
        """
        if type(offer) is not Offer or tuple(map(type, offer)) != (int, int, int, str):
            raise Malformed(f"malformed message: worker {peer} offers no channel")
        with self._lock, suppress(OSError):
            path = f"/proc/{offer.process}/fd/{offer.memory}"
            here = _network() in offer.name and os.readlink(path) == f"/memfd:{offer.name} (deleted)"
            if here and peer not in self._gone:
                memory = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                try:
                    notifier = Notifier.of(offer.process, offer.wakeup)
                    self._writers[peer] = _Writer(memory, notifier, self._memory, self.device)
                finally:
                    os.close(memory)
                of_device = {} if self.device is None else {_DEVICE: self.device.page()}
                return {_MEMORY: self._memory.page(), **of_device}
        return None

    def write(self, peer: int, key: Key, answer: Answer) -> bool | None:
        """Answer the question of `peer` for `key` through its channel; None if that cannot be. Thread-safe.

        Returns:
            Whether it is in the reader's memory; else it has been lent, and stays the writer's until `returned`.
        """
        writer = self._writers.get(peer)
        if writer is None or (written := writer.write(key, answer)) is None:
            return None
        counter, end, lent = written
        if lent:
            self.lent.append((peer, writer, counter, end, key, lent))
        return not lent

    def takes_from_device(self, peer: int, device: torch.device) -> bool:
        """Return whether `peer` copies payloads from this device of this worker."""
        writer = self._writers.get(peer)
        known = self.device is not None and self.device.device == device
        return known and writer is not None and writer.to_device.takes

    def lay_on_host(self, peer: int, key: Key, payload: Staying) -> Laid | None:
        """Have a payload copied to memory of the host that the device of `peer` reaches; None: it reaches none."""
        writer = self._writers.get(peer)
        return None if writer is None else writer.to_device.lay_on_host(key, payload)

    def settle(self, *, wait: bool = False) -> None:
        """Show writers which payloads have been copied from their devices; `wait` for the rest. For any thread."""
        for _, reader, _ in self._readers:
            reader.from_device.settle(wait=wait)

    def release(self) -> None:
        """Release all memory of other workers' devices."""
        for _, reader, _ in self._readers:
            reader.from_device.release()

    def returned(self) -> list[tuple[int, Key]]:
        """Return the lent payloads, by peer, that readers have taken since the last call. For one thread."""
        found = []
        for _ in range(len(self.lent)):
            entry = self.lent.popleft()
            peer, writer, counter, end, key, _ = entry
            if writer.counters[counter] >= end:
                found.append((peer, key))
            elif peer not in self._gone:
                self.lent.append(entry)
        return found

    def reads(self, peer: int) -> bool:
        """Return whether `peer`, which then is on this host, has a channel to this worker."""
        return any(peer == source for source, *_ in self._readers)

    def read(self) -> list[tuple[int, Key, Answer | OSError, int]]:
        """Return (peer, key, answer, when it was written by the host's `perf_counter_ns`) of all arrivals.

        If a lent payload cannot be read, the cause is in the place of the answer. For one thread.
        """
        found: list[tuple[int, Key, Answer | OSError, int]] = []
        for peer, reader, counters in self._readers:
            if reader.from_device.copying:
                reader.from_device.settle(wait=False)
            while counters[0] != counters[WRITTEN] and (record := reader.read()) is not None:
                found.append((peer, *record))
        return found

    def sleep(self) -> bool:
        """Have writers notify from now on; return whether there is something to read. For the thread that reads."""
        for _, reader, _ in self._readers:
            reader.prepare()
        with self._lock:  # its release is a fence: a writer sees that this sleeps, or this sees the new record
            for _, _, counters in self._readers:
                counters[ASLEEP] = 1
        return any([counters[0] != counters[WRITTEN] for _, _, counters in self._readers])

    def wake(self) -> None:
        """Have writers notify no more: each notification is a call of the system."""
        for _, _, counters in self._readers:
            counters[ASLEEP] = 0

    def gone(self, peer: int) -> None:
        """`peer` reads nothing more."""
        with self._lock:
            self._gone.add(peer)
            self._writers.pop(peer, None)


class _Writer(RingBuffer):
    """The writing end of a channel. Thread-safe."""

    def __init__(self, memory: int, notifier: Notifier, lending: PeerMemory, device: DeviceWay | None = None) -> None:
        super().__init__(memory)
        self._notifier, self._lending, self._lock = notifier, lending, threading.Lock()
        self.to_device = ToDevice(device, self.counters, self._tell)

    def write(self, key: Key, answer: Answer) -> tuple[int, int, list[Tensor]] | None:
        """Write the answer to the question for `key`; None: no room.

        Returns:
            The reader's counter, its value when the record has been taken, and the lent tensors.

        Raises:
            ConfigError: the payload cannot travel.
        """
        if isinstance(answer, (Staying, Laid)):
            return self.to_device.write(key, answer)
        form, tensors = (b"", []) if answer is None else describe(key[1], answer)
        contents, where = 0, b""
        for tensor in tensors:
            contents += tensor.nbytes + -tensor.nbytes % LINE
        if contents > LENT_FROM and self.counters[LENDS]:
            where, contents = self._lending.lay(tensors), 0
        elif contents > LARGEST:
            return None
        end = self._record(key, form, where, len(where), tensors, contents)
        return None if end is None else (0, end, tensors if where else [])

    def _tell(self, key: Key, form: bytes, where: bytes) -> bool:
        return self._record(key, form, where, len(where) | _ON_DEVICE, [], 0) is not None

    def _record(
        self, key: Key, form: bytes, where: bytes, said: int, tensors: Sequence[Tensor], contents: int
    ) -> int | None:
        """Write a record, with the contents unless `where` is their place; return its end, None: no room."""
        run, name = key[0], key[1].encode()
        described = _HEAD.size + len(name) + len(form) + len(where)
        begin = described + -described % LINE
        size = begin + contents
        with self._lock:
            at = self.room(size)
            if at is None:
                return None
            data = self.data
            _HEAD.pack_into(data, at, size, time.perf_counter_ns(), run, len(name), len(form), said)
            data[at + _HEAD.size : at + described] = name + form + where
            if not where:
                to = self.address + at + begin
                for tensor in tensors:
                    copy_memory(to, tensor.data_ptr(), tensor.nbytes)
                    to += tensor.nbytes + -tensor.nbytes % LINE
            self.counters[WRITTEN] = end = self.counters[WRITTEN] + size
        # The lock's release was a fence: the reader sees the record, or this that the reader sleeps.
        if self.counters[ASLEEP]:
            self._notifier.notify()
        return end


class _MappedReader(RingBuffer):
    """The reading end of a channel."""

    def __init__(self, memory: int) -> None:
        os.ftruncate(memory, SIZE)
        super().__init__(memory)
        self.counters[ASLEEP] = 1  # it may be made while the thread that reads sleeps
        self._fetching: Fetch | None = None
        self.from_device = FromDevice(self.counters)
        #: of the last record that was copied, if it was small; and tensors for another one that looks so
        self._last: Form | None = None
        self._prepared: list[Tensor] = []

    def choose(self, memory: PeerMemory, page: Any) -> str:
        """Have large payloads lent, if the writer's memory can be read. Return how they travel."""
        try:
            self._fetching = memory.reach(page)
        except OSError as error:
            return f"copied by both, since they cannot be {memory.name}: {error}"
        self.counters[LENDS] = 1
        return f"{memory.name}, from {LENT_FROM // 1024} KiB on"

    def read(self) -> tuple[Key, Answer | OSError, int] | None:
        """Take the oldest record out: key, answer or why it cannot be read, when it was written; or None."""
        at, data = self.front(), self.data
        if at is None:
            return None
        there = min(len(data) - at, self.counters[WRITTEN] - self.counters[0])
        size, at_ns, run, name_size, form_size, where_size = (
            _HEAD.unpack_from(data, at) if there >= _HEAD.size else _NONE
        )
        on_device, where_size = where_size & _ON_DEVICE, where_size & ~_ON_DEVICE
        form_at = at + _HEAD.size + name_size
        form_end = form_at + form_size
        begin = form_end + where_size + -(form_end + where_size - at) % LINE
        if not begin <= at + size <= at + there:
            raise Malformed("malformed message: a record that is no part of its channel")
        try:
            name = str(data[at + _HEAD.size : form_at], "utf-8")
        except UnicodeDecodeError as error:
            raise malformed(error) from error
        answer: Answer | OSError = None
        if form_size:
            form = form_of(bytes(data[form_at:form_end]))
            needed = sum([look.num_bytes + -look.num_bytes % LINE for look in form.looks])
            fits = where_size == 8 * len(form.looks) if where_size else begin + needed == at + size
            if not (on_device or fits):
                raise Malformed(f"malformed message: a record of {size} bytes for {needed} of contents")
            try:
                contents = []
                if on_device:
                    answer = self.from_device.fetch(bytes(data[form_end : form_end + where_size]), form)
                elif where_size:
                    if self._fetching is None:
                        raise Malformed("malformed message: a payload is lent to a worker that cannot fetch it")
                    contents = self._fetching(bytes(data[form_end : form_end + where_size]), form.looks)
                else:
                    contents = self._copied(form, self.address + begin)
                answer = answer or assemble(form, contents)
            except OSError as error:
                answer = error
        self.counters[0] += size  # its place may be written again
        return (run, name), answer, at_ns

    def _copied(self, form: Form, there: int) -> list[Tensor]:
        """Return the tensors of a record, with the contents that lie one after the other at an address."""
        found, self._prepared = self._prepared, []
        if form is not self._last:
            found, self._last = [], form if form.num_bytes <= _SMALL else None
        if not found or found[0].is_inference() != torch.is_inference_mode_enabled():
            found = [look.empty() for look in form.looks]
        for tensor, look in zip(found, form.looks, strict=True):
            copy_memory(tensor.data_ptr(), there, look.num_bytes)
            there += look.num_bytes + -look.num_bytes % LINE
        return found

    def prepare(self) -> None:
        """Make the tensors for a record like the last one, as most records are, while no worker waits for it."""
        if self._last is not None and not self._prepared:
            self._prepared = [look.empty() for look in self._last.looks]
