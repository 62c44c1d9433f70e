"""Environment: what a build has to fit, as a plain value.

``Environment.detect()`` asks this machine; ``Environment.parse("torch=2.13,cuda=13.0,sm=90,cpu=x86_64,os=linux")``
describes another one; tests and prefetch build it by hand. ``Environment.parse(str(x)) == x``.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernelhub.backend import BACKENDS, Backend, BackendKind, Release, backend_kind
from kernelhub.errors import InvalidBackend, InvalidEnvironment, shown
from kernelhub.variant import CPUS, SYSTEMS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

RUNNING_PYTHON = Release(*sys.version_info[:2])
_GPU_KEYS = {"cuda": "sm", "rocm": "gfx"}
_UNKNOWN = "unknown"
_RELEASE = re.compile(r"(?P<major>[0-9]{1,4})\.(?P<minor>[0-9]{1,4})(?:[.+a-z-][0-9A-Za-z.+_-]*)?", re.ASCII)
_PRERELEASE = re.compile(r"[0-9.]+?[._-]?(?:a|b|c|rc|dev|alpha|beta|pre)", re.ASCII)
_ONEAPI_DATE = re.compile(r"(?P<major>20[0-9]{2})(?P<minor>[0-9]{2})[0-9]{2}", re.ASCII)
_OFFICIAL_LOCAL = re.compile(r"(?:cpu|xpu|cu[0-9]+|rocm[0-9.]+)(?:\.cxx11\.abi)?", re.ASCII)
_CPU_SPELLINGS = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Gpu:
    """One visible device: its architecture (``9.0`` on CUDA, ``gfx942`` on ROCm) and its marketing name."""

    arch: str
    name: str = field(default="", compare=False)


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
    def detect(cls) -> Environment:
        """Describe this process: Torch (imported if installed), backend, devices, C library, Python.

        Raises:
            InvalidEnvironment: Torch's version, or that of its CUDA, ROCm or XPU, cannot be read.
        """
        torch = import_torch()
        backend = detect_backend(torch)
        return cls(
            backend=backend,
            cpu=normalise_cpu(platform.machine()),
            os=platform.system().lower(),
            torch=parse_torch(torch.__version__) if torch else None,
            cxx11_abi=_cxx11_abi(torch),
            free_threaded=bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
            libc=_detect_libc(),
            macos=_readable_release(platform.mac_ver()[0]),
            tvm_ffi=_installed_release("apache-tvm-ffi"),
            gpus=_detect_gpus(torch) if backend.name in _GPU_KEYS else (),
            torch_build=str(torch.__version__) if torch else "",
        )

    @classmethod
    def parse(cls, text: str) -> Environment:
        """Describe a machine in one line, e.g. ``torch=2.13,cuda=13.0,sm=90,cpu=x86_64,os=linux,cxx11=1``.

        Keys: ``torch``, one backend (``cuda=13.0``, ``rocm=7.0``, ``xpu=2025.3``, ``cann=8.1``, ``metal=1``,
        ``neuron=1``, ``tpu=1``; none means CPU; ``unknown`` stands for a version that is not known), ``sm`` (CUDA
        capability without the dot, several joined by ``+``) or ``gfx``, ``cpu``, ``os``, ``cxx11`` (1 unless given;
        official wheels before Torch 2.7 need ``cxx11=0``), ``glibc`` or ``musl``, ``macos``, ``python`` (``3.13t``
        is free-threaded), ``tvm_ffi``.

        Raises:
            InvalidEnvironment: unknown, repeated or contradicting keys, or an unreadable value.
        """
        facts: dict[str, Any] = {}
        for key, value in _split_pairs(text).items():
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


def import_torch() -> ModuleType | None:
    """Torch if it is installed; an import that fails for another reason than absence is not hidden."""
    if importlib.util.find_spec("torch") is None:
        return None
    return importlib.import_module("torch")


def normalise_cpu(machine: str) -> str:
    """The Hub's name of a CPU: Windows says AMD64 and macOS arm64 where the Hub says x86_64 and aarch64."""
    lowered = machine.lower()
    return _CPU_SPELLINGS.get(lowered, lowered)


def parse_release(text: str, origin: str = "") -> Release:
    """``major.minor`` of a version in any spelling: ``2.10.0.dev20251101+rocm7.0``, ``2.9.0a0+50eac811a6``.

    Raises:
        InvalidEnvironment: no minor version, an epoch, or no version at all.
    """
    match = _RELEASE.fullmatch(text)
    if match is None:
        raise InvalidEnvironment(text, _release_problem(text), "major.minor, e.g. 2.13", origin)
    return Release(int(match["major"]), int(match["minor"]))


def _release_problem(text: str) -> str:
    if not text:
        return "empty version"
    if "!" in text:
        return "a version with an epoch"
    return "no minor version" if text.isdigit() else "unreadable version"


def parse_torch(text: str) -> Release:
    """``major.minor`` of Torch's version.

    Raises:
        InvalidEnvironment: unreadable, or a major version that the names of build folders have no room for.
    """
    release = parse_release(text, "torch.__version__")
    if not 1 <= release.major <= 9:
        problem = f"torch major {release.major} unsupported"
        raise InvalidEnvironment(text, problem, "one digit, as in the names of builds", "torch.__version__")
    return release


def detect_backend(torch: ModuleType | None) -> Backend:
    """The backend of this process; attributes that a Torch does not have mean "not this backend".

    Without Torch it is CUDA where its runtime library is found (builds for tvm-ffi need no Torch), else the CPU.

    Raises:
        InvalidEnvironment: Torch says it has CUDA, ROCm or XPU, of a version that cannot be read.
    """
    if torch is None:
        runtime = _cuda_runtime()
        return Backend("cpu") if runtime is None else Backend("cuda", runtime)
    return next((backend for probe in _PROBES if (backend := probe(torch))), Backend("cpu"))


def _cuda_runtime() -> Release | None:
    library = ctypes.util.find_library("cudart")
    if library is None:
        return None
    version = ctypes.c_int(0)
    try:
        failed = ctypes.CDLL(library).cudaRuntimeGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return None
    return None if failed else read_runtime_version(version.value)


def read_runtime_version(number: int) -> Release:
    """CUDA's own encoding of its version: 12080 is 12.8."""
    return Release(number // 1000, number % 1000 // 10)


def _probe_tpu(torch: ModuleType) -> Backend | None:
    return Backend("tpu") if getattr(torch.backends, "tpu", None) is not None else None


def _probe_neuron(torch: ModuleType) -> Backend | None:
    return Backend("neuron") if hasattr(torch, "neuron") else None


def _probe_metal(torch: ModuleType) -> Backend | None:
    return Backend("metal") if _available(getattr(torch.backends, "mps", None)) else None


def _probe_cann(torch: ModuleType) -> Backend | None:
    if not hasattr(torch, "npu"):  # set by torch_npu, as torch.version.cann is
        return None
    return Backend("cann", _readable_release(str(getattr(torch.version, "cann", ""))))


def _probe_versioned(kind: BackendKind, attribute: str) -> Callable[[ModuleType], Backend | None]:
    def probe(torch: ModuleType) -> Backend | None:
        version = getattr(torch.version, attribute, None)
        return None if version is None else Backend(kind.name, _read_toolkit(version, f"torch.version.{attribute}"))

    return probe


def _read_toolkit(version: str, origin: str) -> Release:
    """``12.8``, ``6.3.42131-fa1d09cbd``, or oneAPI's ``20250301``, which is 2025.3."""
    if match := _ONEAPI_DATE.fullmatch(version):
        return Release(int(match["major"]), int(match["minor"]))
    return parse_release(version, origin)


_PROBES: tuple[Callable[[Any], Backend | None], ...] = (
    _probe_tpu,
    _probe_neuron,
    _probe_versioned(backend_kind("cuda"), "cuda"),
    _probe_versioned(backend_kind("rocm"), "hip"),
    _probe_metal,
    _probe_versioned(backend_kind("xpu"), "xpu"),
    _probe_cann,
)


def _available(module: Any) -> bool:
    return module is not None and bool(module.is_available())


def _cxx11_abi(torch: ModuleType | None) -> bool | None:
    if torch is None or platform.system() != "Linux":
        return None
    return bool(torch.compiled_with_cxx11_abi())


def _detect_libc() -> tuple[str, Release] | None:
    name, version = platform.libc_ver()
    release = _readable_release(version)
    if name in ("glibc", "musl") and release is not None:
        return name, release
    musl = sysconfig.get_config_var("SOABI") or ""
    return ("musl", Release(1, 2)) if "musl" in musl else None


def _detect_gpus(torch: ModuleType | None) -> tuple[Gpu, ...]:
    if torch is None or not torch.cuda.is_available():
        return ()
    rocm = getattr(torch.version, "hip", None) is not None
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(_arch(device, rocm), device.name) for device in properties)


def _arch(device: Any, rocm: bool) -> str:
    if rocm:
        return str(device.gcnArchName).partition(":")[0]
    return f"{device.major}.{device.minor}"


def _installed_release(distribution: str) -> Release | None:
    try:
        return _readable_release(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def _readable_release(text: str) -> Release | None:
    """For facts that only some builds need: what cannot be read is unknown."""
    try:
        return parse_release(text)
    except InvalidEnvironment:
        return None


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
