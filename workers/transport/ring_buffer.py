"""A queue of records in memory that two processes have mapped."""

from __future__ import annotations

import ctypes
import mmap

#: of a cache line: what two processes write is never in the same one, and torch aligns tensors to it too
LINE = 64
TOKEN_BYTES = 16
#: what of the memory is not for records
OVERHEAD_BYTES = 3 * LINE
#: where among the counters those of the reader are, behind what it has read: whether it sleeps, and by which way it
#: fetches large payloads, 0: by none
ASLEEP, WAY = 1, 2
#: that of the writer: what it has written
WRITTEN = LINE // 8


class RingBuffer:
    """Records in shared memory, for one writer and one reader.

    Two counters of bytes, each with one owner, say what has been read and written. A record lies in one piece; where
    none fits before the end, a size of 0 says that the next is at the start.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        head, self.data = memoryview(memory)[:OVERHEAD_BYTES], memoryview(memory)[OVERHEAD_BYTES:]
        self.counters = head[: 2 * LINE].cast("Q")
        self._token = head[2 * LINE : 2 * LINE + TOKEN_BYTES]
        self.size = len(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.data))
        self._capacity = len(self.data)

    @property
    def token(self) -> bytes:
        return bytes(self._token)

    @token.setter
    def token(self, token: bytes) -> None:
        self._token[:] = token

    @property
    def empty(self) -> bool:
        """Whether everything written has been read."""
        counters = self.counters
        return counters[0] == counters[WRITTEN]

    def room(self, size: int) -> int | None:
        """Return where to write a record of `size` bytes, None if there is no room now."""
        read, written = self.counters[0], self.counters[WRITTEN]
        at: int = written % self._capacity
        skipped = self._capacity - at if at + size > self._capacity else 0
        if written - read + skipped + size > self._capacity:
            return None
        if skipped:
            self.data[at : at + 8] = bytes(8)
            self.counters[WRITTEN] = written + skipped
            at = 0
        return at

    def written(self, size: int) -> int:
        """Let the reader see the record. Return where the next one begins, among all that has ever been written."""
        self.counters[WRITTEN] += size
        end: int = self.counters[WRITTEN]
        return end

    def has_read(self, end: int) -> bool:
        """Tell whether the reader is done with everything before `end`."""
        return self.counters[0] >= end

    def front(self) -> int | None:
        """Return where the oldest record is, None if there is none."""
        counters = self.counters
        read = counters[0]
        if read == counters[WRITTEN]:
            return None
        at: int = read % self._capacity
        if self.data[at : at + 8] != bytes(8):
            return at
        counters[0] = read + self._capacity - at
        return None if self.empty else 0
