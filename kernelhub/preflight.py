"""Preflight: would the native libraries of a build load here? Told from their bytes, before any of them is opened.

One check is one function that gives one reason; the tuple of checks is the policy. What a library needs is compared
with what this process really has: the symbol versions of the C and C++ libraries that it has loaded, and the
symbols that the dynamic loader finds in its torch. Only Linux is looked at; elsewhere the report is empty.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from typing import TYPE_CHECKING, NamedTuple

from kernelhub.backend import Release
from kernelhub.durable import open_regular
from kernelhub.elf import Library, NotALibrary, defined_symbols, held_names, read_library
from kernelhub.errors import IncompatibleLibrary, InvalidVariant, shown
from kernelhub.host import OF_PYTHON, Host, this_host
from kernelhub.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path
    from typing import BinaryIO

_ABI3_WITHOUT_GIL = Release(3, 15)  # the first Python whose free-threaded build has a stable ABI
_TAGGED = re.compile(r"\.cpython-(?P<major>3)(?P<minor>[0-9]+)(?P<free>t?)-", re.ASCII)
_SHARED = re.compile(r"\.so(?:\.[0-9]+)*$", re.ASCII)
_OF_TORCH = re.compile(
    r"_Z(?:GV|T[A-Z])?N[KVRO]*(?:2at|3c10|5torch|6caffe2)[0-9A-Z]|(?:aoti_torch|torch)_[a-z]", re.ASCII
)
_REGISTERS = re.compile(r"_ZN5torch7LibraryC|(?:aoti_)?torch_library_", re.ASCII)
_NUMBERED = re.compile(r"(?P<family>GLIBC|GLIBCXX|CXXABI|GCC)_(?P<number>[0-9]+(?:\.[0-9]+)*)", re.ASCII)
_OF_GLIBC = re.compile(r"(?:lib(?:c|m|dl|rt|pthread|util|resolv)|ld-linux.*)\.so\.[0-9]+", re.ASCII)
_MUSL = re.compile(r"(?:libc\.musl-|ld-musl-)", re.ASCII)


class LibraryReport(NamedTuple):
    """One library: why it cannot be loaded here (nothing: it can), and what is unusual about it.

    ``registers`` tells whether it registers operators with torch as soon as it is opened, ``namespaces`` under which
    names, as its build says and its bytes confirm. ``unread``: the system did not let it be read; no verdict is kept.
    """

    path: str
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    registers: bool = False
    namespaces: tuple[str, ...] = ()
    unread: bool = False

    def words(self) -> Iterator[str]:
        """The verdict, and all that is worth telling beside it."""
        yield from self.reasons or ("can be loaded here",)
        yield from (f"registers torch.ops.{name}" for name in self.namespaces)
        yield from self.notes


@dataclass(frozen=True)
class PreflightReport:
    """The native libraries of one build; plain and picklable."""

    build: str
    libraries: tuple[LibraryReport, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> LibraryReport | None:
        """The first library that cannot be loaded, or None."""
        return next((library for library in self.libraries if library.reasons), None)

    def lines(self) -> list[str]:
        """One line for each library."""
        return [f"{shown(each.path)}: {'; '.join(each.words())}" for each in self.libraries]

    def to_dict(self) -> dict[str, list[str]]:
        """Plain data for JSON: each library with the reasons why it cannot be loaded."""
        return {each.path: list(each.reasons) for each in self.libraries}

    def check(self, hint: str = "") -> None:
        """Refuse the build if one of its libraries cannot be loaded.

        Raises:
            IncompatibleLibrary: before anything of it was opened.
        """
        if self.refused is not None:
            advice = " ".join([hint, *(f"Note: {note}." for note in self.notes)]).strip()
            raise IncompatibleLibrary(self.build, self.refused.path, "; ".join(self.refused.reasons), advice)


def preflight(
    build: str,
    variant: str,
    paths: Iterable[str],
    open_file: Callable[[str], BinaryIO],
    host: Host | None = None,
    names: Iterable[str] = (),
) -> PreflightReport:
    """Look at the native libraries among the files of a build.

    Args:
        build: the kernel and variant, for messages.
        variant: the build variant, which says what torch it was made for.
        paths: the paths of its files.
        open_file: opens one of them for reading.
        host: what to compare with; None for this process.
        names: what its metadata calls its operators: the ``id``.
    """
    libraries = sorted(path for path in paths if is_library(path))
    if sys.platform != "linux":  # unknown, so the worst is assumed of what they register
        return PreflightReport(build, tuple(LibraryReport(path, registers=True) for path in libraries))
    if not libraries:
        return PreflightReport(build)
    return _Preflight(build, variant, libraries, open_file, host or this_host(), names).report()


def preflight_folder(
    build: str, variant: str, folder: Path, host: Host | None = None, names: Iterable[str] = ()
) -> PreflightReport:
    """``preflight`` of the files in a folder."""
    paths = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if is_library(path.name)]
    return preflight(build, variant, paths, lambda path: open_regular(folder / path), host, names)


def is_library(path: str) -> bool:
    """Is it a native module or library, by its name?"""
    name = path.rpartition("/")[2]
    return name.endswith(tuple(EXTENSION_SUFFIXES)) or _SHARED.search(name) is not None


_READ: dict[tuple[int, ...], Library] = {}


class _Preflight:
    """One run over the libraries of one build."""

    def __init__(
        self,
        build: str,
        variant: str,
        paths: list[str],
        open_file: Callable[[str], BinaryIO],
        host: Host,
        names: Iterable[str],
    ) -> None:
        self._build = build
        self._variant = variant
        self._paths = paths
        self._open = open_file
        self._host = host
        self._names = tuple(names)

    def report(self) -> PreflightReport:
        foreign = {path for path in self._paths if _is_for_another_python(path, self._host)}
        if foreign == set(self._paths):
            reports = [LibraryReport(path, (_other_python(path, self._host),)) for path in self._paths]
        else:  # older builds hold one library for each Python, of which this one opens its own
            reports = [
                LibraryReport(path, (), (_other_python(path, self._host),)) if path in foreign else self._judge(path)
                for path in self._paths
            ]
        return PreflightReport(self._build, tuple(reports), self._host.notes)

    def _judge(self, path: str) -> LibraryReport:
        try:
            with self._open(path) as file:
                library = _read(file)
                registers = any(map(_REGISTERS.match, library.undefined))
                file.seek(0)
                namespaces = held_names(file, self._names) if registers else ()
        except NotALibrary as error:
            return LibraryReport(path, (str(error),))
        except OSError as error:
            return LibraryReport(path, (f"cannot be read ({error.strerror})",), unread=True)
        reasons = [reason for check in CHECKS if (reason := check(path, library, self._host))]
        reasons += filter(None, [self._torch_reason(library)])
        return LibraryReport(path, tuple(reasons), tuple(_notes(library)), registers, namespaces)

    def _torch_reason(self, library: Library) -> str | None:
        """Symbols of torch that this torch lacks; what another library of the build defines is there."""
        missing = self._host.lacks(name for name in library.undefined if _OF_TORCH.match(name))
        if missing and len(self._paths) > 1:
            own = frozenset().union(*map(self._defined, self._paths))
            missing = [name for name in missing if name not in own]
        if not missing:
            return None
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        made, runs = _made_for(self._variant), self._host.torch_build
        return f"undefined symbol {shown(missing[0])}{more}: {made}, and torch {runs or '(none)'} runs here"

    def _defined(self, path: str) -> frozenset[str]:
        try:
            with self._open(path) as file:
                return defined_symbols(file)
        except (NotALibrary, OSError):
            return frozenset()


def _read(file: BinaryIO) -> Library:
    """The facts about a library; the same file is read once a process."""
    try:
        status = os.fstat(file.fileno())
    except OSError:  # not a file of the system
        return read_library(file)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)
    if key not in _READ:
        _READ[key] = read_library(file)
    return _READ[key]


def check_machine(path: str, library: Library, host: Host) -> str | None:
    if library.machine == host.machine:
        return None
    return f"it is for {library.machine}, this process is {host.machine}"


def check_c_library(path: str, library: Library, host: Host) -> str | None:
    made_for = _c_library(library)
    if made_for is None or host.libc is None or made_for == host.libc[0]:
        return None
    return f"it is made for {made_for}, and {host.libc[0]} runs here: {host.libc[0]} is not supported by this build"


def check_glibc(path: str, library: Library, host: Host) -> str | None:
    runs = host.glibc()
    if runs is None:
        return None
    wanted = [need.version for need in library.versions if _OF_GLIBC.fullmatch(need.library)]
    needed = max((number for version in wanted if (number := _number(version, "GLIBC"))), default=None)
    if needed is None or needed[:2] <= (runs.major, runs.minor):
        return None
    return f"it needs glibc >= {_dotted(needed)}, this system has {runs}"


def check_symbol_versions(path: str, library: Library, host: Host) -> str | None:
    """Versions of the C++ library: compared with the one in this process, which may not be the system's."""
    for name in dict.fromkeys(need.library for need in library.versions):
        there = host.versions.get(name)
        if not there or _OF_GLIBC.fullmatch(name):
            continue
        missing = [need.version for need in library.versions if need.library == name and need.version not in there]
        if missing:
            return _missing_version(name, missing, there, host.places.get(name, ""))
    return None


def check_search_paths(path: str, library: Library, host: Host) -> str | None:
    """S-29: where others may put a library, or that depends on the current folder, is no place to search."""
    for entry in library.search_paths:
        if not re.match(r"\$(?:ORIGIN|\{ORIGIN\})(?:/|$)", entry):
            kind = "an absolute folder" if entry.startswith("/") else "a folder relative to the current one"
            return f"its RPATH searches {kind} ({shown(entry)}); only $ORIGIN is allowed"
    return None


def check_needed(path: str, library: Library, host: Host) -> str | None:
    """S-29: a library is needed by its name, not by a path."""
    named = next((name for name in library.needed if "/" in name), None)
    return None if named is None else f"it needs the library {shown(named)} by its path"


def check_python(path: str, library: Library, host: Host) -> str | None:
    if host.free_threaded and ".abi3." in path and host.python < _ABI3_WITHOUT_GIL:
        return f"it is of the stable Python ABI, which free-threaded Python {host.python} does not have"
    missing = host.lacks(name for name in library.undefined if OF_PYTHON.match(name))
    if missing:
        return f"undefined symbol {shown(missing[0])}: it is for another Python than {host.python}"
    return None


CHECKS = (
    check_machine,
    check_c_library,
    check_glibc,
    check_symbol_versions,
    check_search_paths,
    check_needed,
    check_python,
)


def _notes(library: Library) -> Iterator[str]:
    if library.executable_stack:
        yield "asks for an executable stack"
    if library.text_relocations:
        yield "changes its code while it is loaded (text relocations)"


def _is_for_another_python(path: str, host: Host) -> bool:
    tag = _TAGGED.search(path.rpartition("/")[2])
    own = ("3", str(host.python.minor), "t" if host.free_threaded else "")
    return tag is not None and tag.groups() != own


def _other_python(path: str, host: Host) -> str:
    tag = _TAGGED.search(path)
    made = f"{tag['major']}.{tag['minor']}{tag['free']}" if tag else "another version"
    return f"it is for Python {made}, this is {host.python}{'t' if host.free_threaded else ''}"


def _made_for(variant: str) -> str:
    """What torch a build is for, as far as its name says."""
    try:
        parsed = Variant.parse(variant)
    except InvalidVariant:
        return "built for another torch"
    if parsed.release is None:
        return "built for another torch"
    return f"built for {parsed.framework} {parsed.release}{f' ({parsed.abi})' if parsed.abi else ''}"


def _missing_version(name: str, missing: list[str], there: frozenset[str], place: str) -> str:
    match = _NUMBERED.fullmatch(missing[0])
    if match is None:
        return f"it needs {shown(missing[0])}, which {name} here does not have"
    family = match["family"]
    needed = max(number for version in missing if (number := _number(version, family)))
    newest = max((number for version in there if (number := _number(version, family))), default=None)
    has = f"has {family}_{_dotted(newest)} at most" if newest else f"has no {family}"
    return f"it needs {family} >= {_dotted(needed)}, the {name} in this process ({place}) {has}"


def _number(version: str, family: str) -> tuple[int, ...] | None:
    match = _NUMBERED.fullmatch(version)
    return tuple(map(int, match["number"].split("."))) if match and match["family"] == family else None


def _dotted(number: tuple[int, ...] | None) -> str:
    return ".".join(map(str, number or ()))


def _c_library(library: Library) -> str | None:
    if any(_MUSL.match(name) for name in library.needed):
        return "musl"
    has_glibc = any(_number(need.version, "GLIBC") for need in library.versions)
    return "glibc" if has_glibc else None
