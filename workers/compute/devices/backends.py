"""The device that a worker computes on: the configured one, or accelerators where there are enough."""

import logging

import torch

from ....dependency import ConfigError
from .device import DeviceBackend

logger = logging.getLogger(__name__)


def usual_device(num_workers: int) -> str:
    """Return the accelerator of this host, such as `cuda`, if it has one for each of its workers, else `cpu`."""
    kind = torch.accelerator.current_accelerator(check_available=True)
    return kind.type if kind and torch.accelerator.device_count() >= num_workers else "cpu"


def found_device(name: str) -> tuple[torch.device, int]:
    """Return a device of this host by its name, and how many devices of its kind there are.

    Raises:
        ConfigError: the device does not exist here.
    """
    kind = torch.accelerator.current_accelerator()
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda", kind and kind.type):
        raise ConfigError(f"device {name}: must be cpu, cuda or cuda:N, or an accelerator that this torch knows")
    if device.type == "cpu":
        return device, 1
    count = torch.accelerator.device_count() if kind and kind.type == device.type else 0
    if (device.index or 0) >= count:
        raise ConfigError(f"device {name}: this machine has {count} {device.type} devices; cpu always works")
    return device, count


def backend_for(name: str, place: int = 0) -> DeviceBackend:
    """Return the backend for `cpu`, for an accelerator such as `cuda`, or for one by its number, such as `cuda:1`.

    Args:
        place: of the worker on its host: `cuda` is the GPU of this number, counted from the first again where there
            are fewer.

    Raises:
        ConfigError: the device does not exist here.
    """
    device, count = found_device(name)
    if device.type == "cpu":
        return DeviceBackend()
    kind, index = device.type, place % count if device.index is None else device.index
    if device.index is None and place >= count:
        logger.warning("device %s: this host has %d, so worker %d of it shares %s:%d", kind, count, place, kind, index)
    from .accelerator import Accelerator, AcceleratorBackend, Cuda

    return AcceleratorBackend((Cuda if kind == "cuda" else Accelerator)(torch.device(kind, index)))
