"""Fetch: bring one resolved build into the store, once per machine, hashed while it arrives.

Plan first (sizes, space), then bodies into a private folder, each against its promised hash and size, then the
digest of the build's own metadata, then one rename. Whatever goes wrong, nothing half-done is visible.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, BinaryIO

from kernelhub.buildpath import METADATA
from kernelhub.errors import HubUnavailable, IncompleteDownload, KernelHubError
from kernelhub.store import FILES, Manifest, StoredBuild, StoredFile
from kernelhub.verify import check_digest

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.index import Index, ListedFile
    from kernelhub.reporter import Reporter
    from kernelhub.resolution import Resolution
    from kernelhub.store import Store

MAX_BUILD_BYTES = 16 << 30
_ATTEMPTS = 3
_PARALLEL = 8
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
            check_digest(resolution, staged / FILES, files)
            manifest = Manifest(resolution.name, resolution.commit, resolution.variant, resolution.endpoint, files)
            stored = store.publish(staged, manifest)
        except OSError as error:
            if isinstance(error, KernelHubError):
                raise
            raise store.unwritable(error, resolution.size) from error
    reporter.download_finished(resolution.build)
    return stored


def _download_files(resolution: Resolution, index: Index, folder: Path, reporter: Reporter) -> tuple[StoredFile, ...]:
    """All bodies, several at a time; the first failure stops the rest."""
    folder.mkdir(mode=0o700)
    for listed in resolution.files:
        (folder / listed.path).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    stop = threading.Event()
    pool = ThreadPoolExecutor(_PARALLEL, thread_name_prefix="kernelhub-fetch")
    futures = [
        pool.submit(_download_file, resolution, listed, index, folder / listed.path, reporter, stop)
        for listed in resolution.files
    ]
    try:
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        for future in done:
            future.result()
        return tuple(future.result() for future in futures)
    finally:
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
        wait([future for future in futures if not future.cancelled()], _PATIENCE)


def _download_file(
    resolution: Resolution, listed: ListedFile, index: Index, target: Path, reporter: Reporter, stop: threading.Event
) -> StoredFile:
    """One body; an interrupted one goes on where it stopped, a wrong one is fetched once more from its start."""
    with target.open("w+b") as file:
        body = _Body(resolution, listed, file, reporter, stop)
        if listed.path == METADATA and resolution.metadata_bytes is not None:
            body.append(resolution.metadata_bytes)  # resolution has read it already
        else:
            _receive(body, index)
        file.flush()
        os.fsync(file.fileno())
    target.chmod(0o444)
    return StoredFile(listed.path, listed.size, body.sha256)


def _receive(body: _Body, index: Index) -> None:
    failure: HubUnavailable | None = None
    for _ in range(_ATTEMPTS):
        try:
            body.receive(index)
        except HubUnavailable as error:
            failure = error
        problem = body.problem()
        if problem is None:
            return
    if failure is not None and body.size == 0:
        raise failure
    raise IncompleteDownload(body.repo_id, body.path, f"{problem} ({_ATTEMPTS} attempts)") from failure


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
        with index.stream(self.repo_id, self._commit, self.path, self.size) as chunks:
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
        self._file.write(chunk)
        self._hasher.update(chunk)
        self._reporter.download_advanced(self._build, len(chunk))

    def _restart(self) -> None:
        self._reporter.download_advanced(self._build, -self.size)
        self._file.seek(0)
        self._file.truncate()
        self._hasher = self._listed.hasher()
