"""Operators: which loaded build owns which of torch's operator namespaces.

Torch ends the process when two libraries define one namespace, so the second one is refused before it is opened (S-26).
A build says in its metadata what it calls its operators (``id``); it is believed where that name stands in its library.
What any other build has registered is seen in torch; and such a build is refused when the namespace of another one
stands in its bytes.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelhub.elf import held_names
from kernelhub.errors import IncompatibleLibrary

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.preflight import LibraryReport
    from kernelhub.source import Source
    from kernelhub.verify import VerifiedBuild

_HINT = "Torch would end the process: load one of them in another process."


@dataclass
class _Claim:
    """One build's libraries, by what the dynamic loader knows them by, and the namespaces that they define."""

    build: str
    libraries: frozenset[object]
    namespaces: set[str] = field(default_factory=set)


_CLAIMS: list[_Claim] = []


@contextlib.contextmanager
def claimed(build: VerifiedBuild, libraries: tuple[LibraryReport, ...], source: Source) -> Iterator[None]:
    """Hold the namespaces of a build while it is imported, and from then on.

    Args:
        build: about to be imported.
        libraries: what preflight found about its native libraries.
        source: where they are.

    Raises:
        IncompatibleLibrary: another build has one of them; nothing was opened.
    """
    registering = [library for library in libraries if library.registers]
    if not registering:
        yield
        return
    claim = _Claim(build.build, frozenset(_known_by(build.folder / each.path, source) for each in registering))
    claim.namespaces.update(name for each in registering for name in each.namespaces)
    is_sure = all(each.namespaces for each in registering)
    if build.metadata is not None and build.metadata.id is not None:
        claim.namespaces.add(build.metadata.id)
    for owner in _CLAIMS:
        if not claim.libraries <= owner.libraries:  # else they are open already, and nothing is registered again
            _refuse_clash(build, claim, owner, [] if is_sure else registering, source)
    before = None if is_sure else _registered()
    _CLAIMS.append(claim)
    try:
        yield
    except BaseException:
        registered = _registered()
        claim.namespaces |= registered - (registered if before is None else before)
        if not claim.namespaces & registered:  # it failed before its libraries were opened
            _CLAIMS.remove(claim)
        raise
    if before is not None:
        claim.namespaces |= _registered() - before


def _refuse_clash(
    build: VerifiedBuild, claim: _Claim, owner: _Claim, unsure: list[LibraryReport], source: Source
) -> None:
    taken = {name: each.path for each in unsure for name in _held(each.path, owner.namespaces, source)}
    if owner.build in {dependency.build for dependency in build.dependencies}:
        taken = {}  # it may well speak of what it depends on
    taken |= dict.fromkeys(claim.namespaces & owner.namespaces, "")
    if taken:
        name, path = next(iter(taken.items()))
        cause = f"its operators torch.ops.{name} are already registered by {owner.build}"
        raise IncompatibleLibrary(build.build, path or name, cause, _HINT)


def _held(path: str, names: set[str], source: Source) -> tuple[str, ...]:
    with source.open(path) as file:
        return held_names(file, names)


def _registered() -> set[str]:
    """The namespaces that torch knows now; asked seldom, as it takes ten milliseconds."""
    core = getattr(sys.modules.get("torch"), "_C", None)
    ask = getattr(core, "_dispatch_get_all_op_names", list)
    return {name.partition("::")[0] for name in ask()}


def _known_by(library: Path, source: Source) -> object:
    """What the dynamic loader tells libraries apart by: device and inode."""
    status = Path(source.library(library)).stat()
    return status.st_dev, status.st_ino


def kept_libraries() -> list[Any]:
    """The operator libraries that torch keeps for those who did not: ``torch.library.define`` without one."""
    return getattr(sys.modules.get("torch.library"), "_keep_alive", None) or []


def forget(values: list[Any]) -> None:
    """Take back the operators that a module registered through ``torch.library``, as far as torch allows."""
    torch_library = sys.modules.get("torch.library")
    kind = getattr(torch_library, "Library", None)
    if kind is None:
        return
    for value in values:
        with contextlib.suppress(Exception):  # any object of a kernel, and torch's own internals
            library = value if isinstance(value, kind) else vars(value).get("_lib")
            if isinstance(library, kind):
                library._destroy()
                torch_library._defs.difference_update(library._op_defs)  # type: ignore[union-attr]
