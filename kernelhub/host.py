"""Host: what this process offers to a native library: its C and C++ libraries, its torch and its Python.

Asked of the process itself, not of the system: which libstdc++ is mapped decides, not which one is installed.
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
from typing import TYPE_CHECKING, Any

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
_CXX = "libstdc++.so.6"
_DECIDING = re.compile(rb"/lib(?:stdc\+\+|gcc_s|torch|c10)[^/]*\Z")


@dataclass(frozen=True)
class Host:
    """What this process offers to a native library; tests build it by hand.

    ``versions`` maps the name of a library that is mapped into this process to the symbol versions that it defines,
    and ``places`` to where it is; ``notes`` say what is unusual about its torch; ``lacks`` picks those of some symbols
    that neither torch nor Python has.
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
        mapped = _mapped_libraries()
        places = {name: path for path, name in reversed(mapped.items())}
        return cls(
            machine=_own_machine(),
            python=Release(*sys.version_info[:2]),
            free_threaded=is_free_threaded(),
            libc=detect_libc(),
            versions={name: _versions_of(name, mapped) for name in places if _is_system(name)},
            places=places,
            torch_build=str(torch.__version__) if torch else "",
            notes=_notes_on_torch(torch),
            lacks=_Exports(places).missing,
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
    """What verdicts on libraries depend on besides the libraries, in one hash; asked once, in less than a millisecond.

    The version of kernelhub stands for its rules, a library that is mapped here for its place, size and time.
    """
    torch = import_torch()
    torch_build = (str(torch.__version__), str(torch.version.git_version)) if torch else ()
    facts = (
        (__version__, sys.version, platform.machine(), sys.maxsize),
        (detect_libc(), torch_build),
        [(path, _stamp(path)) for path in sorted(_mapped_files()) if _DECIDING.search(path)],
    )
    return hashlib.sha256(repr(facts).encode()).hexdigest()


def _stamp(path: bytes) -> tuple[int, ...] | None:
    """What changes when a file is replaced; None for one that is gone."""
    try:
        status = os.stat(path)  # noqa: PTH116  # a path as bytes, as the system tells it
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


def _mapped_files() -> set[bytes]:
    """The paths of what is mapped into this process, as the system lists it; empty where it does not."""
    try:
        listed = Path("/proc/self/maps").read_bytes()
    except OSError:
        return set()
    return {b"/" + path for line in listed.split(b"\n") if (path := line.partition(b"/")[2])}


def _notes_on_torch(torch: ModuleType | None) -> tuple[str, ...]:
    if torch is None:
        return ()
    return Environment(detect_backend(torch), "", "", torch_build=str(torch.__version__)).notes


def _is_system(name: str) -> bool:
    return name == _CXX or name.startswith("libgcc_s.so")


def _mapped_libraries() -> dict[str, str]:
    """The shared libraries that are mapped into this process: the path of each, and what others call it."""
    paths = map(os.fsdecode, sorted(_mapped_files()))
    return {path: _soname(name) for path in paths if ".so" in (name := path.rpartition("/")[2])}


def _soname(name: str) -> str:
    """``libstdc++.so.6.0.30`` is known to others as ``libstdc++.so.6``."""
    return _CXX if name.startswith(f"{_CXX}.") else name


def _versions_of(library: str, mapped: Mapping[str, str]) -> frozenset[str]:
    """What a library defines; of several copies in one process (conda's and the system's), what any of them defines."""
    found: set[str] = set()
    for path in [path for path, name in mapped.items() if name == library]:
        with contextlib.suppress(OSError, NotALibrary), open_regular(Path(path)) as file:
            found |= defined_versions(file)
    return frozenset(found)


class _Exports:
    """Asks the dynamic loader of this process for symbols: exact, and two microseconds each, where reading the symbol
    tables of torch's libraries would take a tenth of a second."""

    def __init__(self, places: Mapping[str, str]) -> None:
        names = [name for name in places if name.startswith(("libtorch", "libc10"))]
        # A library answers for those that it needs, too; this one needs nearly all of the others.
        names.sort(key=lambda name: name != "libtorch_python.so")
        self._torch = [handle for name in names if (handle := _already_loaded(places[name]))]

    def missing(self, names: Iterable[str]) -> list[str]:
        """Those of ``names`` that are in no library of torch, or, for Python's, not in this process."""
        return [name for name in names if not self._has(name)]

    def _has(self, name: str) -> bool:
        if OF_PYTHON.match(name):
            return hasattr(ctypes.pythonapi, name)
        symbol = name.encode()
        return not self._torch or any(_dlsym()(handle, symbol) for handle in self._torch)


@cache
def _dlsym() -> Callable[[int, bytes], int | None]:
    """The loader's own function; the attributes of ctypes' libraries ask it too, and take five times as long."""
    function: Any = ctypes.CDLL(None).dlsym
    function.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
    function.restype = ctypes.c_void_p
    return function  # type: ignore[no-any-return]


def _already_loaded(path: str) -> int | None:
    """The dynamic loader's handle of a library that is in this process; nothing is loaded."""
    try:
        return ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)._handle
    except OSError:
        return None
