"""Payloads over bare sockets between the workers of neighbouring stages: what no carrier can beat by much.

One thread a neighbour sends and one receives, so that nobody computes later because a socket's buffer is full. A
payload is one tensor of a size that both know: nothing is asked, announced, numbered, proved or encrypted.
"""

from __future__ import annotations

import os
import queue
import socket
import threading
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rpc_pipe.workers.transport.sockets import CONGESTION, choose

_WAIT_S = 30.0


class Neighbour:
    """The connection to the worker of the next or the previous stage; payloads look like `like`."""

    def __init__(self, connection: socket.socket, like: Tensor) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.settimeout(None)
        self._connection, self._like = connection, like
        self._to_send: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._came: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        for does in (self._send, self._receive):
            threading.Thread(target=does, daemon=True).start()

    def put(self, tensor: Tensor) -> None:
        """Send a payload."""
        self._to_send.put(tensor.detach())

    def get(self) -> Tensor:
        """Wait for the next payload."""
        return self._came.get(timeout=_WAIT_S)

    def _send(self) -> None:
        while True:
            self._connection.sendall(_memory(self._to_send.get()))

    def _receive(self) -> None:
        while True:
            tensor = torch.empty_like(self._like)
            left = _memory(tensor)
            while left:
                got = self._connection.recv_into(left)
                if not got:
                    return
                left = left[got:]
            self._came.put(tensor)


def neighbours(rank: int, workers: int, like: Tensor) -> tuple[Neighbour | None, Neighbour | None]:
    """Return the previous and the next worker of the group that torch.distributed knows."""
    host = os.environ.get("HOST_ADDR", "127.0.0.1")
    with socket.create_server((host, 0)) as listener, socket.socket() as caller:
        for end in (listener, caller):  # before they are connected: who was under BBR once is paced for ever
            choose(end, CONGESTION)
        places: list[Any] = [None] * workers
        dist.all_gather_object(places, listener.getsockname())
        after = None
        if rank + 1 < workers:
            caller.settimeout(_WAIT_S)
            caller.connect(tuple(places[rank + 1]))
            after = Neighbour(caller.dup(), like)
        before = Neighbour(listener.accept()[0], like) if rank else None
    return before, after


def _memory(tensor: Tensor) -> memoryview:
    return memoryview(tensor.numpy()).cast("B")  # type: ignore[arg-type]
