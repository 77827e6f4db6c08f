"""Memory that processes of a host share: mapped by two for a queue of records, or of another, which the kernel reads.

The kernel makes one copy, and the owner has nothing to do.
`process_vm_readv(2)` needs the right to trace the owner. Processes of one user have it; where Yama grants it to a
process's ancestors only, workers grant it to their launcher and its descendants (`let_siblings_read`). Sandboxes may
refuse it altogether, so it is tried on a proof: a process with the right number may belong to another job.
"""

import ctypes
import mmap
import os
import secrets
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...dependency import Malformed
from .form import Look

_PR_SET_PTRACER = 0x59616D61
#: the process that adopts orphans: to let its descendants read would be to let everybody
_INIT = 1
_PROOF_BYTES = 16
#: returns the tensors of a payload, from where they lie and their layouts; raises OSError if it cannot
Fetch = Callable[[bytes, Iterable[Look]], list[Tensor]]


class _IoVec(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("size", ctypes.c_size_t)]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    return libc


def let_siblings_read() -> None:
    """Let the descendants of this process's parent read its memory, where Yama would let only its ancestors."""
    launcher = os.getppid()
    if launcher > _INIT:
        # A kernel without Yama does not know the option, and needs no leave.
        _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(launcher), 0, 0, 0)


class PeerMemory:
    """Payloads are read where they lie in another process; see `shared_memory.py`."""

    name = "read from its memory"

    def __init__(self) -> None:
        self._proof = ctypes.create_string_buffer(secrets.token_bytes(_PROOF_BYTES))
        let_siblings_read()

    def page(self) -> tuple[int, int, bytes]:
        return os.getpid(), ctypes.addressof(self._proof), self._proof.raw

    def lay(self, tensors: Sequence[Tensor]) -> bytes:
        return struct.pack(f"<{len(tensors)}Q", *[tensor.data_ptr() for tensor in tensors])

    def reach(self, page: Any) -> Fetch:
        if type(page) is not tuple or tuple(map(type, page)) != (int, int, bytes) or len(page[2]) < _PROOF_BYTES:
            raise Malformed("malformed message: no page of a process's memory")
        process, address, proof = page
        seen = torch.empty(len(proof), dtype=torch.uint8, device="cpu")
        read_memory(process, address, seen)
        if bytes(seen.tolist()) != proof:
            raise OSError("another process has its number")
        return partial(_fetched, process)


def _fetched(process: int, where: bytes, looks: Iterable[Look]) -> list[Tensor]:
    """Return tensors of another process, from the addresses that its `lay` returned."""
    found = []
    for (address,), look in zip(struct.iter_unpack("<Q", where), looks, strict=True):
        if look.num_bytes:  # memory that is not there is not waited for with as much memory here
            read_memory(process, address + look.num_bytes - 1, torch.empty(1, dtype=torch.uint8, device="cpu"))
        found.append(look.empty())
        read_memory(process, address, found[-1])
    return found


def read_memory(process: int, address: int, to: Tensor) -> None:
    """Fill a tensor with the content of an address of another process, which is called by its number.

    Raises:
        OSError: it cannot be read.
    """
    done, size, here, copy = 0, to.nbytes, to.data_ptr(), _libc().process_vm_readv
    while done < size:  # more than 2 GiB take more than one call
        into, source = _IoVec(here + done, size - done), _IoVec(address + done, size - done)
        count = copy(process, ctypes.byref(into), 1, ctypes.byref(source), 1, 0)
        if count <= 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        done += count


#: bytes of a cache line: two processes never write the same one, and torch aligns tensors to it too
LINE = 64
#: bytes of the mapping; the system gives memory for the used part alone
SIZE = 2**24
#: places of the reader's counters, behind its count of bytes: whether it sleeps; whether it reads large payloads
#: in the writer's memory; the kind of memory that it reads for payloads of the writer's device; how many it has copied
ASLEEP, LENDS, DEVICE, COPIED = 1, 2, 3, 4
#: kinds of memory for payloads of a device: the device's, opened by handles; the host's
HANDLES, ON_HOST = 1, 2
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
