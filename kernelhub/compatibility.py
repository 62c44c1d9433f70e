"""Compatibility: which builds fit an environment, why the others do not, and which is best.

One check is one function is one reason; ``CHECKS`` is the whole policy (hub-format section 3).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from kernelhub.errors import InvalidVariant, shown
from kernelhub.variant import STABLE_ABI, TORCH, TVM_FFI, UNIVERSAL, Variant

if TYPE_CHECKING:
    from kernelhub.environment import Environment

Check = Callable[[Variant, "Environment"], "str | None"]

_FIRST_ABI3_FREE_THREADED = (3, 15)
_FIRST_METAL_MACOS = 26
_SHOWN_ARCHS = 20
_ARCH = re.compile(r"(?P<major>[0-9]{1,3})\.(?P<minor>[0-9])(?P<suffix>[af]?)(?P<ptx>\+PTX)?", re.ASCII)
_GFX = re.compile(r"(?P<name>gfx[0-9a-f]{3,5})(?::[a-z]+[+-])*", re.ASCII)


class Rejection(NamedTuple):
    """A build that does not fit, and the first reason found."""

    variant: Variant
    reason: str


class Selection(NamedTuple):
    """All that was considered: ``accepted`` is ordered best first."""

    accepted: tuple[Variant, ...]
    rejected: tuple[Rejection, ...]
    unknown: tuple[InvalidVariant, ...] = ()

    @property
    def best(self) -> Variant | None:
        return self.accepted[0] if self.accepted else None

    def without_best(self, reason: str) -> Selection:
        """The same selection after the best one turned out not to fit (a fact only its metadata told)."""
        best, *rest = self.accepted
        return Selection(tuple(rest), (*self.rejected, Rejection(best, reason)), self.unknown)


def select(names: Iterable[str], environment: Environment) -> Selection:
    """Judge every build folder name; the result does not depend on the order of ``names``."""
    accepted: list[Variant] = []
    rejected: list[Rejection] = []
    unknown: list[InvalidVariant] = []
    ordered = sorted(names)
    twins = _twins(ordered)
    for name in ordered:
        try:
            variant = Variant.parse(name)
        except InvalidVariant as error:
            unknown.append(error)
            continue
        reason = twins.get(name) or first_reason(variant, environment)
        if reason is None:
            accepted.append(variant)
        else:
            rejected.append(Rejection(variant, reason))
    return Selection(tuple(sorted(accepted, key=preference)), tuple(rejected), tuple(unknown))


def _twins(names: Sequence[str]) -> dict[str, str]:
    """Names that are one folder on a case-insensitive file system, each with a reason that tells the other (S-12)."""
    seen: dict[str, str] = {}
    twins: dict[str, str] = {}
    for name in names:
        other = seen.setdefault(name.casefold(), name)
        if other != name:
            twins[name] = f"same folder as {shown(other)} where file names ignore letter case"
            twins[other] = f"same folder as {shown(name)} where file names ignore letter case"
    return twins


def first_reason(variant: Variant, environment: Environment) -> str | None:
    """The first reason why ``variant`` cannot run in ``environment``, or None when it can."""
    return next((reason for check in CHECKS if (reason := check(variant, environment))), None)


def preference(variant: Variant) -> tuple[object, ...]:
    """Sort key, best first: stable ABI (newest), Torch without ABI tag, Torch with one, tvm-ffi, noarch, universal;
    inside a class the highest backend version."""
    release = variant.release or (0, 0)
    backend = (variant.backend and variant.backend.release) or (0, 0)
    return (
        _preference_class(variant),
        (-release[0], -release[1]),
        variant.abi is not None,
        (-backend[0], -backend[1]),
        str(variant),
    )


def _preference_class(variant: Variant) -> int:
    if variant.noarch is not None:
        return 4 if variant.noarch == UNIVERSAL else 3
    return {STABLE_ABI: 0, TORCH: 1, TVM_FFI: 2}[variant.framework]


def check_backend(variant: Variant, environment: Environment) -> str | None:
    """Backends must be the same; noarch builds name it in ``torch-<name>``."""
    running = environment.backend
    if variant.noarch == UNIVERSAL:
        return None
    if variant.noarch is not None:
        same = variant.noarch == running.kind.noarch
        return None if same else f"built for {variant.noarch}, this process uses {running.kind.noarch}"
    assert variant.backend is not None
    if variant.backend.name != running.name:
        return f"built for {variant.backend.name}, this process uses {running.name}"
    return None


def check_os(variant: Variant, environment: Environment) -> str | None:
    if variant.os in (None, environment.os):
        return None
    return f"built for {variant.os}, this system is {environment.os}"


def check_cpu(variant: Variant, environment: Environment) -> str | None:
    if variant.cpu in (None, environment.cpu):
        return None
    return f"built for {variant.cpu} CPUs, this CPU is {environment.cpu}"


def check_torch(variant: Variant, environment: Environment) -> str | None:
    """Torch builds need that minor exactly; stable-ABI builds that Torch or newer; tvm-ffi builds that tvm-ffi."""
    if variant.release is None:
        return None
    if variant.framework == TVM_FFI:
        return _check_tvm_ffi(variant, environment)
    if environment.torch is None:
        return "needs Torch, which is not installed"
    if variant.framework == STABLE_ABI:
        newer = variant.release > environment.torch
        return f"needs Torch {variant.release} or newer, here is {environment.torch}" if newer else None
    if variant.release != environment.torch:
        return f"built for Torch {variant.release}, here is {environment.torch}"
    return None


def _check_tvm_ffi(variant: Variant, environment: Environment) -> str | None:
    if environment.tvm_ffi is None:
        return f"needs tvm-ffi {variant.release}, which is not installed"
    if variant.release != environment.tvm_ffi:
        return f"built for tvm-ffi {variant.release}, here is {environment.tvm_ffi}"
    return None


def check_abi(variant: Variant, environment: Environment) -> str | None:
    """The C++11 ABI tag matters on Linux only."""
    if variant.abi is None or environment.os != "linux" or environment.cxx11_abi is None:
        return None
    running = "cxx11" if environment.cxx11_abi else "cxx98"
    return None if variant.abi == running else f"built with the {variant.abi} C++ ABI, Torch here uses {running}"


def check_backend_release(variant: Variant, environment: Environment) -> str | None:
    """CUDA runs builds of its own major with an older or equal minor; other backends need the same release."""
    if variant.backend is None or variant.backend.release is None:
        return None
    built, running = variant.backend.release, environment.backend.release
    if running is None:
        return f"built for {variant.backend.describe()}, the version here is unknown"
    if variant.backend.name == "cuda":
        fits = built.major == running.major and built.minor <= running.minor
    else:
        fits = built == running
    return None if fits else f"built for {variant.backend.describe()}, here is {environment.backend.describe()}"


def check_metal(variant: Variant, environment: Environment) -> str | None:
    """Metal builds need macOS 26 or newer."""
    if variant.backend is None or variant.backend.name != "metal":
        return None
    if environment.macos is None:
        return f"Metal builds need macOS {_FIRST_METAL_MACOS} or newer, the version here is unknown"
    if environment.macos.major < _FIRST_METAL_MACOS:
        return f"Metal builds need macOS {_FIRST_METAL_MACOS} or newer, here is {environment.macos}"
    return None


def check_free_threading(variant: Variant, environment: Environment) -> str | None:
    """Compiled builds use abi3, which free-threaded Python supports from 3.15 on."""
    if variant.noarch is not None or not environment.free_threaded:
        return None
    if environment.python >= _FIRST_ABI3_FREE_THREADED:
        return None
    return f"compiled builds cannot run on free-threaded Python {environment.python} (before 3.15)"


def check_libc(variant: Variant, environment: Environment) -> str | None:
    """Compiled Linux builds are linked against glibc."""
    if variant.os != "linux" or environment.libc is None or environment.libc[0] != "musl":
        return None
    return "compiled for glibc, this system uses musl libc"


CHECKS: tuple[Check, ...] = (
    check_backend,
    check_os,
    check_cpu,
    check_libc,
    check_free_threading,
    check_torch,
    check_abi,
    check_backend_release,
    check_metal,
)


class ArchVerdict(NamedTuple):
    """What metadata's ``archs`` say about this machine's devices: a ``reason`` to refuse, or a ``note``."""

    reason: str | None = None
    note: str | None = None


def judge_archs(archs: Sequence[str], environment: Environment) -> ArchVerdict:
    """Does a build that lists ``archs`` cover every visible device of this machine?

    ``9.0`` covers the same major with that minor or newer, ``9.0a`` exactly 9.0, ``10.0f`` the same major with
    that minor or newer, ``9.0+PTX`` that or anything newer; ROCm compares gfx names without feature flags.
    An unknown spelling cannot be judged: it is accepted with a note.

    Every device, because one process binds one build and may then run it on any of them (``device_map="auto"``): a
    build for the first device only would fail at its first launch on the second. Whoever uses one device of a mixed
    machine hides the others; the reason says how. A build that covers them all is chosen where there is one.
    """
    if not archs:
        return ArchVerdict()
    verdicts = [_verdict(archs, device.arch) for device in environment.gpus]
    if False in verdicts:
        reason = _uncovered(archs, environment, verdicts.index(False))
        hint = _hint(environment, verdicts.index(False))
        return ArchVerdict(reason=reason if set(verdicts) == {False} else f"{reason}; {hint}")
    return ArchVerdict(note=f"cannot judge architectures {_listed(archs)}" if None in verdicts else None)


def _verdict(archs: Sequence[str], device: str) -> bool | None:
    """Does any of ``archs`` cover one device? None: none does, but the meaning of some is unknown."""
    verdicts = [_covers(arch, device) for arch in archs]
    if any(verdicts):
        return True
    return None if None in verdicts else False


def _covers(arch: str, device: str) -> bool | None:
    cuda, rocm, visible = _ARCH.fullmatch(arch), _GFX.fullmatch(arch), _ARCH.fullmatch(device)
    if rocm is not None:
        return rocm["name"] == device.partition(":")[0]
    if cuda is None or visible is None:
        return None
    built, running = _capability(cuda), _capability(visible)
    if cuda["suffix"] == "a":
        return built == running
    if cuda["ptx"] and not cuda["suffix"]:
        return running >= built
    return built[0] == running[0] and built[1] <= running[1]


def _capability(match: re.Match[str]) -> tuple[int, int]:
    return int(match["major"]), int(match["minor"])


def _uncovered(archs: Sequence[str], environment: Environment, index: int) -> str:
    device = environment.gpus[index]
    name = f" ({device.name})" if device.name else ""
    return f"no code for GPU {device.arch}{name} on {environment.cpu}, only for {_listed(archs)}"


def _hint(environment: Environment, index: int) -> str:
    variable = "HIP_VISIBLE_DEVICES" if environment.backend.name == "rocm" else "CUDA_VISIBLE_DEVICES"
    return f"it is device {index}, and {variable} can hide it from this process"


def _listed(archs: Sequence[str]) -> str:
    """Architectures for a message, escaped, as metadata may hold any text."""
    listed = ", ".join(ascii(arch)[1:-1] for arch in archs[:_SHOWN_ARCHS])
    return listed if len(archs) <= _SHOWN_ARCHS else f"{listed} and {len(archs) - _SHOWN_ARCHS} more"
