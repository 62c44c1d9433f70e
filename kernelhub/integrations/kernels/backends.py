"""Backends: what a compiled build computes on, with the version that it was built for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from packaging.version import Version

from kernelhub import backend
from kernelhub.errors import InvalidBackend

if TYPE_CHECKING:
    from typing_extensions import Self


class Backend:
    """One backend; ``name`` is its short name and ``variant_str`` how a build variant spells it (``cu128``)."""

    name: ClassVar[str]

    @property
    def variant_str(self) -> str:
        return backend.backend_kind(self.name).token

    @classmethod
    def parse(cls, s: str) -> Self:
        """Read the backend part of a variant's name.

        Raises:
            InvalidBackend: it is that of another backend, or none.
        """
        found = parse_backend(s)
        if not isinstance(found, cls):
            raise InvalidBackend(s, f"not a {cls.__name__} backend", f"one such as {_EXAMPLES[cls.name]!r}")
        return found


@dataclass(unsafe_hash=True)
class _Versioned(Backend):
    version: Version

    @property
    def variant_str(self) -> str:
        return f"{super().variant_str}{self.version.major}{self.version.minor}"


@dataclass(unsafe_hash=True)
class CANN(_Versioned):
    name: ClassVar[str] = "cann"


@dataclass(unsafe_hash=True)
class CUDA(_Versioned):
    name: ClassVar[str] = "cuda"


@dataclass(unsafe_hash=True)
class ROCm(_Versioned):
    name: ClassVar[str] = "rocm"


@dataclass(unsafe_hash=True)
class XPU(_Versioned):
    name: ClassVar[str] = "xpu"


@dataclass(unsafe_hash=True)
class CPU(Backend):
    name: ClassVar[str] = "cpu"


@dataclass(unsafe_hash=True)
class Metal(Backend):
    name: ClassVar[str] = "metal"


@dataclass(unsafe_hash=True)
class Neuron(Backend):
    name: ClassVar[str] = "neuron"


@dataclass(unsafe_hash=True)
class TPU(Backend):
    name: ClassVar[str] = "tpu"


_VERSIONED: dict[str, type[_Versioned]] = {kind.name: kind for kind in (CANN, CUDA, ROCm, XPU)}
_PLAIN: dict[str, type[Backend]] = {kind.name: kind for kind in (CPU, Metal, Neuron, TPU)}
_EXAMPLES = {"cann": "cann81", "cuda": "cu128", "rocm": "rocm63", "xpu": "xpu20253"} | {name: name for name in _PLAIN}


def parse_backend(s: str) -> Backend:
    """Read the backend part of a variant's name: ``cu128``, ``rocm63``, ``cpu``.

    Raises:
        InvalidBackend: no backend, or not its one spelling.
    """
    return as_backend(backend.Backend.parse(s))


def as_backend(found: backend.Backend) -> Backend:
    """The same backend under the names of the package ``kernels``."""
    if found.release is None:
        return _PLAIN[found.name]()
    return _VERSIONED[found.name](Version(str(found.release)))
