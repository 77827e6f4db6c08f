"""The road between a worker's device and its outbox, and the device's clock.

Carriers take CPU tensors. On a CPU there is no road. On CUDA a payload leaves through pinned buffers on a
side stream, and is published by a helper thread when the copy is complete; it enters through pinned buffers
on another side stream, for which the compute stream waits on the device. The compute thread never waits
for the device before the end of a step.
"""

from __future__ import annotations

import logging
import resource
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from ...dependency import ConfigError, PipeError
from ..transport.payload import Payload, Tree

logger = logging.getLogger(__name__)

#: a point in time on the device; what it is depends on the backend
Timestamp = Any


class DeviceBackend(Protocol):
    """Moves payloads between device and outbox, batches to the device, and tells the device's time."""

    device: torch.device
    #: True if an action has been computed when its call returns
    in_step: bool

    def use(self) -> None:
        """Let this thread compute on the device, also where a model names none."""

    def as_here(self) -> Callable[[], None]:
        """Return what lets another thread compute where this one does: on the device, and in the same stream of it."""

    def leave(self, payload: Payload, publish: Callable[[Payload], None], failed: Callable[[PipeError], None]) -> None:
        """Call `publish` with the payload in CPU memory, when it is there, or `failed`; return at once."""

    def enter(self, payload: Payload) -> Payload:
        """Bring an arrived payload towards the device. Runs in the transport's thread."""

    def ready(self, payload: Payload) -> Payload:
        """Make the compute that follows wait for the payload, on the device. Runs in the compute thread."""

    def load(self, batch: Tree) -> Tree:
        """Bring a part of the user's batch, or what has arrived on the host, to the device."""

    def timestamp(self) -> Timestamp:
        """Return the point in time that the compute issued so far ends."""

    def resolve(self, timestamps: list[Timestamp]) -> list[int]:
        """Return timestamps as `perf_counter_ns`; may wait for the device."""

    def peak_bytes(self) -> int:
        """Return the most memory held so far: by the process on a CPU, by torch on the device on a GPU."""

    def close(self) -> None:
        """Let the last payloads leave, and nothing after them."""


def usual_device(num_workers: int, *, tells: bool) -> str:
    """Return `cuda` where this host has a GPU for each of its workers, else `cpu`.

    Args:
        num_workers: the workers of this host.
        tells: whether to say that GPUs are used, as one worker does.
    """
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < num_workers:
        return "cpu"
    if tells:
        logger.warning(
            "device: cuda, as this host has %d GPUs for its %d workers; device='cpu' or --device cpu uses none of them",
            count,
            num_workers,
        )
    return "cuda"


def backend_for(device: str, place: int = 0) -> DeviceBackend:
    """Return the backend for `cpu`, `cuda` or `cuda:N`.

    Args:
        place: of the worker among those of its host: `cuda` is the GPU of this number, where there are fewer from the
            first again.

    Raises:
        ConfigError: the device does not exist here.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N") from None
    if parsed.type == "cpu":
        return CpuBackend()
    if parsed.type != "cuda":
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (parsed.index or 0) >= count:
        raise ConfigError(f"device {device!r}: this machine has {count} CUDA devices; cpu always works")
    if parsed.index is None and place >= count:
        logger.warning(
            "device cuda: this host has %d GPUs, so worker %d of it shares cuda:%d", count, place, place % count
        )
    index = place % count if parsed.index is None else parsed.index
    from .cuda_device import Cuda, CudaBackend

    return CudaBackend(Cuda(torch.device("cuda", index)))


class CpuBackend:
    """Compute and outbox share one memory."""

    in_step = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def use(self) -> None:
        pass

    def as_here(self) -> Callable[[], None]:
        return self.use

    def leave(self, payload: Payload, publish: Callable[[Payload], None], failed: Callable[[PipeError], None]) -> None:
        publish(payload)

    def enter(self, payload: Payload) -> Payload:
        return payload

    def ready(self, payload: Payload) -> Payload:
        return payload

    def load(self, batch: Tree) -> Tree:
        return batch

    #: the function itself: it is called twice an action
    timestamp = staticmethod(time.perf_counter_ns)

    def resolve(self, timestamps: list[Timestamp]) -> list[int]:
        return timestamps

    def peak_bytes(self) -> int:
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux

    def close(self) -> None:
        pass
