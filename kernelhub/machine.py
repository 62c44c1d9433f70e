"""Machine: asks this process, and reads the answers; whatever is missing means "not here", never a crash."""

from __future__ import annotations

import ast
import ctypes
import ctypes.util
import importlib.metadata
import importlib.util
import platform
import re
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kernelhub.backend import Backend, BackendKind, Release, backend_kind
from kernelhub.errors import InvalidEnvironment

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_RELEASE = re.compile(r"(?P<major>[0-9]{1,4})\.(?P<minor>[0-9]{1,4})(?:[.+a-z-][0-9A-Za-z.+_-]*)?", re.ASCII)
_ONEAPI_DATE = re.compile(r"(?P<major>20[0-9]{2})(?P<minor>[0-9]{2})[0-9]{2}", re.ASCII)
_CPU_SPELLINGS = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True)
class Gpu:
    """One visible device: its architecture (``9.0`` on CUDA, ``gfx942`` on ROCm) and its marketing name."""

    arch: str
    name: str = field(default="", compare=False)


def import_torch() -> ModuleType | None:
    """Torch if it is installed; an import that fails for another reason than absence is not hidden."""
    if importlib.util.find_spec("torch") is None:
        return None
    return importlib.import_module("torch")


def read_installed_torch() -> Any | None:
    """What the installed Torch's own files say, shaped like the module as far as detection asks; None if absent."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    facts = _assignments((folder / "version.py").read_text(encoding="utf-8"))
    version = str(facts.pop("__version__", ""))
    return SimpleNamespace(__version__=version, version=SimpleNamespace(**facts), backends=SimpleNamespace())


def _assignments(source: str) -> dict[str, Any]:
    """The plain values that a module assigns to names, without running it."""
    found: dict[str, Any] = {}
    for node in ast.parse(source).body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant):
            found |= {target.id: value.value for target in targets if isinstance(target, ast.Name)}
    return found


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
    return Backend("cann", readable_release(str(getattr(torch.version, "cann", ""))))


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


def detect_cxx11_abi(torch: ModuleType | None) -> bool | None:
    if torch is None or platform.system() != "Linux":
        return None
    ask = getattr(torch, "compiled_with_cxx11_abi", None)
    return None if ask is None else bool(ask())


def detect_libc() -> tuple[str, Release] | None:
    name, version = platform.libc_ver()
    release = readable_release(version)
    if name in ("glibc", "musl") and release is not None:
        return name, release
    musl = sysconfig.get_config_var("SOABI") or ""
    return ("musl", Release(1, 2)) if "musl" in musl else None


def detect_gpus(torch: ModuleType | None) -> tuple[Gpu, ...]:
    if torch is None or not torch.cuda.is_available():
        return ()
    rocm = getattr(torch.version, "hip", None) is not None
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return tuple(Gpu(_arch(device, rocm), device.name) for device in properties)


def _arch(device: Any, rocm: bool) -> str:
    if rocm:
        return str(device.gcnArchName).partition(":")[0]
    return f"{device.major}.{device.minor}"


def is_free_threaded() -> bool:
    """Was this Python built without the GIL? It says so in its version; asking ``sysconfig`` takes a millisecond."""
    return "free-threading" in sys.version


def installed_release(module: str, distribution: str) -> Release | None:
    """The version of a package; looked for by its import name first, which costs next to nothing."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return readable_release(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return None


def readable_release(text: str) -> Release | None:
    """For facts that only some builds need: what cannot be read is unknown."""
    try:
        return parse_release(text)
    except InvalidEnvironment:
        return None
