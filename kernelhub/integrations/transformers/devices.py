"""Devices: the types of device that transformers lets a kernel config name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import ModuleType


def allow_cpu(module: ModuleType, undo: ExitStack) -> None:
    """Add ``cpu`` to the list that transformers checks, in the releases that have one."""
    devices = getattr(module, "KERNELS_SUPPORTED_DEVICE_TYPES", None)
    if isinstance(devices, list) and "cpu" not in devices:
        devices.append("cpu")
        undo.callback(devices.remove, "cpu")
