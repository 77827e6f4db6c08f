"""The road between a worker's device and its outbox, and the device's clock.

Carriers take CPU tensors. On a CPU there is no road. From an accelerator a payload leaves through pinned buffers on a
side stream, and is published by a helper thread when the copy is complete; it enters through pinned buffers
on another side stream. The compute stream waits for it on the device; the compute thread never waits
for the device before the end of a step.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ....dependency import PipeError
from ...transport.payload import Payload, Staying, Tree

if TYPE_CHECKING:
    from ...transport.device_way import DeviceWay

#: a point in time on the device, of a type that depends on the backend
Timestamp = Any


class DeviceBackend:
    """Moves payloads between device and outbox, and batches to the device; measures the device's time.

    This is the backend of a CPU, where compute and outbox share one memory; the one of GPUs is in `accelerator`.
    """

    #: True if an action has been computed when its call returns
    in_step = True

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def use(self) -> None:
        """Let this thread compute on the device, also where a model names none."""

    def as_here(self) -> Callable[[], None]:
        """Return a function that lets another thread compute on this thread's device and stream."""
        return self.use

    def leave(self, payload: Payload, publish: Callable[[Payload], None], failed: Callable[[PipeError], None]) -> None:
        """Call `publish` with the payload in CPU memory, when it is there, or `failed`; return at once."""
        publish(payload)

    def staying(self, payload: Payload, failed: Callable[[PipeError], None]) -> Staying | None:
        """Return a payload that consumers copy from the device; None if none does."""
        return None

    def way(self) -> DeviceWay | None:
        """Return this worker's end of the way between devices; None: it has no device apart from the host."""
        return None

    def enter(self, payload: Payload) -> Payload:
        """Bring an arrived payload towards the device. Runs in the transport's thread."""
        return payload

    def ready(self, payload: Payload) -> Payload:
        """Make the compute that follows wait for the payload, on the device. Runs in the compute thread."""
        return payload

    def load(self, batch: Tree) -> Tree:
        """Bring a part of the user's batch, or an arrival on the host, to the device."""
        return batch

    #: the point in time that the compute issued so far ends; the function itself, as it is called twice an action
    timestamp: Callable[[], Timestamp] = staticmethod(time.perf_counter_ns)

    def resolve(self, timestamps: list[Timestamp]) -> list[int]:
        """Return timestamps as `perf_counter_ns`; may wait for the device."""
        return timestamps

    def peak_bytes(self) -> int:
        """Return the most memory held so far: by the process on a CPU, by torch on the device on a GPU."""
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # kilobytes on Linux

    def close(self) -> None:
        """Let the last payloads leave, and nothing after them."""
