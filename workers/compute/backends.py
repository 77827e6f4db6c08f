"""The device that a worker computes on: the configured one, or GPUs where there are enough."""

from __future__ import annotations

import logging

import torch

from ...dependency import ConfigError
from .device import DeviceBackend

logger = logging.getLogger(__name__)


def usual_device(num_workers: int) -> str:
    """Return `cuda` where this host has a GPU for each of its workers, else `cpu`."""
    return "cuda" if torch.cuda.is_available() and torch.cuda.device_count() >= num_workers else "cpu"


def backend_for(device: str, place: int = 0) -> DeviceBackend:
    """Return the backend for `cpu`, `cuda` or `cuda:N`.

    Args:
        place: of the worker on its host: `cuda` is the GPU of this number, counted from the first again where there
            are fewer.

    Raises:
        ConfigError: the device does not exist here.
    """
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError):
        raise ConfigError(f"device {device!r}: must be cpu, cuda or cuda:N") from None
    if parsed.type == "cpu":
        return DeviceBackend()
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
