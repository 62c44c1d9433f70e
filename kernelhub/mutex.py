"""Mutex: one process of this machine at a time; the only user of filelock.

It only saves work: what is stored is right without it, also where a file system grants every lock to everybody. The
lock file says who holds it, for those who wait. Where a file system knows no locks (ENOSYS, ENOLCK), a file that exists
while it is held takes over; one whose process is gone is taken away, one of another machine has to be waited for.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import filelock

from kernelhub.durable import PRIVATE_FILE, close, host, is_alive
from kernelhub.errors import LockTimeout

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kernelhub.reporter import Reporter

TELL_SECONDS = 10.0  # how often somebody who waits is told who holds the lock

_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 0.05
_BREAK_SECONDS = 60.0  # far longer than reading and removing one small file takes
_BUSY = (errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
_HOLDER_BYTES = 1000
_HELD = ".held"

_without_locks: set[Path] = set()  # folders of file systems that know no locks, each told about once


class Holder(NamedTuple):
    """Who holds a lock: process id, machine, and since when (seconds since 1970)."""

    pid: int
    host: str
    since: float

    @classmethod
    def this(cls) -> Holder:
        return cls(os.getpid(), host(), time.time())

    @classmethod
    def read(cls, path: Path) -> Holder | None:
        """What a lock file says; None while it says nothing."""
        try:
            with path.open("rb") as file:
                pid, name, since = json.loads(file.read(_HOLDER_BYTES))
            return cls(int(pid), str(name)[:100], float(since))
        except (OSError, ValueError, TypeError, OverflowError):
            return None

    @property
    def is_gone(self) -> bool:
        """A process of this machine that does not run any more; nobody knows about other machines."""
        return self.host == host() and 0 < self.pid < 1 << 30 and not is_alive(self.pid)

    @property
    def is_here(self) -> bool:
        """A process of this machine that runs."""
        return self.host == host() and not self.is_gone

    def __str__(self) -> str:
        try:
            since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since))
        except (OverflowError, ValueError, OSError):
            since = "an unknown time"
        return f"process {self.pid} on {ascii(self.host)[1:-1]} since {since}"


@contextlib.contextmanager
def held(path: Path, timeout: float, reporter: Reporter, mode: int = PRIVATE_FILE) -> Iterator[None]:
    """Hold the lock of a file's name; while waiting, tell every 10 seconds for whom.

    A process that was forked while the lock is held does not release it.

    Raises:
        LockTimeout: somebody else held it for ``timeout`` seconds.
        OSError: the lock file cannot be written.
    """
    release = _acquire(path, timeout, reporter, mode)
    owner = os.getpid()
    try:
        yield
    finally:
        if os.getpid() == owner:
            release()


class FoundLock(NamedTuple):
    """A file that means "held", by whom (None: it does not say), and whether its process surely does not run here."""

    path: Path
    holder: Holder | None
    abandoned: bool


def break_locks(folder: Path, *, dry_run: bool = False) -> list[FoundLock]:
    """Take away the files that mean "held" but for those of processes that run on this machine (R29).

    For people who know that the processes of other machines are gone; locks that the system keeps need none of this.
    A ``dry_run`` only says what would be taken away.

    Raises:
        OSError: one cannot be removed.
    """
    found = []
    for path in sorted(folder.glob(f"*{_HELD}")):
        holder = Holder.read(path)
        alive = holder is not None and holder.is_here
        if not alive and not dry_run:
            _break(path, holder)
        found.append(FoundLock(path, holder, not alive))
    return found


def _acquire(path: Path, timeout: float, reporter: Reporter, mode: int) -> Callable[[], None]:
    started = time.monotonic()
    told, pause = started, _FIRST_PAUSE
    while True:
        attempt = _attempt_soft if path.parent in _without_locks else _attempt
        try:
            release = attempt(path, mode)
        except _NoLocks as refusal:
            reporter.warn(f"{path.parent} has no file locks ({refusal}): files that exist while held take their place")
            _without_locks.add(path.parent)
            continue
        if release is not None:
            return release
        now = time.monotonic()
        if now - started >= timeout:
            raise LockTimeout(path, now - started, _describe(path))
        if now - told >= TELL_SECONDS:
            told = now
            reporter.warn(f"waiting for the lock {path}, held by {_describe(path)}")
        time.sleep(min(pause, max(0.0, started + timeout - now)))
        pause = min(2 * pause, _LONGEST_PAUSE)


class _NoLocks(Exception):
    """This file system knows no locks."""


def _attempt(path: Path, mode: int) -> Callable[[], None] | None:
    """Take the lock if it is free: a function that releases it, else None."""
    if fcntl is None:
        return _attempt_elsewhere(path)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, mode)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _write_holder(handle)
    except OSError as error:
        close(handle)
        if error.errno in _NO_LOCKS:
            raise _NoLocks(error.strerror) from None
        if error.errno in _BUSY:
            return None
        raise
    except BaseException:
        close(handle)
        raise
    return lambda: _release(handle)


def _write_holder(handle: int) -> None:
    """Who holds it is good to know; a full disk is no reason not to hold it."""
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(Holder.this()).encode(), 0)


def _release(handle: int) -> None:
    with contextlib.suppress(OSError):
        os.ftruncate(handle, 0)
    close(handle)


def _attempt_elsewhere(path: Path) -> Callable[[], None] | None:
    lock = filelock.FileLock(path)
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        return None
    return lock.release


def _attempt_soft(path: Path, mode: int) -> Callable[[], None] | None:
    """Create the file that means "held"; take away one whose process is gone."""
    path = _soft(path)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    try:
        handle = os.open(path, flags, mode)
    except FileExistsError:
        holder = Holder.read(path)
        if holder is not None and holder.is_gone:
            _break(path, holder)
        return None
    mine = Holder.this()
    with os.fdopen(handle, "w", encoding="ascii") as file:
        json.dump(mine, file)

    def release() -> None:
        if Holder.read(path) == mine:
            path.unlink(missing_ok=True)

    return release


def _break(path: Path, holder: Holder | None) -> None:
    """Take a dead process's file away, one process at a time: what is there then is surely still the dead one's."""
    guard = path.with_name(f"{path.name}.breaking")
    try:
        os.close(os.open(guard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE))
    except FileExistsError:
        with contextlib.suppress(OSError):
            if time.time() - guard.stat().st_mtime > _BREAK_SECONDS:  # whoever was breaking died in between
                guard.unlink()
        return
    try:
        if Holder.read(path) == holder:
            path.unlink(missing_ok=True)
    finally:
        guard.unlink(missing_ok=True)


def _soft(path: Path) -> Path:
    return path.with_name(f"{path.name}{_HELD}")


def _describe(path: Path) -> str:
    soft = path.parent in _without_locks
    holder: Any = Holder.read(_soft(path) if soft else path) or "an unknown process"
    hint = f" ({_soft(path)}); if it does not run any more: kernelhub cache prune --break-lock" if soft else ""
    return f"{holder}{hint}"
