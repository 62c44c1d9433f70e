"""Store: the folder of verified builds and remembered answers.

Layout, one subtree per Hub so that no endpoint can answer for another::

    <root>/store.json                                            schema of this layout, and who wrote it
    <root>/hubs/<hub>/builds/<org>--<repo>/<commit>/<variant>/   manifest.json  receipt.json  files/...
    <root>/hubs/<hub>/records/...json                            answers of the Hub, with the time they were given
    <root>/locks/                                                one lock file a build; they only save work
    <root>/tmp/                                                  what is being written, named after its process

A build appears under its final name by one rename and never changes afterwards, so readers need no lock. Who loads a
build keeps its manifest open under a shared lock (a lease), which costs no write; nothing leased is ever pruned. The
time stamp of the manifest is the last use, to the day.

A store is private unless it is declared shared (``KERNELHUB_SHARED_CACHE=1``): then folders and locks are writable for
whom the umask lets, and each load hashes all files again, as others may have changed them.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import secrets
import shutil
import stat
import time
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelhub import __version__, lease, setting
from kernelhub.durable import (
    PRIVATE_FILE,
    PRIVATE_FOLDER,
    SHARED_FILE,
    SHARED_FOLDER,
    make_folder,
    open_regular,
    read_json,
    remove,
    sweep,
    sync_file,
    sync_folder,
    temporary_name,
    write_json,
)
from kernelhub.errors import CacheError, CacheFullError, LockTimeout
from kernelhub.manifest import (
    FILES,
    MANIFEST,
    RECEIPT,
    SCHEMA,
    FileStat,
    Manifest,
    StoredBuild,
    StoredFile,
    read_build,
)
from kernelhub.mutex import FoundLock, break_locks, held
from kernelhub.parallel import begin, run_all
from kernelhub.reporter import Reporter

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "FILES",
    "MANIFEST",
    "RECEIPT",
    "FileStat",
    "Manifest",
    "Store",
    "StoredBuild",
    "StoredFile",
    "open_regular",
]

_LOCK_SECONDS = 600.0
_ASK_SECONDS = 10.0
_DAY = 24 * 3600
_SYNCS = 8  # at once
_MARGIN = 1 << 20  # bytes kept free beside what a download needs
_LONGEST_NAME = 180
_UNREADABLE = re.compile(r"[^A-Za-z0-9.-]+")


class Store:
    """A store folder seen for one Hub endpoint.

    Args:
        root: the folder; default ``KERNELHUB_CACHE``, ``KERNELS_CACHE`` or ``kernelhub`` under HF_HOME.
        endpoint: the Hub; default ``HF_ENDPOINT`` or the public Hub.
        shared: others may write into the folder; None follows ``KERNELHUB_SHARED_CACHE``.
        reporter: is told whom a lock is waited for, and what is damaged.

    Raises:
        CacheError: the folder is not usable (a file, not ours, or written by a newer kernelhub).
    """

    def __init__(
        self,
        root: Path | None = None,
        endpoint: str | None = None,
        *,
        shared: bool | None = None,
        reporter: Reporter | None = None,
    ) -> None:
        self.root = setting.usable_path(root or setting.store_folder())
        self.endpoint = endpoint.rstrip("/") if endpoint else setting.endpoint()
        self.shared = setting.flag("KERNELHUB_SHARED_CACHE") if shared is None else shared
        self._reporter = reporter or Reporter()
        self._hub = self.root / "hubs" / _hub_name(self.endpoint)
        self._file_mode = SHARED_FILE if self.shared else PRIVATE_FILE
        self._folder_mode = SHARED_FOLDER if self.shared else PRIVATE_FOLDER
        self._tmp, self._locks = self.root / "tmp", self.root / "locks"
        self._is_checked = False
        self._prepared: tuple[int, int] | None = None
        self._damaged: set[Path] = set()

    def find(self, repo_id: str, commit: str, variant: str) -> StoredBuild | None:
        """The stored build, or None; incomplete builds are never visible."""
        self._check_root()
        return self._read_build(self._build_folder(repo_id, commit, variant))

    def builds(self, *, all_hubs: bool = False) -> Iterator[StoredBuild]:
        """Every complete build of this Hub, or of all, in a stable order."""
        self._check_root()
        hub = self.root / "hubs" / "*" if all_hubs else self._hub
        pattern = str((hub / "builds" / "*" / "*" / "*" / MANIFEST).relative_to(self.root))
        found = (self._read_build(path.parent) for path in sorted(self.root.glob(pattern)))
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
            remove(path)

    def publish(self, staged: Path, manifest: Manifest) -> StoredBuild:
        """Have a staged build on the disk, then make it visible by one rename.

        If another process was first, its build is the one returned. A folder that is in the way and is no build (its
        manifest was lost) is removed.
        """
        final = self._build_folder(manifest.repo_id, manifest.commit, manifest.variant)
        make_folder(final.parent, self.root, self._folder_mode)
        facts = {**manifest.to_dict(), "id": secrets.token_hex(8)}
        write_json(staged / MANIFEST, facts, staged, self._file_mode, durable=False)
        mode = stat.S_IMODE(final.parent.stat().st_mode)  # what the umask left, in a shared store
        syncs = []
        for name, _, files in os.walk(staged):
            folder = Path(name)
            folder.chmod(mode)
            syncs += [partial(sync_folder, folder), *(partial(sync_file, folder / file) for file in files)]
        run_all(syncs, _SYNCS)  # at once: the disk writes them down together
        try:
            staged.rename(final)
        except OSError:
            if self._read_build(final) is None:
                self._bury(final)
                make_folder(final.parent, self.root, self._folder_mode)  # somebody may have tidied it away
                staged.rename(final)
        begin(partial(sync_folder, final.parent))  # a build whose name a power cut takes away is fetched again
        stored = self._read_build(final)
        if stored is None:
            raise CacheError(self.root, f"build {final.relative_to(self.root)} was removed while it was stored")
        return stored

    def lease(self, build: StoredBuild) -> bool:
        """Keep a build from being pruned while this process lives; False when it is being removed just now.

        Writes nothing but, once a day and where that is allowed, the time of last use.

        Raises:
            CacheError: somebody else could have written into its folders (S-18).
        """
        self._check_owner(build.folder)
        path = build.folder / MANIFEST
        try:
            if not lease.take(path):
                return False
            is_old = abs(time.time() - path.stat().st_mtime) > _DAY
            if is_old and build.scratch is not None and os.access(path, os.W_OK):
                os.utime(path)
        except FileNotFoundError:
            return False
        except OSError:
            return True  # no lease is to be had here; pruning keeps what it cannot be sure of
        return True

    def is_leased(self, build: StoredBuild) -> bool:
        """Does any process use this build? Where the file system cannot tell, the answer is yes."""
        with lease.unleased(build.folder / MANIFEST) as free:
            return not free

    def discard(self, build: StoredBuild) -> None:
        """Take a damaged build out of sight by one rename, then delete it; its successor is left alone.

        Raises:
            CacheError: this store cannot be written.
        """
        self._prepare()
        if build.is_current or read_json(build.folder / MANIFEST) is None:
            self._remove_build(build.folder)

    def remove(self, build: StoredBuild) -> bool:
        """Remove a build unless a process uses it; False when one does.

        Raises:
            CacheError: this store cannot be written.
        """
        self._prepare()
        with lease.unleased(build.folder / MANIFEST) as free:
            if free and build.is_current:
                self._remove_build(build.folder)
        return free

    def _remove_build(self, folder: Path) -> None:
        try:
            self._bury(folder)
        except OSError as error:
            problem = f"build {folder.relative_to(self.root)} cannot be removed"
            raise CacheError(self.root, f"{problem} ({error.strerror})") from error
        for parent in folder.parents[:2]:  # commit and repository, when this was the last build
            with contextlib.suppress(OSError):
                parent.rmdir()

    def _bury(self, folder: Path) -> None:
        grave = self._temporary_folder()
        try:
            with contextlib.suppress(FileNotFoundError):
                folder.rename(grave / "build")
        finally:
            remove(grave)

    @contextlib.contextmanager
    def lock(self, repo_id: str, commit: str, variant: str) -> Iterator[None]:
        """Serialise downloads of one build among processes of this machine; it only saves work.

        Raises:
            LockTimeout: held by another process for too long (``KERNELHUB_LOCK_TIMEOUT`` seconds, default 600).
            CacheError: the lock file cannot be written.
        """
        self._prepare()
        timeout = setting.seconds("KERNELHUB_LOCK_TIMEOUT", _LOCK_SECONDS)
        with self._held(f"{_folder_name(repo_id)}--{commit[:12]}--{variant}", timeout):
            self.sweep()
            yield

    @contextlib.contextmanager
    def asking(self, name: str) -> Iterator[None]:
        """Serialise questions about one thing, so that the others find the answer recorded.

        It is only kind to the Hub: who waits long, or cannot write here, asks all the same.
        """
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(CacheError, LockTimeout):
                self._prepare()
                stack.enter_context(self._held(f"ask--{_folder_name(name)}", _ASK_SECONDS))
                self.sweep()
            yield

    @contextlib.contextmanager
    def _held(self, name: str, timeout: float) -> Iterator[None]:
        path = self._locks / f"{_short(name)}.lock"
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(held(path, timeout, self._reporter, self._file_mode))
            except LockTimeout:
                raise
            except OSError as error:
                raise self.unwritable(error) from error
            yield

    def check_space(self, size: int) -> None:
        """Refuse a download that does not fit.

        Raises:
            CacheFullError: with the folder, the bytes needed and the bytes free.
        """
        self._prepare()
        try:
            free = shutil.disk_usage(self.root).free
        except OSError as error:
            raise self.unwritable(error) from error
        if free < size + _MARGIN:
            raise CacheFullError(self.root, "disk full", size + _MARGIN, free)

    def unwritable(self, error: OSError, needed: int = 0) -> CacheError:
        """What to raise for an error of the system while the store was written."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return CacheFullError(self.root, "disk full", needed, shutil.disk_usage(self.root).free)
        where = f" at {error.filename}" if error.filename else ""
        return CacheError(self.root, f"cannot be written ({error.strerror or error}{where})")

    def record(self, kind: str, name: str, facts: Mapping[str, Any], *, durable: bool = False) -> None:
        """Remember an answer of the Hub; a store that cannot be written remembers nothing.

        What cannot be asked again has to be ``durable``: it is on the disk when this returns.
        """
        with contextlib.suppress(OSError, CacheError):
            self._prepare()
            path = self._record_path(kind, name)
            make_folder(path.parent, self.root, self._folder_mode)
            answer = {"schema": SCHEMA, "name": name, "time": time.time(), **facts}
            write_json(path, answer, self._tmp, self._file_mode, durable=durable)

    def recorded(self, kind: str, name: str) -> dict[str, Any] | None:
        """A remembered answer, with the ``time`` it was given, or None; a damaged one counts as none, and is told."""
        self._check_root()
        path = self._record_path(kind, name)
        data = read_json(path)
        if data is not None and data.get("name") == name and isinstance(data.get("time"), (int, float)):
            return data
        if (data is None or "name" not in data) and path not in self._damaged and os.access(path, os.F_OK):
            self._damaged.add(path)
            self._reporter.warn(f"what the store remembers of {name} is damaged ({path}): it counts as forgotten")
        return None

    def break_locks(self, *, dry_run: bool = False) -> list[FoundLock]:
        """Take away locks that are files, left by processes of other machines; see ``mutex.break_locks``."""
        self._prepare()
        try:
            return break_locks(self._locks, dry_run=dry_run)
        except OSError as error:
            raise self.unwritable(error) from error

    def sweep(self) -> None:
        """Remove what dead processes left in ``tmp``."""
        sweep(self._tmp)

    def _read_build(self, folder: Path) -> StoredBuild | None:
        return read_build(folder, self._scratch, always_hash=self.shared)

    @cached_property
    def _scratch(self) -> Path | None:
        """Where small files are written before they take their place; None in a layout that is only read."""
        schema = (read_json(self.root / "store.json") or {}).get("schema", SCHEMA)
        return self._tmp if schema == SCHEMA else None

    def _temporary_folder(self) -> Path:
        """A new folder under ``tmp`` whose name tells the process that owns it."""
        path = self._tmp / temporary_name()
        path.mkdir(mode=PRIVATE_FOLDER)
        return path

    def _record_path(self, kind: str, name: str) -> Path:
        return self._hub / "records" / kind / f"{_short(_folder_name(name))}.json"

    def _build_folder(self, repo_id: str, commit: str, variant: str) -> Path:
        return self._hub / "builds" / _folder_name(repo_id) / commit / variant

    def _prepare(self) -> None:
        """Make the store's own folders, private to the user unless the store is shared."""
        self._check_root()
        stamp = self.root / "store.json"
        if self._is_prepared(stamp):
            return
        try:
            for folder in (self.root, self._tmp, self._locks):
                make_folder(folder, self.root, self._folder_mode)
            written = read_json(stamp)
            if written is None:
                facts = {"schema": SCHEMA, "written_by": f"kernelhub {__version__}"}
                write_json(stamp, facts, self._tmp, self._file_mode)
        except OSError as error:
            raise CacheError(self.root, f"cannot be used ({error.strerror or error})") from error
        if written is not None and written.get("schema") != SCHEMA:
            author = str(written.get("written_by", "an unknown version"))[:60]
            layout = f"another layout (schema {written.get('schema')!r}, by {ascii(author)[1:-1]})"
            raise CacheError(self.root, f"was written by {layout}; it is read, and not written")
        self._prepared = _identity(stamp)

    def _is_prepared(self, stamp: Path) -> bool:
        """Are the folders that were made still there? What cannot be looked at is not, and making it tells why."""
        with contextlib.suppress(OSError):
            same = self._prepared is not None and self._prepared == _identity(stamp)
            return same and self._tmp.is_dir() and self._locks.is_dir()
        return False

    def _check_root(self) -> None:
        """Once a store: nobody else can write its answers."""
        if not self._is_checked:
            self._check_owner(self.root)
            self._is_checked = True

    def _check_owner(self, folder: Path) -> None:
        """Refuse folders, from ``folder`` up to the root, into which others could put code or answers (S-18)."""
        if self.shared or not hasattr(os, "geteuid"):
            return
        for path in (folder, *folder.parents):
            if path == self.root.parent:
                break
            try:
                status = path.stat()
            except OSError:  # what is wrong with it is told when it is used
                continue
            problem = _foreign(status, path)
            if problem:
                share = "or set KERNELHUB_SHARED_CACHE=1 (each load then hashes all files again)"
                raise CacheError(self.root, f"{problem}, {share}")


def _identity(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced; None when it is absent or cannot be asked about."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _foreign(status: os.stat_result, path: Path) -> str:
    """Who else could write into a folder, and the command that changes that; empty when nobody could."""
    if status.st_uid not in (os.geteuid(), 0):
        return f"{path} belongs to user {status.st_uid}. Run `chown -R {os.geteuid()} '{path}'`"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"{path} is writable for others. Run `chmod -R go-w '{path}'`"
    return ""


def _hub_name(endpoint: str) -> str:
    """A folder name for an endpoint: readable, and unique through a hash of the whole address."""
    readable = _UNREADABLE.sub("_", endpoint.partition("://")[2])[:60]
    return f"{readable}-{hashlib.sha256(endpoint.encode()).hexdigest()[:8]}"


def _folder_name(name: str) -> str:
    return name.replace("/", "--")


def _short(name: str) -> str:
    """A file name that fits every file system: the end of a long one is replaced by a hash of the whole."""
    data = os.fsencode(name)
    if len(data) <= _LONGEST_NAME:
        return name
    return f"{data[: _LONGEST_NAME - 33].decode(errors='replace')}-{hashlib.sha256(data).hexdigest()[:32]}"
