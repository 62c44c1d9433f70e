"""Environment: what a build has to fit, as a plain value.

``Environment.detect()`` asks this machine; ``Environment.parse("torch=2.13,cuda=13.0,sm=90,cpu=x86_64,os=linux")``
describes another one; tests and prefetch build it by hand. ``Environment.parse(str(x)) == x``.
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernelhub.backend import BACKENDS, Backend, BackendKind, Release, backend_kind
from kernelhub.errors import InvalidBackend, InvalidEnvironment, did_you_mean, shown
from kernelhub.machine import (
    Gpu,
    detect_backend,
    detect_cxx11_abi,
    detect_gpus,
    detect_libc,
    import_torch,
    installed_release,
    is_free_threaded,
    normalise_cpu,
    parse_release,
    parse_torch,
    read_installed_torch,
    readable_release,
)
from kernelhub.variant import CPUS, SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Callable

RUNNING_PYTHON = Release(*sys.version_info[:2])
_GPU_KEYS = {"cuda": "sm", "rocm": "gfx"}
_UNKNOWN = "unknown"
_PRERELEASE = re.compile(r"[0-9.]+?[._-]?(?:a|b|c|rc|dev|alpha|beta|pre)", re.ASCII)
_OFFICIAL_LOCAL = re.compile(r"(?:cpu|xpu|cu[0-9]+|rocm[0-9.]+)(?:\.cxx11\.abi)?", re.ASCII)

_LINUX = "torch=2.13,cpu=x86_64,os=linux"
PRESETS = {
    "linux-cpu": _LINUX,
    "linux-arm-cpu": "torch=2.13,cpu=aarch64,os=linux",
    "a100": f"{_LINUX},cuda=13.0,sm=80",
    "l40s": f"{_LINUX},cuda=13.0,sm=89",
    "h100": f"{_LINUX},cuda=13.0,sm=90",
    "h200": f"{_LINUX},cuda=13.0,sm=90",
    "gh200": "torch=2.13,cpu=aarch64,os=linux,cuda=13.0,sm=90",
    "b200": f"{_LINUX},cuda=13.0,sm=100",
    "gb10": "torch=2.13,cpu=aarch64,os=linux,cuda=13.0,sm=121",
    "rtx4090": f"{_LINUX},cuda=13.0,sm=89",
    "rtx5090": f"{_LINUX},cuda=13.0,sm=120",
    "mi300x": f"{_LINUX},rocm=7.0,gfx=gfx942",
    "mac": "torch=2.13,cpu=aarch64,os=darwin,metal=1,macos=26.0",
    "windows-cpu": "torch=2.13,cpu=x86_64,os=windows",
}
"""Machines by name, with the Torch of this release; other versions are given behind the name."""


@dataclass(frozen=True)
class Environment:
    """Everything that the choice of a build depends on; None means "unknown or absent".

    ``torch_build`` is Torch's version as it spells itself (shown to people, never compared).
    ``cxx11_abi`` is Torch's C++11 ABI flag, known where Torch runs on Linux and None elsewhere;
    ``libc`` is ``("glibc", (2, 36))``, ``("musl", ...)`` or None;
    ``free_threaded`` is True on a Python built without the GIL.
    """

    backend: Backend
    cpu: str
    os: str
    torch: Release | None = None
    cxx11_abi: bool | None = None
    python: Release = RUNNING_PYTHON
    free_threaded: bool = False
    libc: tuple[str, Release] | None = None
    macos: Release | None = None
    tvm_ffi: Release | None = None
    gpus: tuple[Gpu, ...] = ()
    torch_build: str = field(default="", compare=False)

    @classmethod
    def detect(cls, *, without_import: bool = False) -> Environment:
        """Describe this process: Torch (imported if installed), backend, devices, C library, Python.

        ``without_import`` reads what the installed Torch's files say instead: quick, but the devices stay unknown.

        Raises:
            InvalidEnvironment: Torch's version, or that of its CUDA, ROCm or XPU, cannot be read.
        """
        torch = read_installed_torch() if without_import else import_torch()
        backend = detect_backend(torch)
        return cls(
            backend=backend,
            cpu=normalise_cpu(platform.machine()),
            os=platform.system().lower(),
            torch=parse_torch(torch.__version__) if torch else None,
            cxx11_abi=detect_cxx11_abi(torch),
            free_threaded=is_free_threaded(),
            libc=detect_libc(),
            macos=readable_release(platform.mac_ver()[0]),
            tvm_ffi=installed_release("tvm_ffi", "apache-tvm-ffi"),
            gpus=() if without_import or backend.name not in _GPU_KEYS else detect_gpus(torch),
            torch_build=str(torch.__version__) if torch else "",
        )

    @classmethod
    def parse(cls, text: str) -> Environment:
        """Describe a machine in one line, e.g. ``torch=2.13,cuda=13.0,sm=90,cpu=x86_64,os=linux,cxx11=1``.

        A preset may come first, and what follows changes it: ``h100``, ``h100,torch=2.12``; see ``PRESETS``.

        Keys: ``torch``, one backend (``cuda=13.0``, ``rocm=7.0``, ``xpu=2025.3``, ``cann=8.1``, ``metal=1``,
        ``neuron=1``, ``tpu=1``; none means CPU; ``unknown`` stands for a version that is not known), ``sm`` (CUDA
        capability without the dot, several joined by ``+``) or ``gfx``, ``cpu``, ``os``, ``cxx11`` (1 unless given;
        official wheels before Torch 2.7 need ``cxx11=0``), ``glibc`` or ``musl``, ``macos``, ``python`` (``3.13t``
        is free-threaded), ``tvm_ffi``.

        Raises:
            InvalidEnvironment: unknown, repeated or contradicting keys, or an unreadable value.
        """
        facts: dict[str, Any] = {}
        for key, value in _split_pairs(_with_preset(text)).items():
            fact = _read_fact(text, key, value)
            if twice := facts.keys() & fact.keys():
                raise InvalidEnvironment(text, f"{key!r} and another key both give the {twice.pop()}", "one of them")
            facts.update(fact)
        facts.setdefault("backend", Backend("cpu"))
        facts.setdefault("cpu", "x86_64")
        facts.setdefault("os", "linux")
        if "gpus" in facts and not _fits_backend(facts["gpus"], facts["backend"]):
            raise InvalidEnvironment(text, "GPUs of another backend", "sm= with cuda=, gfx= with rocm=")
        if facts["os"] == "linux" and facts.get("torch"):
            facts.setdefault("cxx11_abi", True)
        return cls(**facts)

    def __str__(self) -> str:
        parts = [
            f"torch={self.torch}" if self.torch else "",
            _backend_fact(self.backend),
            _gpu_fact(self.gpus, self.backend),
            f"cpu={self.cpu}",
            f"os={self.os}",
            "" if self.cxx11_abi is None else f"cxx11={int(self.cxx11_abi)}",
            f"{self.libc[0]}={self.libc[1]}" if self.libc else "",
            f"macos={self.macos}" if self.macos else "",
            f"python={self.python}{'t' if self.free_threaded else ''}",
            f"tvm_ffi={self.tvm_ffi}" if self.tvm_ffi else "",
        ]
        return ",".join(part for part in parts if part)

    @property
    def notes(self) -> tuple[str, ...]:
        """What is unusual about Torch here and may explain a failure; shown with errors, never a reason to refuse."""
        public, _, local = self.torch_build.partition("+")
        notes = []
        if _PRERELEASE.match(public):
            notes.append(f"torch {self.torch_build} is a pre-release; builds target releases")
        if local and not _OFFICIAL_LOCAL.fullmatch(local):
            notes.append(f"torch {self.torch_build} is not an official build; builds target official ones")
        if local.startswith("cu") and self.backend.name == "cuda" and local != str(self.backend):
            notes.append(f"torch {self.torch_build} reports {self.backend.describe()}, not what its version says")
        return tuple(notes)

    def with_backend(self, name: str | None) -> Environment:
        """The same machine asked for builds of another backend.

        ``cpu`` is always there; any other backend must be the one of this process.

        Raises:
            InvalidBackend: unknown, or not available here; the message names those that are.
        """
        if name is None or backend_kind(name).name == self.backend.name:
            return self
        if backend_kind(name).name != "cpu":
            available = ", ".join(dict.fromkeys((self.backend.name, "cpu")))
            raise InvalidBackend(name, "not available in this process", f"one of {available}")
        return replace(self, backend=Backend("cpu"), gpus=())


def _with_preset(text: str) -> str:
    """Put the preset that ``text`` starts with in its place; keys given behind it replace those of the preset."""
    first, _, rest = text.partition(",")
    if "=" in first:
        return text
    if first not in PRESETS:
        problem = f"no preset {first!r}{did_you_mean(first, PRESETS)}"
        raise InvalidEnvironment(text, problem, f"key=value, or one of {', '.join(PRESETS)}")
    given = _split_pairs(rest) if rest else {}
    return ",".join(f"{key}={value}" for key, value in {**_split_pairs(PRESETS[first]), **given}.items())


def _split_pairs(text: str) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not value:
            raise InvalidEnvironment(text, f"part {part!r}", "key=value, parts separated by commas")
        if key in pairs:
            raise InvalidEnvironment(text, f"key {key!r} given twice", "each key once")
        pairs[key] = value
    return pairs


def _read_fact(text: str, key: str, value: str) -> dict[str, Any]:
    reader = _FACTS.get(key)
    if reader is None:
        raise InvalidEnvironment(text, f"unknown key {key!r}", f"one of {', '.join(sorted(_FACTS))}")
    try:
        return reader(value)
    except InvalidEnvironment as error:
        raise InvalidEnvironment(text, f"{key} {shown(value)}: {error.problem}", error.expected) from None
    except ValueError as error:
        raise InvalidEnvironment(text, f"{key} {shown(value)}: {error}", "see `Environment.parse`") from None


def _one_of(key: str, known: tuple[str, ...]) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        if value not in known:
            raise ValueError(f"unknown, expected one of {', '.join(known)}")
        return {key: value}

    return read


def _read_flag(value: str) -> bool:
    if value not in ("0", "1"):
        raise ValueError("expected 0 or 1")
    return value == "1"


def _read_capability(value: str) -> Gpu:
    if not re.fullmatch(r"[0-9]{2,3}", value, re.ASCII):
        raise ValueError("expected digits of the compute capability, e.g. 90 for 9.0")
    return Gpu(f"{int(value[:-1])}.{value[-1]}")


def _read_gfx(value: str) -> Gpu:
    if not re.fullmatch(r"gfx[0-9a-f]{3,5}", value, re.ASCII):
        raise ValueError("expected a gfx name, e.g. gfx942")
    return Gpu(value)


def _read_python(value: str) -> dict[str, Any]:
    return {"python": parse_release(value.removesuffix("t")), "free_threaded": value.endswith("t")}


def _read_backend(kind: BackendKind) -> Callable[[str], dict[str, Any]]:
    def read(value: str) -> dict[str, Any]:
        if kind.major_digits:
            return {"backend": Backend(kind.name, None if value == _UNKNOWN else parse_release(value))}
        return {"backend": Backend(kind.name)} if _read_flag(value) else {}

    return read


_FACTS: dict[str, Callable[[str], dict[str, Any]]] = {
    "torch": lambda value: {"torch": parse_torch(value), "torch_build": value},
    "cpu": lambda value: _one_of("cpu", CPUS)(normalise_cpu(value)),
    "os": _one_of("os", SYSTEMS),
    "cxx11": lambda value: {"cxx11_abi": _read_flag(value)},
    "glibc": lambda value: {"libc": ("glibc", parse_release(value))},
    "musl": lambda value: {"libc": ("musl", parse_release(value))},
    "macos": lambda value: {"macos": parse_release(value)},
    "python": _read_python,
    "tvm_ffi": lambda value: {"tvm_ffi": parse_release(value)},
    "sm": lambda value: {"gpus": tuple(map(_read_capability, value.split("+")))},
    "gfx": lambda value: {"gpus": tuple(map(_read_gfx, value.split("+")))},
    **{kind.name: _read_backend(kind) for kind in BACKENDS if kind.name != "cpu"},
}


def _backend_fact(backend: Backend) -> str:
    if backend.name == "cpu":
        return ""
    if not backend.kind.major_digits:
        return f"{backend.name}=1"
    return f"{backend.name}={backend.release or _UNKNOWN}"


def _gpu_fact(gpus: tuple[Gpu, ...], backend: Backend) -> str:
    if not gpus:
        return ""
    return f"{_GPU_KEYS.get(backend.name, 'sm')}=" + "+".join(gpu.arch.replace(".", "") for gpu in gpus)


def _fits_backend(gpus: tuple[Gpu, ...], backend: Backend) -> bool:
    key = "gfx" if gpus[0].arch.startswith("gfx") else "sm"
    return _GPU_KEYS.get(backend.name) == key
