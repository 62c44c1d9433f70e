"""Locking: the lock file that a call names, or the one that was installed with the package that calls."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kernelhub.errors import LockfileNotFound, NotLocked
from kernelhub.lockfile import Lock

if TYPE_CHECKING:
    from types import FrameType

    from kernelhub.lockfile import LockedKernel

LOCK_NAMES = ("kernels.lock", "kernelhub.lock")
_OWN = __name__.rpartition(".")[0]


def read_lock(lockfile: Path | str | None) -> Lock:
    """The lock at a path; with None that of the package that calls, as it was installed.

    Raises:
        LockfileNotFound: there is no such file, or the package that calls was installed without one.
        InvalidLockfile: it cannot be read.
    """
    if lockfile is None:
        return _callers_lock()
    path = Path(lockfile)
    if not path.exists():
        raise LockfileNotFound(str(path), "no such file", "a lock that `kernelhub lock` has written")
    return Lock.read(path)


def locked_entry(lock: Lock, repo_id: str) -> LockedKernel:
    """The entry of a repository; one that was asked for comes before one that only others need.

    Raises:
        NotLocked: there is none.
    """
    found = sorted(lock.of_repository(repo_id), key=lambda kernel: kernel.dependency)
    if not found:
        raise NotLocked(repo_id, lock.origin or "the lock")
    return found[0]


def _callers_lock() -> Lock:
    package = _callers_package()
    for name in importlib.metadata.packages_distributions().get(package, ()):
        distribution = importlib.metadata.distribution(name)
        for lock_name in LOCK_NAMES:
            text = distribution.read_text(lock_name)
            if text is not None:
                return Lock.parse(text.encode(), f"{lock_name} of the installed package {name}")
    problem = f"this package, which calls, was installed without {' or '.join(LOCK_NAMES)}"
    raise LockfileNotFound(package, problem, "lockfile=Path(...), or a lock installed with it")


def _callers_package() -> str:
    """The top package of the code that called this API."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module != _OWN and not module.startswith(f"{_OWN}."):
            return module.partition(".")[0]
        frame = frame.f_back
    return ""
