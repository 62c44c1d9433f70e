"""Variant: the name of one build folder, e.g. ``torch213-cxx11-cu130-x86_64-linux``.

Accepted forms (hub-format section 2)::

    torch<M><m>[-cxx11|-cxx98]-<backend>-<cpu>-<os>
    torch-stable-abi<M><m>-<backend>-<cpu>-<os>
    tvm-ffi<M><m>-<backend>-<cpu>-<os>
    torch-<noarch backend>            torch-universal
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelhub.backend import BACKENDS, Backend, Release, split_release
from kernelhub.errors import InvalidBackend, InvalidVariant

CPUS = ("aarch64", "x86_64")
SYSTEMS = ("darwin", "linux", "windows")
UNIVERSAL = "universal"
NOARCH_NAMES = (*(kind.noarch for kind in BACKENDS), UNIVERSAL)

TORCH = "torch"
STABLE_ABI = "torch-stable-abi"
TVM_FFI = "tvm-ffi"

_LONGEST = 100
_COMPILED = re.compile(
    r"(?P<framework>torch-stable-abi|tvm-ffi|torch)(?P<digits>[0-9.]*)(?P<parts>(?:-[^-]*)*)", re.ASCII
)
_EXPECTED = "torch<version>[-cxx11|-cxx98]-<backend>-<cpu>-<os> or torch-<backend>"


@dataclass(frozen=True)
class Variant:
    """One build variant. ``noarch`` is set for pure-Python builds, which have no version, backend, CPU or OS."""

    framework: str
    release: Release | None = None
    abi: str | None = None
    backend: Backend | None = None
    cpu: str | None = None
    os: str | None = None
    noarch: str | None = None

    @classmethod
    def parse(cls, name: str) -> Variant:
        """Read a folder name; ``str()`` of the result is that name again.

        Raises:
            InvalidVariant: the name is not a build variant; ``problem`` says which part is wrong.
        """
        _check_text(name)
        framework, _, rest = name.partition("-")
        if framework == TORCH and rest in NOARCH_NAMES:
            return cls(TORCH, noarch=rest)
        variant = _parse_compiled(name)
        if str(variant) != name:
            raise InvalidVariant(name, f"not canonical, would be {str(variant)!r}", _EXPECTED)
        return variant

    @classmethod
    def is_name(cls, name: str) -> bool:
        """Is this the name of a variant?"""
        try:
            cls.parse(name)
        except InvalidVariant:
            return False
        return True

    def __str__(self) -> str:
        if self.noarch is not None:
            return f"{self.framework}-{self.noarch}"
        assert self.release is not None
        head = f"{self.framework}{self.release.major}{self.release.minor}"
        return "-".join(part for part in (head, self.abi, str(self.backend), self.cpu, self.os) if part)


def _check_text(name: str) -> None:
    if not name.isascii():
        raise InvalidVariant(name, "non-ASCII character", _EXPECTED)
    if len(name) > _LONGEST:
        raise InvalidVariant(name[:_LONGEST], f"length {len(name)} > {_LONGEST}", _EXPECTED)
    if ".." in name:
        raise InvalidVariant(name, "contains '..'", _EXPECTED)


def _parse_compiled(name: str) -> Variant:
    match = _COMPILED.fullmatch(name)
    if match is None:
        raise InvalidVariant(name, "unknown framework", _EXPECTED)
    framework = match["framework"]
    release = split_release(match["digits"], 1)
    if release is None or (release.major == 0 and framework != TVM_FFI):
        raise InvalidVariant(name, f"{framework} version {match['digits']!r}", "one major digit, then the minor")
    parts = match["parts"].split("-")[1:]
    abi = parts.pop(0) if framework == TORCH and parts and parts[0].startswith("cxx") else None
    if abi not in (None, "cxx11", "cxx98"):
        raise InvalidVariant(name, f"unknown C++ ABI tag {abi!r}", "cxx11, cxx98 or none")
    if len(parts) != 3:
        raise InvalidVariant(name, f"part count: {len(parts)} after the version", "<backend>-<cpu>-<os>")
    backend, cpu, system = parts
    _check_member(name, "cpu", cpu, CPUS)
    _check_member(name, "os", system, SYSTEMS)
    try:
        return Variant(framework, release, abi, Backend.parse(backend), cpu, system)
    except InvalidBackend as error:
        raise InvalidVariant(name, f"backend {backend!r}: {error.problem}", error.expected) from error


def _check_member(name: str, part: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise InvalidVariant(name, f"unknown {part} {value!r}", f"one of {', '.join(known)}")
