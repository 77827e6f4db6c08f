"""Sockets for connections of peers, which forks of a worker release.

A process that loads data, or any other fork, inherits them all. Where it lived on, the peers saw no connection break
when its worker was killed, and waited for the fork to end.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")
#: addresses where this process listens for other workers
_listens_at: set[object] = set()


@contextmanager
def letting_go() -> Iterator[None]:
    """Let forks of this process have no socket that begins to listen in the body, and no connection to it."""
    before = {address for _, address, listens in _sockets() if listens}
    yield
    found = {address for _, address, listens in _sockets() if listens} - before
    if found and not _listens_at:
        os.register_at_fork(after_in_child=_let_go)
    _listens_at.update(found)


def _let_go() -> None:
    with suppress(OSError):  # there is no descriptor left
        nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
        for descriptor, address, _ in _sockets():
            if address in _listens_at:
                os.dup2(nowhere, descriptor, inheritable=False)  # not closed: the opener may close it again
        os.close(nowhere)


def _sockets() -> Iterator[tuple[int, object, bool]]:
    """Yield this process's sockets: descriptor, local address, which accepted ones share, and whether it listens."""
    for name in os.listdir(_DESCRIPTORS) if _DESCRIPTORS.is_dir() else []:
        with suppress(OSError):  # it was that of the folder itself
            if stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                found = socket.socket(fileno=int(name))
                try:
                    yield int(name), found.getsockname(), _listens(found)
                finally:
                    found.detach()


def _listens(found: socket.socket) -> bool:
    return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
