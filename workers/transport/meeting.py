"""Where workers leave a word for each other before they can talk: a store of torch.

It is in a file of one host, or torchrun has it. Any process that reaches a store can read and forge its records, so no
record is trusted: a record holds a worker's address, and the process at that address has to prove its identity.
"""

import secrets
import socket
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from .wakeup import within

_MOST_BYTES = 512
_PAUSE_S = 0.02
#: seconds to report the missing worker after a wait in vain
_LAST_WORDS_S = 2.0
#: bytes of a random record that is never drawn twice
_WORD_BYTES = 8


class Meeting:
    """Records by name, each written once for all workers, in a store of torch."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def leave(self, name: str, word: str) -> None:
        """Write a record for all workers."""
        self.store.set(f"rpc-pipe {name}", word)

    def take(self, name: str, timeout_s: float) -> str:
        """Return the word that was left under a name.

        Raises:
            TimeoutError: there is none in time.
        """
        key = f"rpc-pipe {name}"
        try:
            self.store.wait([key], timedelta(seconds=max(timeout_s, 0.001)))
        except RuntimeError as error:  # torch's error of stores is a subclass
            raise TimeoutError(f"no worker has told {name}") from error
        found: bytes = self.store.get(key)
        return found[:_MOST_BYTES].decode(errors="replace")


def torchrun_store(worker: int, num_workers: int, timeout_s: float) -> Any:
    """Return the store of torchrun's variables, without records of an attempt before.

    torchrun keeps its store when it starts workers again, and they would find the addresses of ended workers.

    Raises:
        TimeoutError, RuntimeError: it cannot be reached, or a worker is missing.
    """
    deadline = time.monotonic() + timeout_s

    def reach() -> PrefixStore:
        store = next(rendezvous("env://", worker, num_workers, timeout=timedelta(seconds=timeout_s)))[0]
        return PrefixStore(f"rpc-pipe {agree_on_attempt(store, worker, num_workers, deadline)}", store)

    return within(timeout_s + _LAST_WORDS_S, reach)


def agree_on_attempt(store: Any, worker: int, num_workers: int, deadline: float) -> str:
    """Return a record that all workers of this attempt share, and no worker of another attempt.

    A store may have records of workers that have ended, and a worker cannot distinguish them: no count of attempts is
    the same on all hosts. So each worker writes a random record (1), and worker 0 answers each of them with one of its
    records (2). If a later worker writes another record, worker 0 answers with a new one. An answered worker repeats
    the answer (3), and when all have, it counts (4).

    Args:
        deadline: by `time.monotonic`.

    Raises:
        TimeoutError: a worker is missing.
    """
    everybody = range(num_workers)
    own, heard, answered = secrets.token_hex(_WORD_BYTES), [""] * num_workers, ""
    store.set(f"hello {worker}", own)  # (1)
    while time.monotonic() < deadline:
        if worker == 0 and (said := _words(store, [f"hello {other}" for other in everybody])) not in ([], heard):
            heard, attempt = said, secrets.token_hex(_WORD_BYTES)
            for other in everybody:
                store.set(f"answer {other}", f"{heard[other]} {attempt}")  # (2)
        hello, _, found = "".join(_words(store, [f"answer {worker}"])).partition(" ")
        if hello == own and found != answered:
            answered = found
            store.set(f"repeated {worker}", answered)  # (3)
        if worker == 0 and answered and set(_words(store, [f"repeated {other}" for other in everybody])) == {answered}:
            store.set("counts", answered)  # (4)
        if answered and _words(store, ["counts"]) == [answered]:
            return answered
        time.sleep(_PAUSE_S)
    others = [other for other in everybody if other != worker]
    if worker == 0 and answered:  # the workers cannot distinguish a record of an attempt before from one of this
        absent = [other for other in others if _words(store, [f"repeated {other}"]) != [answered]]
    else:
        absent = [other for other in others if not _words(store, [f"hello {other}"])]
    who = f"workers {absent} have not come" if absent else "not all workers have come"
    raise TimeoutError(f"{who} to torchrun's store")


def _words(store: Any, keys: list[str]) -> list[str]:
    """Return the records under all `keys`, an empty list if one is missing."""
    return [word[:_MOST_BYTES].decode(errors="replace") for word in store.multi_get(keys)] if store.check(keys) else []


def store_in(path: Path, num_workers: int) -> Any:
    """Return a store in a file of this host."""
    return FileStore(str(path), num_workers)


def store_at(host: str, port: int, worker: int, num_workers: int, timeout_s: float) -> Any:
    """Return a store that listens at one address of this host only, where torch's listen at all; worker 0 keeps it.

    Raises:
        OSError, RuntimeError: it cannot be kept, or reached in time.
    """
    options: dict[str, Any] = {"timeout": timedelta(seconds=timeout_s), "wait_for_workers": False}
    if worker == 0:
        listener = socket.create_server((host, port))
        options |= {"is_master": True, "master_listen_fd": listener.detach()}
    return TCPStore(host, port, num_workers, **options)
