"""Store: the folder of verified builds and remembered answers; the only user of filelock.

Layout, one subtree per Hub so that no endpoint can answer for another::

    <root>/store.json                                            schema of this layout
    <root>/hubs/<hub>/builds/<org>--<repo>/<commit>/<variant>/   manifest.json  receipt.json  files/...
    <root>/hubs/<hub>/records/...json                            answers of the Hub, with the time they were given
    <root>/locks/                                                one lock file a build; they only save work
    <root>/tmp/                                                  private folders of downloads under way

A build appears under its final name by one rename and never changes afterwards, so readers need no lock.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, cast

import filelock

from kernelhub import setting
from kernelhub.errors import CacheError, CacheFullError, LockTimeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SCHEMA = 1
MANIFEST = "manifest.json"
RECEIPT = "receipt.json"
FILES = "files"

_LOCK_SECONDS = 600.0
_STALE_SECONDS = 24 * 3600
_MARGIN = 1 << 20  # bytes kept free beside what a download needs


class StoredFile(NamedTuple):
    """One file of a stored build: path, size in bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a stored build consists of and where it came from."""

    repo_id: str
    commit: str
    variant: str
    endpoint: str
    files: tuple[StoredFile, ...]

    @property
    def digest(self) -> str:
        """sha256 over the sorted list of paths and hashes: two builds with the same digest are the same code."""
        lines = "".join(f"{file.sha256}  {file.path}\n" for file in sorted(self.files))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "schema": SCHEMA, "files": [file._asdict() for file in self.files]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        files = tuple(StoredFile(file["path"], file["size"], file["sha256"]) for file in data["files"])
        return cls(data["repo_id"], data["commit"], data["variant"], data["endpoint"], files)


class FileStat(NamedTuple):
    """What a ``stat`` says about a verified file; any difference means "hash it again"."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, result: os.stat_result) -> FileStat:
        return cls(result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino)


@dataclass(frozen=True)
class StoredBuild:
    """A complete build in the store."""

    folder: Path
    manifest: Manifest

    @property
    def files_folder(self) -> Path:
        return self.folder / FILES

    def receipt(self) -> dict[str, FileStat]:
        """The stats of the files when they were last verified; empty when unreadable or absent."""
        data = _read_json(self.folder / RECEIPT)
        try:
            return {path: FileStat(*stat) for path, stat in data["files"].items()} if data else {}
        except (KeyError, TypeError, AttributeError):
            return {}

    def write_receipt(self, stats: Mapping[str, FileStat]) -> None:
        """Remember a verification; a store that cannot be written (read-only mount) simply verifies again."""
        with contextlib.suppress(OSError):
            _write_json(self.folder / RECEIPT, {"schema": SCHEMA, "files": {path: list(stats[path]) for path in stats}})


class Store:
    """A store folder seen for one Hub endpoint.

    Raises:
        CacheError: the folder is not usable (a file, not ours, or written by a newer kernelhub).
    """

    def __init__(self, root: Path | None = None, endpoint: str | None = None) -> None:
        self.root = (root or setting.store_folder()).absolute()
        self.endpoint = endpoint.rstrip("/") if endpoint else setting.endpoint()
        self._hub = self.root / "hubs" / _hub_name(self.endpoint)

    def find(self, repo_id: str, commit: str, variant: str) -> StoredBuild | None:
        """The stored build, or None; incomplete builds are never visible."""
        return _stored_build(self._build_folder(repo_id, commit, variant))

    def builds(self) -> Iterator[StoredBuild]:
        """Every complete build of this Hub, in a stable order."""
        found = (_stored_build(path.parent) for path in sorted(self._hub.glob(f"builds/*/*/*/{MANIFEST}")))
        return (build for build in found if build is not None)

    @contextlib.contextmanager
    def staging(self) -> Iterator[Path]:
        """A private temporary folder in the store's file system, gone afterwards unless it was published.

        Raises:
            CacheError: the folder cannot be made.
        """
        self._prepare()
        try:
            path = self._temporary_folder()
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            yield path
        finally:
            _remove(path)

    def publish(self, staged: Path, manifest: Manifest) -> StoredBuild:
        """Make a staged build visible by one rename; if another process was first, its build is the one returned.

        A folder that is in the way and is no build (its manifest was lost) is removed.
        """
        final = self._build_folder(manifest.repo_id, manifest.commit, manifest.variant)
        _make_folder(final.parent, self.root)
        _write_json(staged / MANIFEST, manifest.to_dict())
        for folder, _, _ in os.walk(staged):
            _sync_folder(Path(folder))
        try:
            staged.rename(final)
        except OSError:
            if _stored_build(final) is None:
                self._bury(final)
                staged.rename(final)
        _sync_folder(final.parent)
        return StoredBuild(final, manifest)

    def discard(self, build: StoredBuild) -> None:
        """Take a damaged build out of sight by one rename, then delete it.

        Raises:
            CacheError: this store cannot be written.
        """
        self._prepare()
        try:
            self._bury(build.folder)
        except OSError as error:
            problem = f"damaged build {build.folder.relative_to(self.root)} cannot be removed"
            raise CacheError(self.root, f"{problem} ({error.strerror})") from error

    def _bury(self, folder: Path) -> None:
        grave = self._temporary_folder()
        with contextlib.suppress(FileNotFoundError):
            folder.rename(grave / "build")
        _remove(grave)

    @contextlib.contextmanager
    def lock(self, repo_id: str, commit: str, variant: str) -> Iterator[None]:
        """Serialise downloads of one build among processes of this machine; it only saves work.

        Raises:
            LockTimeout: held by another process for too long (``KERNELHUB_LOCK_TIMEOUT`` seconds, default 600).
            CacheError: the lock file cannot be written.
        """
        self._prepare()
        timeout = setting.seconds("KERNELHUB_LOCK_TIMEOUT", _LOCK_SECONDS)
        path = self.root / "locks" / f"{_folder_name(repo_id)}--{commit[:12]}--{variant}.lock"
        lock = filelock.FileLock(path, timeout=timeout)
        try:
            lock.acquire()
        except filelock.Timeout:
            raise LockTimeout(path, timeout) from None
        except OSError as error:
            raise self.unwritable(error) from error
        try:
            self._sweep()
            yield
        finally:
            lock.release()

    def check_space(self, size: int) -> None:
        """Refuse a download that does not fit.

        Raises:
            CacheFullError: with the folder, the bytes needed and the bytes free.
        """
        self._prepare()
        free = shutil.disk_usage(self.root).free
        if free < size + _MARGIN:
            raise CacheFullError(self.root, "disk full", size + _MARGIN, free)

    def unwritable(self, error: OSError, needed: int = 0) -> CacheError:
        """What to raise for an error of the system while the store was written."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CacheFullError(self.root, "disk full", needed, shutil.disk_usage(self.root).free)
        return CacheError(self.root, f"cannot be written ({error.strerror or error})")

    def record(self, kind: str, name: str, facts: Mapping[str, Any]) -> None:
        """Remember an answer of the Hub; a store that cannot be written remembers nothing."""
        with contextlib.suppress(OSError, CacheError):
            self._prepare()
            path = self._record_path(kind, name)
            _make_folder(path.parent, self.root)
            _write_json(path, {"schema": SCHEMA, "name": name, "time": time.time(), **facts})

    def recorded(self, kind: str, name: str) -> dict[str, Any] | None:
        """A remembered answer, with the ``time`` it was given, or None; a damaged one counts as none."""
        data = _read_json(self._record_path(kind, name))
        readable = data and data.get("name") == name and isinstance(data.get("time"), (int, float))
        return data if readable else None

    def _temporary_folder(self) -> Path:
        """A new folder under ``tmp`` whose name tells the process that owns it."""
        return Path(tempfile.mkdtemp(prefix=f"{_host()}--{os.getpid()}--", dir=self.root / "tmp"))

    def _record_path(self, kind: str, name: str) -> Path:
        return self._hub / "records" / kind / f"{_folder_name(name)}.json"

    def _build_folder(self, repo_id: str, commit: str, variant: str) -> Path:
        return self._hub / "builds" / _folder_name(repo_id) / commit / variant

    def _prepare(self) -> None:
        """Make the store's own folders, private to the user."""
        try:
            for name in ("", "tmp", "locks"):
                _make_folder(self.root / name, self.root)
            stamp = self.root / "store.json"
            written = _read_json(stamp)
            if written is None:
                _write_json(stamp, {"schema": SCHEMA})
        except OSError as error:
            raise CacheError(self.root, f"cannot be used ({error.strerror or error})") from error
        if written is not None and written.get("schema") != SCHEMA:
            raise CacheError(self.root, f"was written by another layout (schema {written.get('schema')!r})")

    def _sweep(self) -> None:
        """Remove what dead processes left in ``tmp``."""
        for path in (self.root / "tmp").iterdir():
            with contextlib.suppress(OSError):
                if _is_abandoned(path):
                    _remove(path)


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


def _stored_build(folder: Path) -> StoredBuild | None:
    """The build in a folder of the store; None without a readable manifest."""
    data = _read_json(folder / MANIFEST)
    try:
        return StoredBuild(folder, Manifest.from_dict(data)) if data else None
    except (KeyError, TypeError):
        return None


def _is_abandoned(path: Path) -> bool:
    """Older than a day, or owned by a process of this host that is gone."""
    host, _, rest = path.name.partition("--")
    pid = rest.partition("--")[0]
    old = time.time() - path.stat().st_mtime > _STALE_SECONDS
    return old or (host == _host() and pid.isdecimal() and len(pid) < 10 and not _is_alive(int(pid)))


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", platform.node()).strip("-") or "host"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _hub_name(endpoint: str) -> str:
    """A folder name for an endpoint: readable, and unique through a hash of the whole address."""
    readable = re.sub(r"[^A-Za-z0-9.-]+", "_", endpoint.partition("://")[2])[:60]
    return f"{readable}-{hashlib.sha256(endpoint.encode()).hexdigest()[:8]}"


def _folder_name(name: str) -> str:
    return name.replace("/", "--")


def _make_folder(path: Path, root: Path) -> None:
    """Create ``path`` and its parents up to ``root`` with mode 0700."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists() and _is_inside(folder, root)]
    root.parent.mkdir(parents=True, exist_ok=True)
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    if not path.is_dir():
        raise NotADirectoryError(20, "not a folder", str(path))


def _is_inside(path: Path, root: Path) -> bool:
    return path == root or root in path.parents


def _read_json(path: Path) -> dict[str, Any] | None:
    """A JSON object, or None when it is absent, unreadable or damaged."""
    try:
        data = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Replace a file as a whole: readers see the old content or the new one, also after a crash."""
    handle, temporary = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(data, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _sync_folder(path: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system lets a folder be opened for this
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _remove(folder: Path) -> None:
    """Delete a folder with all that is in it, as far as that is allowed."""
    if sys.version_info >= (3, 12):
        shutil.rmtree(folder, onexc=_force_remove)
    else:
        shutil.rmtree(folder, onerror=_force_remove)


def _force_remove(function: Any, path: str, _: Any) -> None:
    """Delete what has no write permission (stored files are 0444, folders may be 0500); absent is fine."""
    with contextlib.suppress(OSError):
        Path(path).parent.chmod(0o700)
        function(path)
