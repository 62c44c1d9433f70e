"""Durable: files that are read with care, replaced as a whole, and reach the disk before they are announced."""

from __future__ import annotations

import contextlib
import errno
import glob
import json
import os
import re
import secrets
import shutil
import stat
import sys
import time
from functools import cache
from pathlib import Path
from platform import node
from typing import TYPE_CHECKING, Any, BinaryIO, cast

if TYPE_CHECKING:
    from collections.abc import Mapping

PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
SHARED_FILE, SHARED_FOLDER = 0o666, 0o777  # less what the umask takes

_STALE_SECONDS = 24 * 3600


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading, unbuffered; never follows a link, never waits for a special file (S-13, S-37).

    Raises:
        OSError: it cannot be opened, or is not a regular file.
    """
    flags = ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY")  # each where the system has it
    handle = os.open(path, os.O_RDONLY | sum(getattr(os, flag, 0) for flag in flags))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return cast("BinaryIO", os.fdopen(handle, "rb", buffering=0))


def read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when it is absent, unreadable or damaged."""
    try:
        with open_regular(path) as file:
            data = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


def write_json(
    path: Path, data: Mapping[str, Any], scratch: Path, mode: int = PRIVATE_FILE, *, durable: bool = True
) -> None:
    """Replace a file as a whole: readers see the old content or the new one, also after a crash of the process.

    ``scratch`` is a folder of the same file system where dead processes' leftovers are swept. What counts as absent
    when it is damaged need not be ``durable``: a power cut may then damage it, and nobody waits for the disk.
    """
    temporary = scratch / temporary_name()
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(json.dumps(data))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def replace_file(path: Path, data: bytes, mode: int) -> None:
    """Replace a user's file as a whole: a crash leaves the old content or the new one, never a part.

    What a process that was killed has left beside it is removed.

    Raises:
        OSError: it cannot be written; the old content is still there.
    """
    temporary = path.with_name(f".{temporary_name()}.{path.name}")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0), mode)
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    for other in path.parent.glob(f".*--*--*.{glob.escape(path.name)}"):
        if is_abandoned(other):
            remove(other)


def sync_file(path: Path) -> None:
    """Have the content of a file on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened for this
        sync_file(path)


def make_folder(path: Path, root: Path, mode: int = PRIVATE_FOLDER) -> None:
    """Create ``path`` and its parents up to ``root`` with ``mode``, and parents of ``root`` as the umask says."""
    if path.is_dir():
        return
    missing = [folder for folder in (path, *path.parents) if is_inside(folder, root) and not folder.exists()]
    root.parent.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        folder.mkdir(mode=mode, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(20, "not a folder", str(path))


def is_inside(path: Path, folder: Path) -> bool:
    return path == folder or folder in path.parents


def temporary_name() -> str:
    """A new name that tells the process it belongs to: ``host--pid--...``."""
    return f"{host()}--{os.getpid()}--{secrets.token_hex(8)}"


def is_abandoned(path: Path) -> bool:
    """Does a file or folder with such a name belong to nobody: its process is gone, or is elsewhere and a day old?"""
    owner, _, rest = path.name.removeprefix(".").partition("--")
    pid = rest.partition("--")[0]
    if owner == host() and pid.isdecimal() and len(pid) < 10:
        return not is_alive(int(pid))
    return time.time() - path.lstat().st_mtime > _STALE_SECONDS


def sweep(folder: Path) -> None:
    """Remove what belongs to nobody any more."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                if is_abandoned(path):
                    remove(path)


@cache
def host() -> str:
    """This machine, and in it the container, inside which process ids mean something."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:  # no Linux
        namespace = ""
    plain = re.sub(r"[^A-Za-z0-9.]+", "-", f"{node()[:64]}-{namespace.removeprefix('pid:')}")
    return re.sub(r"-+", "-", plain).strip("-") or "host"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def remove(path: Path) -> None:
    """Delete a file or a folder with all that is in it, as far as that is allowed; never fails."""
    with contextlib.suppress(OSError):
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        elif sys.version_info >= (3, 12):
            shutil.rmtree(path, onexc=_force_remove)
        else:
            shutil.rmtree(path, onerror=_force_remove)


def close(handle: int) -> None:
    """Close a file of which nothing is expected any more, not even that closing succeeds."""
    with contextlib.suppress(OSError):
        os.close(handle)


def _force_remove(function: Any, path: str, _: Any) -> None:
    """Delete what has no write permission (stored files are 0444, folders may be 0500); absent is fine."""
    with contextlib.suppress(OSError):
        Path(path).parent.chmod(PRIVATE_FOLDER)
        function(path)
