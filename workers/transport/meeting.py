"""Where workers leave a word for each other before they can talk: a folder of one host, or torchrun's store.

Anybody who reaches a store can read and forge what is in it, so no word is believed: what is left there is where to
find whom, and who is found there has to prove who it is.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from .deadline import within

_MOST_BYTES = 512
_PAUSE_S = 0.02


class Meeting(Protocol):
    """Words by name, each left once."""

    def leave(self, name: str, word: str) -> None:
        """Leave a word for all others."""

    def take(self, name: str, timeout_s: float) -> str:
        """Return the word that was left under a name.

        Raises:
            TimeoutError: there is none in time.
        """


class FolderMeeting:
    """Words as files in a folder of this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def leave(self, name: str, word: str) -> None:
        hidden = self._folder / f".{name}"
        hidden.write_text(word)
        hidden.replace(self._folder / name)

    def take(self, name: str, timeout_s: float) -> str:
        deadline = time.monotonic() + timeout_s
        while True:
            with suppress(FileNotFoundError):
                return (self._folder / name).read_text()[:_MOST_BYTES]
            if time.monotonic() > deadline:
                raise TimeoutError(f"nobody has left word of {name}")
            time.sleep(_PAUSE_S)


class StoreMeeting:
    """Words in a store of torch, such as the one that torchrun tells of."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def leave(self, name: str, word: str) -> None:
        self.store.set(f"rpc-pipe {name}", word)

    def take(self, name: str, timeout_s: float) -> str:
        key = f"rpc-pipe {name}"
        try:
            self.store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:  # torch's own error of stores is one
            raise TimeoutError(f"nobody has left word of {name}") from error
        found: bytes = self.store.get(key)
        return found[:_MOST_BYTES].decode(errors="replace")


def torchrun_store(worker: int, num_workers: int, timeout_s: float) -> Any:
    """Return the store that the variables of torchrun tell of.

    Raises:
        TimeoutError, RuntimeError: it cannot be reached.
    """
    found: list[Any] = []

    def reach() -> None:
        found.append(next(rendezvous("env://", worker, num_workers, timeout=timedelta(seconds=timeout_s))))

    within(timeout_s, reach)
    return found[0][0]


def store_at(host: str, port: int, worker: int, num_workers: int, timeout_s: float) -> Any:
    """Return a store that listens at one address of this host and no other, as torch's own ones do; worker 0 keeps it.

    Raises:
        OSError, RuntimeError: it cannot be kept, or reached in time.
    """
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    if worker == 0:
        listener = socket.create_server((host, port))
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return TCPStore(host, port, num_workers, **options)
