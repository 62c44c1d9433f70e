"""Device: the device key of a kernel mapping, with a range of compute capability where that matters."""

from __future__ import annotations

from dataclasses import dataclass

from kernelhub.errors import InvalidConfig


@dataclass(frozen=True)
class _Properties:
    """Compute capabilities from ``min_capability`` to ``max_capability``, both included, as ``major * 10 + minor``."""

    min_capability: int
    max_capability: int

    def __post_init__(self) -> None:
        for value in (self.min_capability, self.max_capability):
            if type(value) is not int:
                raise InvalidConfig(value, "a capability is a whole number", "for example 90 for 9.0")
        if self.min_capability > self.max_capability:
            bounds = f"{self.min_capability} to {self.max_capability}"
            raise InvalidConfig(bounds, "no capability is in this range", "min_capability <= max_capability")


@dataclass(frozen=True)
class CUDAProperties(_Properties):
    """The CUDA compute capabilities that a kernel is for; 75 stands for 7.5.

    Raises:
        InvalidConfig: not whole numbers, or the lower bound is above the upper one.
    """


@dataclass(frozen=True)
class ROCMProperties(_Properties):
    """The same for ROCm, in the numbers that torch reports there.

    Raises:
        InvalidConfig: as ``CUDAProperties``.
    """


@dataclass(frozen=True)
class Device:
    """A type of device (``"cuda"``, ``"rocm"``, ``"xpu"``, ``"mps"``, ``"npu"``, ``"cpu"``, ...) and its properties.

    Raises:
        InvalidConfig: the type is not text, or the properties are those of another type.
    """

    type: str
    properties: CUDAProperties | ROCMProperties | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.type, str):
            raise InvalidConfig(self.type, "a device type is text", "for example 'cuda'")
        if self.properties is None:
            return
        owner = _OWNERS.get(type(self.properties))
        if owner is None:
            raise InvalidConfig(self.properties, "no device properties", "CUDAProperties or ROCMProperties")
        if owner != self.type:
            name = type(self.properties).__name__
            raise InvalidConfig(self.type, f"{name} are properties of a {owner!r} device", f"type={owner!r}")


_OWNERS: dict[type, str] = {CUDAProperties: "cuda", ROCMProperties: "rocm"}
