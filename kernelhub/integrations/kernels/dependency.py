"""KernelDependency: another kernel that one needs, and the commit that a lock gives it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelhub.resolution import DEFAULT_REVISION
from kernelhub.revision import RevisionKind

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernelhub.lockfile import Lock
    from kernelhub.revision import Revision


class KernelVersion:
    """Either ``KernelVersion.Version(1)`` or ``KernelVersion.Revision("main")``."""

    Version: type[_Version]
    Revision: type[_Revision]


@dataclass(frozen=True)
class _Version(KernelVersion):
    version: int


@dataclass(frozen=True)
class _Revision(KernelVersion):
    revision: str


KernelVersion.Version, KernelVersion.Revision = _Version, _Revision


def version_of(revision: Revision) -> KernelVersion:
    """The version or revision that kernelhub has read."""
    return _Version(revision.number) if revision.kind is RevisionKind.VERSION else _Revision(str(revision))


@dataclass(frozen=True)
class KernelDependency:
    """A repository at a version or revision."""

    repo_id: str
    version: KernelVersion


@dataclass(frozen=True)
class KernelLock:
    """The commit that a lock gives a kernel."""

    commit: str


def locks_of(lock: Lock) -> Mapping[KernelDependency, KernelLock]:
    """The entries of a lock file."""
    locks = {}
    for kernel in lock.kernels:
        revision = kernel.request.revision or DEFAULT_REVISION
        locks[KernelDependency(kernel.request.name, version_of(revision))] = KernelLock(kernel.commit)
    return locks
