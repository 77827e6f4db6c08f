"""Memory of another process, read by NIXL (https://github.com/ai-dynamo/nixl), the engine for NVLink and RDMA.

Its reads are one-sided, as a pull is: the owner has nothing to do. What was seen of NIXL 1.5 over UCX decides the rest:

- A progress thread keeps a core busy, so there is none; notifications would make reads wait for the owner, so none is
  sent.
- The first contact of two agents needs both. So the owner lets its reader in, in a thread that ends with it.
- Of two agents that read each other, reads wait for the other. So one agent is read, and another one reads.
- Where UCX has no other road to a kind of memory than TCP, a read waits until the owner calls NIXL, for ever. So the
  owner says a last word once it calls no more: who reads that reads one-sidedly.
- UCX listens for other agents on every interface, and believes whoever comes: here, on the loopback one alone.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...dependency import ConfigError
from .form import Look
from .peer_memory import addresses_of, fetching
from .wakeup import Notifier, Wakeup

#: how long two agents may need to meet, and a read to end
_MEET_S, _READ_S = 5.0, 30.0
_PAUSE_S = 0.001
#: what a process of x86-64 may address, but the first page: registering it all costs nothing where no device pins it
_FIRST, _SIZE = 2**12, 2**47 - 2**13


class NixlMemory:
    """Payloads are read by NIXL where they lie in another process of this host; see `ways.py`."""

    name = "read by NIXL"

    def __init__(self) -> None:
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
        os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
        try:
            from nixl._api import nixl_agent, nixl_agent_config, nixl_thread_sync_t
        except ImportError as error:
            raise ConfigError(f"RPC_PIPE_WAYS nixl: {error}; pip install 'rpc-pipe[nixl]'") from error

        def agent() -> Any:
            sync = nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT
            made = nixl_agent(secrets.token_hex(8), nixl_agent_config(enable_prog_thread=False, sync_mode=sync))
            made.register_memory([(_FIRST, _SIZE, 0, "")], "DRAM")
            return made

        with _Refusals():
            self._owner, self._reader = agent(), agent()
        #: how many readers are let in now
        self._letting_in = 0
        self._lock = threading.Lock()
        #: what reads that have not ended may still write to
        self._given_up: list[Tensor] = []

    def page(self) -> tuple[bytes, int, int, int]:
        word, inside = torch.zeros(1, dtype=torch.int64, device="cpu"), Wakeup()
        with self._lock:
            self._letting_in += 1
        threading.Thread(target=self._let_in, args=(word, inside), name="nixl", daemon=True).start()
        return self._owner.get_agent_metadata(), word.data_ptr(), os.getpid(), inside.descriptor

    def _let_in(self, word: Tensor, inside: Wakeup) -> None:
        """Let UCX answer until the reader of a page is inside, or late; say the last word when it answers no more."""
        deadline = time.monotonic() + _MEET_S
        while not inside.wait(_PAUSE_S) and time.monotonic() < deadline:
            with suppress(OSError), _Refusals():
                self._owner.get_new_notifs()
        with self._lock:
            self._letting_in -= 1
        while self._letting_in:
            time.sleep(_PAUSE_S)
        word.fill_(1)
        time.sleep(_MEET_S)  # it is read yet

    lay = staticmethod(addresses_of)

    def reach(self, page: Any) -> Callable[[bytes], Callable[[Look], Tensor]]:
        metadata, address, process, inside = page
        with _Refusals():
            peer = self._reader.add_remote_agent(metadata)
        word, deadline = torch.zeros(1, dtype=torch.int64, device="cpu"), time.monotonic() + _MEET_S
        self._read(peer, address, word, deadline)
        Notifier.of(process, inside).notify()
        while not word:
            self._read(peer, address, word, deadline)
        return partial(fetching, partial(self._read, peer))

    def _read(self, peer: str, address: int, to: Tensor, deadline: float | None = None) -> None:
        """Fill a tensor with what lies at an address of `peer`.

        Raises:
            OSError: it has ended, or it is not done in time.
        """
        deadline = time.monotonic() + _READ_S if deadline is None else deadline
        with _Refusals():
            places = [self._reader.get_xfer_descs([(at, to.nbytes, 0)], "DRAM") for at in (to.data_ptr(), address)]
            handle = self._reader.initialize_xfer("READ", *places, peer)
            state = self._reader.transfer(handle)
            while state == "PROC" and time.monotonic() < deadline:
                state = self._reader.check_xfer_state(handle)
            if state == "PROC":
                self._given_up.append(to)
                raise OSError("a read waits for the other process")
            self._reader.release_xfer_handle(handle)
            if state != "DONE":
                raise OSError("a read has failed")


class _Refusals:
    """A context for calls of NIXL, whose errors have no class in common: each says that something does not work."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, OSError):
            raise OSError(str(error) or type(error).__name__) from error
