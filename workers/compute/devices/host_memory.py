"""Memory of the host that several processes map and register with their devices.

The producer's device copies to it, the consumer's device copies from it, and no processor copies. Both copies run at
the speed of pinned memory.
"""

from __future__ import annotations

import logging
import mmap
import os
import secrets
import weakref
from typing import Any

import torch
from torch import Tensor

from ....dependency import Malformed
from ...transport.values import decode_value, encode_value

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
