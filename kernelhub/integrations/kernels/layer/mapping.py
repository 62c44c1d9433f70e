"""Mapping: which repository serves which layer name, per device and mode; for the process, or inside a block."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from kernelhub.capability import DeviceRange
from kernelhub.errors import InvalidBackend, InvalidConfig
from kernelhub.integrations.kernels.layer.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from contextlib import AbstractContextManager

    from kernelhub.integrations.kernels.layer.device import Device
    from kernelhub.integrations.kernels.layer.repository import RepositoryProtocol

    Repositories = RepositoryProtocol | dict[Mode, RepositoryProtocol]
    GivenMapping = Mapping[str, Mapping[Device | str, Repositories]]


class KernelMapping:
    """Layer name to device to mode to repository."""

    def __init__(self) -> None:
        self._layers: dict[str, dict[DeviceRange, dict[Mode, RepositoryProtocol]]] = {}

    def copy(self) -> KernelMapping:
        """A mapping that grows on its own; the repositories are the same objects."""
        copied = KernelMapping()
        copied._layers = {layer: dict(devices) for layer, devices in self._layers.items()}
        return copied

    def clear(self) -> None:
        self._layers.clear()

    def add(self, mapping: GivenMapping) -> None:
        """Take over a mapping; what it says about a device replaces what was known for that device.

        Raises:
            InvalidConfig: a device or mode cannot be read; nothing of the mapping was taken over.
        """
        read = {layer: _read_devices(layer, devices) for layer, devices in mapping.items()}
        for layer, devices in read.items():
            self._layers.setdefault(layer, {}).update(devices)

    def find(self, layer: str) -> Mapping[DeviceRange, Mapping[Mode, RepositoryProtocol]] | None:
        """What is mapped to a layer name, or None."""
        return self._layers.get(layer)


_of_process = KernelMapping()
_of_block: ContextVar[KernelMapping | None] = ContextVar("kernel_mapping", default=None)


def current_mapping() -> KernelMapping:
    """The mapping of the innermost block that this code runs in, else that of the process."""
    return _of_block.get() or _of_process


def register_kernel_mapping(mapping: GivenMapping, inherit_mapping: bool = True) -> None:
    """Extend the mapping in force: that of the process, or inside ``use_kernel_mapping`` that of the block.

    Args:
        mapping: layer name to device (a ``Device`` or its type) to a repository, or to one for each ``Mode``.
        inherit_mapping: False forgets what was registered before.

    Raises:
        InvalidConfig: a device or mode cannot be read; nothing was changed.
    """
    fresh = KernelMapping()
    fresh.add(mapping)
    current = current_mapping()
    if not inherit_mapping:
        current.clear()
    current.add(mapping)


def use_kernel_mapping(mapping: GivenMapping, *, inherit_mapping: bool = True) -> AbstractContextManager[None]:
    """A ``with`` block in which a mapping is in force, in this thread or task only; arguments and errors as above.

    With ``inherit_mapping`` it extends what was in force before the block, else it is the only one.
    """
    return _block(mapping, inherit_mapping)


@contextmanager
def _block(mapping: GivenMapping, inherit_mapping: bool) -> Iterator[None]:
    inner = current_mapping().copy() if inherit_mapping else KernelMapping()
    inner.add(mapping)
    token = _of_block.set(inner)
    try:
        yield
    finally:
        _of_block.reset(token)


def _read_devices(layer: str, devices: Any) -> dict[DeviceRange, dict[Mode, RepositoryProtocol]]:
    try:
        return {DeviceRange.of(device): _read_modes(layer, value) for device, value in devices.items()}
    except InvalidBackend as error:
        raise InvalidConfig(error.value, f"device: {error.problem}", error.expected, f"layer {layer!r}") from None
    except AttributeError:
        raise InvalidConfig(devices, "not a dict", '{"cuda": LayerRepository(...)}', f"layer {layer!r}") from None


def _read_modes(layer: str, value: Any) -> dict[Mode, RepositoryProtocol]:
    if not isinstance(value, dict):
        return {Mode.FALLBACK: value}
    for mode in value:
        if not isinstance(mode, Mode):
            raise InvalidConfig(mode, "not a mode", "Mode.INFERENCE, Mode.TRAINING, ...", f"layer {layer!r}")
    return dict(value)
