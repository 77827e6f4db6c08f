"""A queue of records in memory that two processes have mapped."""

from __future__ import annotations

import ctypes
import mmap

#: bytes of a cache line: two processes never write the same one, and torch aligns tensors to it too
LINE = 64
#: bytes of the mapping; the system gives memory for the used part alone
SIZE = 2**24
#: places of the reader's counters, behind its count of bytes: whether it sleeps; whether it reads large payloads
#: in the writer's memory; the kind of memory that it reads for payloads of the writer's device; how many it has copied
ASLEEP, LENDS, DEVICE, COPIED = 1, 2, 3, 4
#: place of the writer's counter of written bytes
WRITTEN = LINE // 8
_CAPACITY = SIZE - 2 * LINE
#: where all has been read by then, records continue from the start, in memory that caches still hold
_HOT = 2**18
_SKIP = bytes(8)


class RingBuffer:
    """Records in shared memory, for one writer and one reader.

    Two counters of bytes, each with one writing process, hold the read and the written position. A record lies in one
    piece; where none fits before the end, a size of 0 means that the next is at the start.

    Args:
        memory: its descriptor.
    """

    def __init__(self, memory: int) -> None:
        mapped = memoryview(mmap.mmap(memory, SIZE))
        self.counters, self.data = mapped[: 2 * LINE].cast("Q"), mapped[2 * LINE :]
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))

    def room(self, size: int) -> int | None:
        """Return where to write a record of `size` bytes, None if there is no room now."""
        read, written = self.counters[0], self.counters[WRITTEN]
        at: int = written % _CAPACITY
        skipped = _CAPACITY - at if at + size > _CAPACITY or (read == written and at > _HOT) else 0
        if written - read + skipped + size > _CAPACITY:
            return None
        if skipped:
            self.data[at : at + 8] = _SKIP
            self.counters[WRITTEN] = written + skipped
            at = 0
        return at

    def front(self) -> int | None:
        """Return where the oldest record is, None if there is none. Something has been written."""
        counters = self.counters
        at: int = counters[0] % _CAPACITY
        if self.data[at : at + 8] != _SKIP:
            return at
        counters[0] += _CAPACITY - at
        return None if counters[0] == counters[WRITTEN] else 0
