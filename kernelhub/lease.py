"""Lease: what a process uses is not removed, at no cost but an open file: a shared lock, which needs no write.

The lock lies on a file of the thing itself, ends with the process (and its forks), and works on read-only mounts.
"""

from __future__ import annotations

import contextlib
import errno
import os
from typing import TYPE_CHECKING

from kernelhub.durable import close

try:
    import fcntl
except ImportError:  # Windows, where what is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_held: dict[tuple[int, int], int] = {}  # device and inode -> open file, kept as long as the process


def take(path: Path) -> bool:
    """Lease until the process ends; False when the file is being removed.

    Raises:
        OSError: no lease is to be had on this file system.
    """
    status = path.stat()
    key = (status.st_dev, status.st_ino)
    if fcntl is None or key in _held:
        return True
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    is_ours = False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        still_there = path.stat().st_ino == os.fstat(handle).st_ino == status.st_ino
        is_ours = still_there and _held.setdefault(key, handle) == handle
    except (BlockingIOError, FileNotFoundError):
        return False
    finally:
        if not is_ours:
            close(handle)
    return still_there


def drop_all() -> None:
    """Give back every lease of this process, e.g. to unmount the file system of a store."""
    while _held:
        os.close(_held.popitem()[1])


@contextlib.contextmanager
def unleased(path: Path) -> Iterator[bool]:
    """True while nobody uses it and nobody can begin to; False when somebody does, or the file system cannot tell."""
    if fcntl is None:
        yield True
        return
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError as error:
        yield error.errno == errno.ENOENT
        return
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            free = False
        else:
            free = True
        yield free
    finally:
        close(handle)
