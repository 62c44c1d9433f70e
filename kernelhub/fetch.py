"""Fetch: bring one resolved build into the store, once per machine, hashed while it arrives.

Plan first (sizes, space), then bodies into a private folder, each against its promised hash and size, then the
digest of the build's own metadata, then one rename. Whatever goes wrong, nothing half-done is visible.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from kernelhub.buildpath import METADATA
from kernelhub.errors import IncompleteDownload, KernelHubError
from kernelhub.index import split_path
from kernelhub.metadata import Metadata
from kernelhub.parallel import begin, run_all
from kernelhub.recorded import RecordedIndex
from kernelhub.request import KernelRequest
from kernelhub.resolution import Resolution, checked_files
from kernelhub.store import FILES, Manifest, StoredBuild, StoredFile
from kernelhub.verify import check_digest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from concurrent.futures import Future
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kernelhub.index import Builds, Index, ListedFile, Refs
    from kernelhub.reporter import Reporter
    from kernelhub.store import Store

MAX_BUILD_BYTES = 16 << 30
_ROUNDS = 2  # a body that arrives whole but wrong is fetched once more
_PARALLEL = 8
_SMALL_BUILD = 1 << 20  # bytes; asking for less than that costs more than getting it
_SYNC_EVERY = 16 << 20
_PATIENCE = 1.0  # seconds that a failed or interrupted download waits for the other bodies to stop


def fetch(resolution: Resolution, index: Index, store: Store, reporter: Reporter) -> StoredBuild:
    """The stored build of ``resolution``, downloaded if the store does not have it yet.

    Raises:
        NotCached: the index is offline and the build is not in the store.
        CacheError, CacheFullError, LockTimeout: the store cannot take it.
        IncompleteDownload, HubUnavailable: the bytes did not arrive as announced; nothing is kept.
        DigestMismatch: the files are not those that the build's own metadata lists; nothing is kept.
    """
    key = (resolution.name, resolution.commit, resolution.variant)
    stored = store.find(*key)
    if stored is not None:
        return stored
    _refuse_oversized(resolution)
    store.check_space(resolution.size)
    with store.lock(*key):
        return store.find(*key) or _download(resolution, index, store, reporter)


def _refuse_oversized(resolution: Resolution) -> None:
    if resolution.size > MAX_BUILD_BYTES:
        problem = f"the build has {resolution.size} bytes, more than {MAX_BUILD_BYTES}"
        raise IncompleteDownload(resolution.name, resolution.variant, problem)


def _download(resolution: Resolution, index: Index, store: Store, reporter: Reporter) -> StoredBuild:
    reporter.download_started(resolution.build, len(resolution.files), resolution.size)
    with store.staging() as staged:
        try:
            files = _download_files(resolution, index, staged / FILES, reporter)
            check_digest(_with_metadata(resolution, staged / FILES), staged / FILES, files)
            manifest = Manifest(resolution.name, resolution.commit, resolution.variant, resolution.endpoint, files)
            stored = store.publish(staged, manifest)
        except OSError as error:
            if isinstance(error, KernelHubError):
                raise
            raise store.unwritable(error, resolution.size) from error
    reporter.download_finished(resolution.build)
    return stored


def _with_metadata(resolution: Resolution, folder: Path) -> Resolution:
    """The same resolution with the metadata that has just arrived, where it was not read before."""
    if resolution.metadata is not None or not any(file.path == METADATA for file in resolution.files):
        return resolution
    metadata = Metadata.parse((folder / METADATA).read_bytes(), resolution.kernel)
    return replace(resolution, metadata=metadata)


def _download_files(resolution: Resolution, index: Index, folder: Path, reporter: Reporter) -> tuple[StoredFile, ...]:
    """All bodies, several at a time; the first failure stops the rest."""
    folder.mkdir(mode=0o700)
    for listed in resolution.files:
        (folder / listed.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    stop = threading.Event()
    jobs = [
        partial(_download_file, resolution, listed, index, folder / listed.path, reporter, stop)
        for listed in resolution.files
    ]
    return tuple(run_all(jobs, _PARALLEL, stop=stop, patience=_PATIENCE))


def _download_file(
    resolution: Resolution, listed: ListedFile, index: Index, target: Path, reporter: Reporter, stop: threading.Event
) -> StoredFile:
    """One body; an interrupted one goes on where it stopped, a wrong one is fetched once more from its start."""
    with target.open("w+b", buffering=0) as file:  # chunks are large: a buffer would only copy them once more
        body = _Body(resolution, listed, file, reporter, stop)
        if listed.path == METADATA and resolution.metadata_bytes is not None:
            body.append(resolution.metadata_bytes)  # resolution has read it already
        else:
            _receive(body, index)
        body.settle()
    target.chmod(0o444)
    return StoredFile(listed.path, listed.size, body.sha256)


def _receive(body: _Body, index: Index) -> None:
    problem = None
    for _ in range(_ROUNDS):
        body.receive(index)
        problem = body.problem()
        if problem is None:
            return
    raise IncompleteDownload(body.repo_id, body.path, f"{problem} ({_ROUNDS} attempts)")


class FetchingIndex:
    """The index of a load: it does at once what a load would do one after the other, and nothing else.

    The branches of ``repo_id`` are asked for while its publisher is. A small build goes into the store whole when its
    metadata is asked for, which happens after its publisher, its name and its file names were found good. Its files
    come from ``source``, which need not remember what is stored anyway.
    """

    def __init__(self, repo_id: str, inner: Index, source: Index, store: Store, reporter: Reporter) -> None:
        self.name = inner.name
        self._repo_id = repo_id
        self._inner = inner
        self._source = source
        self._store = store
        self._reporter = reporter
        self._refs: Future[Refs] | None = None
        self._files: dict[tuple[str, str, str], tuple[ListedFile, ...]] = {}

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts."""
        unknown = self._store.recorded("publishers", publisher) is None
        if unknown and self._refs is None and self._repo_id.startswith(f"{publisher}/"):
            self._refs = begin(partial(self._inner.refs, self._repo_id))
        return self._inner.trusts(publisher)

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs."""
        if self._refs is not None and repo_id == self._repo_id and not refresh:
            return self._refs.result()
        return self._inner.refs(repo_id, refresh=refresh)

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit."""
        return self._inner.commit(repo_id, revision)

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds."""
        builds = self._inner.builds(repo_id, commit)
        self._files |= {(repo_id, commit, build): files for build, files in builds.items() if files is not None}
        return builds

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        files = self._files[repo_id, commit, build] = self._inner.files(repo_id, commit, build)
        return files

    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """See Index.stream."""
        build, below = split_path(path)
        files = checked_files(self._files.get((repo_id, commit, build), ()))
        if (
            below == METADATA
            and expected is not None
            and expected in files
            and sum(f.size for f in files) <= _SMALL_BUILD
        ):
            whole = Resolution(
                KernelRequest(repo_id),
                repo_id,
                commit,
                build,
                self.name,
                trust="checked before",
                files=files,
                metadata_bytes=RecordedIndex(self._store).body(f"{repo_id}@{commit}/{path}", expected),
            )
            fetch(whole, self._source, self._store, self._reporter)
        return self._inner.stream(repo_id, commit, path, offset, expected=expected)


def _sync_and_close(handle: int) -> None:
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class _Body:
    """A file and its hash, growing together."""

    def __init__(
        self, resolution: Resolution, listed: ListedFile, file: BinaryIO, reporter: Reporter, stop: threading.Event
    ) -> None:
        self.repo_id = resolution.name
        self.path = f"build/{resolution.variant}/{listed.path}"
        self._commit = resolution.commit
        self._build = resolution.build
        self._listed = listed
        self._file = file
        self._reporter = reporter
        self._stop = stop
        self._hasher = listed.hasher()
        self._unsynced = 0
        self._syncs: list[Future[None]] = []

    @property
    def size(self) -> int:
        return self._hasher.size

    @property
    def sha256(self) -> str:
        return self._hasher.sha256

    def problem(self) -> str | None:
        return self._hasher.problem()

    def receive(self, index: Index) -> None:
        """Append what the index has from here on; start over when what is here is complete but wrong."""
        if self.size >= self._listed.size:
            self._restart()
        with index.stream(self.repo_id, self._commit, self.path, self.size, expected=self._listed) as chunks:
            for chunk in chunks:
                self.append(chunk)

    def append(self, chunk: bytes) -> None:
        """Write a chunk; a body longer than announced stops at the announced size (S-35).

        Raises:
            IncompleteDownload: too long, or another file failed and nobody waits for this one any more.
        """
        if self._stop.is_set():
            raise IncompleteDownload(self.repo_id, self.path, "stopped")
        if self.size + len(chunk) > self._listed.size:
            raise IncompleteDownload(self.repo_id, self.path, f"longer than the announced {self._listed.size} bytes")
        rest = memoryview(chunk)
        while rest:
            rest = rest[self._file.write(rest) :]
        self._hasher.update(chunk)
        self._unsynced += len(chunk)
        if self._unsynced >= _SYNC_EVERY:
            self._unsynced = 0
            self._syncs.append(begin(partial(_sync_and_close, os.dup(self._file.fileno()))))
        self._advance(len(chunk))

    def settle(self) -> None:
        """Wait for the disk, where a large file is written while more of it arrives; the store syncs the rest."""
        for begun in self._syncs:
            begun.result()  # the system tells an error of the disk once only

    def _restart(self) -> None:
        self._advance(-self.size)
        self._file.seek(0)
        self._file.truncate()
        self._hasher = self._listed.hasher()

    def _advance(self, size: int) -> None:
        self._reporter.download_advanced(self._build, size)
        self._reporter.file_advanced(self._build, self._listed.path, size, self._listed.size)
