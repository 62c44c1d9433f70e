"""Host: what this process offers to a native library: its C and C++ libraries, its torch and its Python.

Asked of the process itself, not of the system: which libstdc++ is loaded decides, not which one is installed.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelhub import __version__
from kernelhub.backend import Release
from kernelhub.durable import open_regular
from kernelhub.elf import Machine, NotALibrary, defined_versions, machine_of
from kernelhub.environment import Environment
from kernelhub.machine import detect_backend, detect_libc, import_torch, is_free_threaded

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from types import ModuleType

OF_PYTHON = re.compile(r"_?Py[A-Z_]", re.ASCII)
_CXX = ("libstdc++.so.6", "libgcc_s.so.1")
# A library answers for those that it needs, too; the first one needs nearly all of the others.
_TORCH = ("libtorch_python.so", "libtorch.so", "libtorch_cpu.so", "libtorch_cuda.so", "libtorch_hip.so", "libc10.so")
_LINK_MAP = 2  # RTLD_DI_LINKMAP of dlinfo


@dataclass(frozen=True)
class Host:
    """What this process offers to a native library; tests build it by hand.

    ``versions`` maps the name of a library that this process has loaded to the symbol versions that it defines, and
    ``places`` to where it is; ``notes`` say what is unusual about its torch; ``lacks`` picks those of some symbols that
    neither torch nor Python has.
    """

    machine: Machine
    python: Release
    free_threaded: bool = False
    libc: tuple[str, Release] | None = None
    versions: Mapping[str, frozenset[str]] = field(default_factory=dict, hash=False)
    places: Mapping[str, str] = field(default_factory=dict, hash=False)
    torch_build: str = ""
    notes: tuple[str, ...] = ()
    lacks: Callable[[Iterable[str]], list[str]] = field(default=lambda names: [], compare=False, repr=False)

    @classmethod
    def detect(cls) -> Host:
        """This process, with the torch that it has (imported if it is installed: a kernel's library needs it)."""
        torch = import_torch()
        places = {library.name: library.path for library in _loaded(_CXX)}
        return cls(
            machine=_own_machine(),
            python=Release(*sys.version_info[:2]),
            free_threaded=is_free_threaded(),
            libc=detect_libc(),
            versions={name: _versions_of(path) for name, path in places.items()},
            places=places,
            torch_build=str(torch.__version__) if torch else "",
            notes=_notes_on_torch(torch),
            lacks=_Exports(_loaded(_TORCH)).missing,
        )

    def glibc(self) -> Release | None:
        """The version of glibc; None on another C library."""
        return self.libc[1] if self.libc is not None and self.libc[0] == "glibc" else None


@cache
def this_host() -> Host:
    """This process, asked once."""
    return Host.detect()


@cache
def fingerprint() -> str:
    """What verdicts on libraries depend on besides the libraries, in one hash; asked once, in about a millisecond.

    The version of kernelhub stands for its rules, a library that is loaded here for its place, size and time.
    """
    torch = import_torch()
    torch_build = (str(torch.__version__), str(torch.version.git_version)) if torch else ()
    facts = (
        (__version__, sys.version, platform.machine(), sys.maxsize),
        (detect_libc(), torch_build),
        [(library.path, _stamp(library.path)) for library in _loaded(_CXX + _TORCH)],
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file is replaced; None for one that is gone."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _own_machine() -> Machine:
    """What this program is for; what the system says of itself where /proc is not there to tell."""
    try:
        with open_regular(Path("/proc/self/exe").resolve()) as file:
            return machine_of(file)
    except (OSError, NotALibrary):
        return Machine(platform.machine().lower(), 64 if sys.maxsize > 1 << 32 else 32, sys.byteorder == "little")


def _notes_on_torch(torch: ModuleType | None) -> tuple[str, ...]:
    if torch is None:
        return ()
    return Environment(detect_backend(torch), "", "", torch_build=str(torch.__version__)).notes


def _versions_of(path: str) -> frozenset[str]:
    """What a library defines; nothing if it cannot be read."""
    with contextlib.suppress(OSError, NotALibrary), open_regular(Path(path).resolve()) as file:
        return defined_versions(file)
    return frozenset()


class _Exports:
    """Asks the dynamic loader of this process for symbols: exact, and two microseconds each, where reading the symbol
    tables of torch's libraries would take a tenth of a second."""

    def __init__(self, torch: Iterable[_Loaded]) -> None:
        self._torch = [library.handle for library in torch]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are in no library of torch, or, for Python's, not in this process."""
        return [name for name in names if not self._has(name)]

    def _has(self, name: str) -> bool:
        if OF_PYTHON.match(name):
            return hasattr(ctypes.pythonapi, name)
        symbol = name.encode()
        return not self._torch or any(_loader().dlsym(handle, symbol) for handle in self._torch)


class _Loaded(NamedTuple):
    """A library of this process, as its dynamic loader knows it."""

    name: str
    path: str
    handle: int


class _LinkMap(ctypes.Structure):
    """The beginning of glibc's and musl's ``struct link_map``."""

    _fields_ = (("address", ctypes.c_void_p), ("path", ctypes.c_char_p))


def _loaded(names: Iterable[str]) -> list[_Loaded]:
    """Those of some libraries that this process has; of several copies the one that a kernel would get.

    Nothing is loaded. A library that a kernel needs by its name is the first one of that name, wherever it is from.
    """
    if sys.platform != "linux":
        return []
    loader, entry, found = _loader(), ctypes.c_void_p(), []
    for name in names:
        handle = loader.dlopen(name.encode(), os.RTLD_NOLOAD | os.RTLD_NOW)
        if handle and loader.dlinfo(handle, _LINK_MAP, ctypes.byref(entry)) == 0:
            found.append(_Loaded(name, os.fsdecode(_LinkMap.from_address(entry.value or 0).path), handle))
    return found


@cache
def _loader() -> Any:
    """The dynamic loader's own functions; ctypes' libraries and their attributes ask it too, five times as long."""
    loader = ctypes.CDLL(None)
    loader.dlopen.argtypes = (ctypes.c_char_p, ctypes.c_int)
    loader.dlopen.restype = ctypes.c_void_p
    loader.dlsym.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    loader.dlsym.restype = ctypes.c_void_p
    loader.dlinfo.argtypes = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    return loader
