"""Recorded answers: the store as an Index, alone (offline) or in front of a Hub (remembering)."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kernelhub import setting
from kernelhub.errors import DigestMismatch, HubUnavailable, NotCached
from kernelhub.index import Builds, ContentHash, Index, ListedFile, Refs
from kernelhub.store import open_regular
from kernelhub.verify import hash_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernelhub.reporter import Reporter
    from kernelhub.store import Store, StoredBuild

FRESH_SECONDS = 3600.0
_CHUNK = 1 << 20


def fresh_seconds() -> float:
    """How long a remembered branch or publisher answer is used without asking (``KERNELHUB_FRESH_SECONDS``)."""
    return setting.seconds("KERNELHUB_FRESH_SECONDS", FRESH_SECONDS)


class RecordedIndex:
    """What earlier loads and prefetches left in the store; opens no socket."""

    def __init__(self, store: Store) -> None:
        self.name = f"{store.root} (offline)"
        self._store = store

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts: the decision that was recorded online."""
        trusted = (self._store.recorded("publishers", publisher) or {}).get("trusted")
        return trusted if isinstance(trusted, bool) else None

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs."""
        refs = _refs_of(self._store.recorded("repositories", repo_id))
        if refs is None:
            raise self._not_cached(f"kernel {repo_id}", repo_id)
        return refs

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit."""
        commit = _commit_of(self._store.recorded("revisions", f"{repo_id}@{revision}"))
        if commit is None:
            raise self._not_cached(f"revision {revision} of kernel {repo_id}", f"{repo_id}@{revision}")
        return commit

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds: the recorded listing, else the builds that are there."""
        builds = _builds_of(self._store.recorded("listings", f"{repo_id}@{commit}"))
        if builds is not None:
            return builds
        stored = {
            build.manifest.variant: None
            for build in self._store.builds()
            if (build.manifest.repo_id, build.manifest.commit) == (repo_id, commit)
        }
        if not stored:
            raise self._not_cached(f"commit {commit} of kernel {repo_id}", f"{repo_id}@{commit}")
        return stored

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        stored = self._store.find(repo_id, commit, build)
        if stored is None:
            raise self._not_cached(f"build {build} of kernel {repo_id} at {commit}", f"{repo_id}@{commit}")
        return tuple(
            ListedFile(file.path, file.size, ContentHash("sha256", file.sha256)) for file in stored.manifest.files
        )

    @contextlib.contextmanager
    def stream(self, repo_id: str, commit: str, path: str, offset: int = 0) -> Iterator[Iterator[bytes]]:
        """See Index.stream: the bytes of a stored file."""
        _, build, below = path.split("/", 2)
        stored = self._store.find(repo_id, commit, build)
        if stored is None:
            raise self._not_cached(f"build {build} of kernel {repo_id} at {commit}", f"{repo_id}@{commit}")
        try:
            file = open_regular(stored.files_folder / below)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
            raise DigestMismatch(f"{repo_id}@{commit[:12]} {build}", below, problem) from error
        with file:
            file.seek(offset)
            yield iter(lambda: file.read(_CHUNK), b"")

    def _not_cached(self, what: str, request: str) -> NotCached:
        return NotCached(what, self._store.root, f"kernelhub prefetch '{request}'")


class RememberingIndex:
    """A Hub whose answers are recorded, and not asked for again while they are fresh.

    What a commit contains never changes, so it is asked once. Branches and publishers are asked again after
    ``max_age`` seconds; ``connect`` is called when a request is really needed. When
    the Hub cannot be reached the older answer serves, with a warning that tells its age.
    """

    def __init__(self, store: Store, connect: Callable[[], Index], reporter: Reporter, max_age: float) -> None:
        self.name = store.endpoint
        self._store = store
        self._recorded = RecordedIndex(store)
        self._connect = connect
        self._reporter = reporter
        self._max_age = max_age
        self._asked: set[str] = set()

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts."""
        record = self._store.recorded("publishers", publisher)
        known = self._recorded.trusts(publisher)
        if known is not None and self._is_fresh(record):
            return known
        try:
            trusted = self._hub.trusts(publisher)
        except HubUnavailable as error:
            self._warn_stale(None if known is None else record, f"publisher {publisher}", error)
            return known
        self._store.record("publishers", publisher, {"trusted": trusted})
        return trusted

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs."""
        record = self._store.recorded("repositories", repo_id)
        known = _refs_of(record)
        enough = repo_id in self._asked if refresh else self._is_fresh(record)
        if known is not None and enough:
            return known
        try:
            refs = self._hub.refs(repo_id)
        except HubUnavailable as error:
            self._warn_stale(record if known else None, f"kernel {repo_id}", error)
            return self._recorded.refs(repo_id)
        self._report_moves(repo_id, known, refs)
        self._store.record("repositories", repo_id, asdict(refs))
        self._asked.add(repo_id)
        return refs

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit."""
        name = f"{repo_id}@{revision}"
        record = self._store.recorded("revisions", name)
        known = _commit_of(record)
        if known is not None and self._is_fresh(record):
            return known
        try:
            commit = self._hub.commit(repo_id, revision)
        except HubUnavailable as error:
            self._warn_stale(record if known else None, f"revision {revision} of kernel {repo_id}", error)
            return self._recorded.commit(repo_id, revision)
        self._store.record("revisions", name, {"commit": commit})
        return commit

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds."""
        name = f"{repo_id}@{commit}"
        known = _builds_of(self._store.recorded("listings", name))
        if known is not None:
            return known
        builds = self._hub.builds(repo_id, commit)
        self._store.record("listings", name, {"builds": builds})
        return builds

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        if self._store.find(repo_id, commit, build) is not None:
            return self._recorded.files(repo_id, commit, build)
        return self._hub.files(repo_id, commit, build)

    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0
    ) -> contextlib.AbstractContextManager[Iterator[bytes]]:
        """See Index.stream; a stored file that was damaged is asked for again."""
        _, build, below = path.split("/", 2)
        stored = self._store.find(repo_id, commit, build)
        return (self._recorded if stored and _is_intact(stored, below) else self._hub).stream(
            repo_id, commit, path, offset
        )

    @property
    def _hub(self) -> Index:
        return self._connect()

    def _is_fresh(self, record: dict[str, Any] | None) -> bool:
        return record is not None and 0 <= time.time() - record["time"] <= self._max_age

    def _warn_stale(self, record: dict[str, Any] | None, what: str, error: HubUnavailable) -> None:
        if record is None:
            raise error
        age = max(0.0, time.time() - record["time"])
        self._reporter.warn(f"{error}; using what the Hub said of {what} {age / 3600:.1f} hours ago")

    def _report_moves(self, repo_id: str, known: Refs | None, refs: Refs) -> None:
        """Tell about versions whose branch now points elsewhere (S-01); new commits are not yet downloaded here."""
        for branch, before in known.branches.items() if known else ():
            now = refs.branches.get(branch)
            if now is not None and now != before:
                self._reporter.warn(f"kernel {repo_id}: branch {branch} moved from {before[:12]} to {now[:12]}")


def _is_intact(stored: StoredBuild, path: str) -> bool:
    """Is this file of a stored build what was stored?"""
    expected = next((file.sha256 for file in stored.manifest.files if file.path == path), None)
    try:
        return hash_file(stored.files_folder / path) == expected
    except OSError:
        return False


def _commit_of(record: dict[str, Any] | None) -> str | None:
    """A recorded commit; None when there is none or it is damaged."""
    commit = record.get("commit") if record else None
    return commit if isinstance(commit, str) else None


def _refs_of(record: dict[str, Any] | None) -> Refs | None:
    """A recorded answer; None when there is none or it is damaged."""
    if record is None:
        return None
    try:
        return Refs(dict(record["branches"]), dict(record["tags"]), record["repo_type"], record.get("moved_to"))
    except (KeyError, TypeError, ValueError):
        return None


def _builds_of(record: dict[str, Any] | None) -> Builds | None:
    """A recorded listing; None when there is none or it is damaged."""
    if record is None:
        return None
    try:
        return {build: _files_of(files) for build, files in record["builds"].items()}
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _files_of(files: list[Any] | None) -> tuple[ListedFile, ...] | None:
    if files is None:
        return None
    return tuple(ListedFile(path, size, ContentHash(*content_hash)) for path, size, content_hash in files)
