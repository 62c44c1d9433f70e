"""Hugging Face cache: builds that other programs have downloaded, as a source of bytes.

::

    <cache>/kernels--<org>--<repo>/refs/<branch>                              a commit
    <cache>/kernels--<org>--<repo>/snapshots/<commit>/build/<variant>/...     links into blobs/, or files
    <cache>/models--<org>--<repo>/...                                         the same, for older repositories

Nothing is used in place, and nothing is believed: the bytes go through the same checks as a download (the Hub's
listing when it is known, else the digest in the build's own metadata) into the store. Links are resolved once and may
not lead out of the cache (S-13). A snapshot may be partial: a build counts when the files of its digest are there.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kernelhub import setting
from kernelhub.buildpath import METADATA, SIGNATURE, is_bytecode
from kernelhub.durable import is_inside, open_regular
from kernelhub.errors import InvalidMetadata, NotCached
from kernelhub.index import Builds, ContentHash, Index, ListedFile, Refs
from kernelhub.metadata import MAX_BYTES, Metadata
from kernelhub.verify import hash_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernelhub.reporter import Reporter

_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
_CHUNK = 1 << 20
_REF_BYTES = 100


class _Copy(NamedTuple):
    """A repository in a cache: the cache, the repository's folder in it, and the repository's type on the Hub."""

    cache: Path
    folder: Path
    repo_type: str


class CachedIndex:
    """What is in the Hugging Face caches of this machine, as an Index; opens no socket and trusts nobody.

    Args:
        folders: the caches; default ``KERNELS_CACHE`` and ``HF_HUB_CACHE`` or ``hub`` under HF_HOME.
        reporter: is told when a cache is left alone because others can write into it.
        shared: use caches that others can write into.
    """

    def __init__(self, reporter: Reporter, folders: list[Path] | None = None, *, shared: bool = False) -> None:
        self._folders = setting.hf_caches() if folders is None else folders
        self.name = " and ".join(str(folder) for folder in self._folders)
        self._reporter = reporter
        self._shared = shared
        self._refused: set[Path] = set()

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts: a cache does not know."""
        return None

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs: the branches that somebody has downloaded from, and the versions that builds say they are.

        The peer asks for a version's commit and downloads that, so the cache does not hold which branch it was.
        """
        for copy in self._copies(repo_id):
            branches = _read_versions(copy) | dict(_read_refs(copy.folder / "refs"))
            if branches:
                return Refs(branches, repo_type=copy.repo_type)
        raise self._not_cached(f"kernel {repo_id}", repo_id)

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit: a short commit that only one snapshot begins with."""
        names = {path.name for copy in self._copies(repo_id) for path in (copy.folder / "snapshots").glob("*")}
        found = [name for name in names if _COMMIT.fullmatch(name) and name.startswith(revision)]
        if len(found) == 1:
            return found[0]
        raise self._not_cached(f"revision {revision} of kernel {repo_id}", f"{repo_id}@{revision}")

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds: those that are complete; their files are listed on demand."""
        found: dict[str, None] = {}
        for copy in self._copies(repo_id):
            folder = copy.folder / "snapshots" / commit / "build"
            for path in sorted(folder.glob("*")):
                if _is_complete(copy.cache, path):
                    found[path.name] = None
        if not found:
            raise self._not_cached(f"commit {commit} of kernel {repo_id}", f"{repo_id}@{commit}")
        return found

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files: what is there; the digest in the build's metadata then says whether that is all."""
        for copy in self._copies(repo_id):
            folder = copy.folder / "snapshots" / commit / "build" / build
            if _is_complete(copy.cache, folder):
                return tuple(_list(copy.cache, folder, path) for path in sorted(_paths(folder)))
        raise self._not_cached(f"build {build} of kernel {repo_id} at {commit}", f"{repo_id}@{commit}")

    @contextlib.contextmanager
    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See Index.stream."""
        target = self._find(repo_id, commit, path)
        if target is None or (expected is not None and target.stat().st_size != expected.size):
            raise self._not_cached(f"file {path} of kernel {repo_id} at {commit}", f"{repo_id}@{commit}")
        with open_regular(target) as file:
            file.seek(offset)
            yield iter(lambda: file.read(_CHUNK), b"")

    def _find(self, repo_id: str, commit: str, path: str) -> Path | None:
        """The file itself, wherever its link leads inside the cache."""
        for copy in self._copies(repo_id):
            with contextlib.suppress(OSError):
                return _resolved(copy.cache, copy.folder / "snapshots" / commit / path)
        return None

    def _copies(self, repo_id: str) -> Iterator[_Copy]:
        for cache in self._folders:
            for repo_type in ("kernel", "model"):
                folder = cache / f"{repo_type}s--{repo_id.replace('/', '--')}"
                if folder.is_dir() and self._is_ours(cache, folder):
                    yield _Copy(cache, folder, repo_type)

    def _is_ours(self, cache: Path, folder: Path) -> bool:
        """A cache that strangers can write into proves nothing, as nothing but itself vouches for its files (S-19)."""
        if self._shared or not hasattr(os, "geteuid"):
            return True
        for path in (cache, folder):
            status = path.stat()
            if status.st_uid not in (os.geteuid(), 0) or status.st_mode & stat.S_IWOTH:
                if folder not in self._refused:
                    self._refused.add(folder)
                    how = "set KERNELHUB_SHARED_CACHE=1 to use it all the same"
                    self._reporter.warn(f"{folder} is left alone: others can write into {path} ({how})")
                return False
        return True

    def _not_cached(self, what: str, request: str) -> NotCached:
        return NotCached(what, Path(self.name), f"kernelhub prefetch '{request}'")


class ReusingIndex:
    """A Hub whose files are taken from the Hugging Face cache where it has them, once each.

    Who reads a file compares it with the listing, and asks again when it differs: then it comes from the Hub.
    """

    def __init__(self, cached: CachedIndex, name: str, connect: Callable[[], Index]) -> None:
        self.name = name
        self._cached = cached
        self._connect = connect
        self._given: set[tuple[str, str, str]] = set()

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts."""
        return self._hub.trusts(publisher)

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs."""
        return self._hub.refs(repo_id, refresh=refresh)

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit."""
        return self._hub.commit(repo_id, revision)

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds."""
        return self._hub.builds(repo_id, commit)

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        return self._hub.files(repo_id, commit, build)

    @contextlib.contextmanager
    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See Index.stream."""
        key = (repo_id, commit, path)
        with contextlib.ExitStack() as stack:
            chunks = None
            if key not in self._given:
                self._given.add(key)
                with contextlib.suppress(NotCached, OSError):
                    chunks = stack.enter_context(self._cached.stream(repo_id, commit, path, offset, expected=expected))
            yield chunks or stack.enter_context(self._hub.stream(repo_id, commit, path, offset, expected=expected))

    @property
    def _hub(self) -> Index:
        return self._connect()


def _read_refs(folder: Path) -> Iterator[tuple[str, str]]:
    for path in sorted(folder.glob("*")):
        with contextlib.suppress(OSError), open_regular(path) as file:
            commit = file.read(_REF_BYTES).decode("ascii", "replace").strip()
            if _COMMIT.fullmatch(commit):
                yield path.name, commit


def _read_versions(copy: _Copy) -> dict[str, str]:
    """Branches by what the metadata of complete builds says; the snapshot that came last speaks for its version."""
    found: dict[str, str] = {}
    snapshots = [path for path in (copy.folder / "snapshots").glob("*") if _COMMIT.fullmatch(path.name)]
    for snapshot in sorted(snapshots, key=lambda path: path.stat().st_mtime):
        for build in snapshot.glob("build/*"):
            if (build / METADATA).exists() and _is_complete(copy.cache, build):
                version = _metadata(copy.cache, build).version
                if version is not None:
                    found[f"v{version}"] = snapshot.name
    return found


def _resolved(cache: Path, path: Path) -> Path:
    """Where a link in a cache leads.

    Raises:
        FileNotFoundError: nowhere, or out of the cache.
    """
    target = Path(os.path.realpath(path, strict=True))
    if not is_inside(target, Path(os.path.realpath(cache))):
        raise FileNotFoundError(2, "leads out of the cache", str(path))
    return target


def _paths(folder: Path) -> Iterator[str]:
    """Files below a folder, links to files included, without the bytecode that importing in place leaves behind."""
    for parent, _, names in os.walk(folder):
        for name in names:
            path = (Path(parent) / name).relative_to(folder).as_posix()
            if not is_bytecode(path):
                yield path


def _is_complete(cache: Path, folder: Path) -> bool:
    """Are all files there that the digest of a build lists, or, without a digest, is it a package at all?"""
    try:
        present = {path for path in _paths(folder) if _resolved(cache, folder / path).is_file()}
        metadata = _metadata(cache, folder) if METADATA in present else None
    except (OSError, InvalidMetadata):
        return False
    if metadata is None or metadata.digest is None:
        return any(path.count("/") <= 1 and path.endswith("__init__.py") for path in present)
    return present - {METADATA, SIGNATURE} >= set(metadata.digest.files)


def _metadata(cache: Path, folder: Path) -> Metadata:
    with open_regular(_resolved(cache, folder / METADATA)) as file:
        return Metadata.parse(file.read(MAX_BYTES + 1), str(folder / METADATA))


def _list(cache: Path, folder: Path, path: str) -> ListedFile:
    """A file as the Hub would list it: the name of its blob is the hash that the Hub promised, else its own hash."""
    target = _resolved(cache, folder / path)
    size, blob = target.stat().st_size, target.name
    if target.parent.name == "blobs" and _BLOB.fullmatch(blob):
        return ListedFile(path, size, ContentHash("git" if len(blob) == 40 else "sha256", blob))
    return ListedFile(path, size, ContentHash("sha256", hash_file(target)))
