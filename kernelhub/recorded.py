"""Recorded answers: the store as an Index, alone (offline) or in front of a Hub (remembering)."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import math
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from kernelhub import setting
from kernelhub.buildpath import METADATA
from kernelhub.errors import DigestMismatch, HubUnavailable, NotCached
from kernelhub.index import Builds, ContentHash, Index, ListedFile, Refs, split_path
from kernelhub.store import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernelhub.reporter import Reporter
    from kernelhub.store import Store, StoredBuild

_Answer = TypeVar("_Answer")

FRESH_SECONDS = 3600.0
_CHUNK = 1 << 20
_MOST_TOLD = 5  # versions in a warning
_ROUNDS = 2  # a body that is not what was announced is asked for once more


def fresh_seconds() -> float:
    """How long a remembered branch or publisher answer is used without asking (``KERNELHUB_FRESH_SECONDS``).

    With ``KERNELHUB_PREFER_CACHED`` for ever: the network is only for what is missing.
    """
    return (
        math.inf
        if setting.flag("KERNELHUB_PREFER_CACHED")
        else setting.seconds("KERNELHUB_FRESH_SECONDS", FRESH_SECONDS)
    )


class RecordedIndex:
    """What earlier loads and prefetches left in the store; opens no socket."""

    def __init__(self, store: Store) -> None:
        self.name = f"{store.root} (offline)"
        self._store = store

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts: the decision that was recorded online."""
        return _trusted_of(self._store.recorded("publishers", publisher))

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
    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See Index.stream: the bytes of a stored file, or the metadata that resolution has read of another build."""
        build, below = split_path(path)
        stored = self._store.find(repo_id, commit, build)
        remembered = self.body(f"{repo_id}@{commit}/{path}", expected) if stored is None and expected else None
        if remembered is not None:
            yield iter([remembered[offset:]])
            return
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

    def body(self, name: str, listed: ListedFile) -> bytes | None:
        """A small file that was recorded on its own, if it is what the listing promises."""
        recorded = (self._store.recorded("metadata", name) or {}).get("base64")
        with contextlib.suppress(binascii.Error, ValueError):
            data = base64.b64decode(recorded) if isinstance(recorded, str) else b""
            return data if listed.matches(data) else None
        return None

    def _not_cached(self, what: str, request: str) -> NotCached:
        return NotCached(what, self._store.root, f"kernelhub prefetch '{request}'")


class BackedIndex:
    """An index, and another one that is asked for what the first does not have; the first one's errors are told."""

    def __init__(self, first: Index, second: Index) -> None:
        self.name = first.name
        self._first = first
        self._second = second

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts."""
        known = self._first.trusts(publisher)
        return self._second.trusts(publisher) if known is None else known

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs."""
        return self._either(lambda index: index.refs(repo_id, refresh=refresh))

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit."""
        return self._either(lambda index: index.commit(repo_id, revision))

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds."""
        return self._either(lambda index: index.builds(repo_id, commit))

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        return self._either(lambda index: index.files(repo_id, commit, build))

    @contextlib.contextmanager
    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See Index.stream."""
        with contextlib.ExitStack() as stack:
            yield self._either(
                lambda index: stack.enter_context(index.stream(repo_id, commit, path, offset, expected=expected))
            )

    def _either(self, ask: Callable[[Index], _Answer]) -> _Answer:
        try:
            return ask(self._first)
        except NotCached as missing:
            try:
                return ask(self._second)
            except NotCached:
                raise missing from None


class RememberingIndex:
    """A Hub whose answers are recorded, and not asked for again while they are fresh.

    What a commit contains never changes, so it is asked once. Branches and publishers are asked again after
    ``max_age`` seconds; ``connect`` is called when a request is really needed. Of several processes that need the
    same answer one asks, and the others read what it recorded. When the Hub cannot be reached the older answer
    serves, with a warning that tells its age; with ``only_fresh`` it does not.
    """

    def __init__(
        self,
        store: Store,
        connect: Callable[[], Index],
        reporter: Reporter,
        max_age: float,
        *,
        only_fresh: bool = False,
    ) -> None:
        self.name = store.endpoint
        self._store = store
        self._recorded = RecordedIndex(store)
        self._connect = connect
        self._reporter = reporter
        self._max_age = max_age
        self._only_fresh = only_fresh
        self._asked: set[str] = set()
        self._told: set[str] = set()

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts."""
        return self._remembered(
            ("publishers", publisher, f"publisher {publisher}"),
            _trusted_of,
            lambda: self._hub.trusts(publisher),
            lambda trusted: {"trusted": trusted},
        )

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs."""
        refs = self._remembered(
            ("repositories", repo_id, f"kernel {repo_id}"),
            _refs_of,
            lambda: self._hub.refs(repo_id),
            asdict,
            refresh=refresh and repo_id not in self._asked,
        )
        if refresh:
            self._asked.add(repo_id)
        return refs

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit."""
        return self._remembered(
            ("revisions", f"{repo_id}@{revision}", f"revision {revision} of kernel {repo_id}"),
            _commit_of,
            lambda: self._hub.commit(repo_id, revision),
            lambda commit: {"commit": commit},
        )

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds."""
        name = f"{repo_id}@{commit}"
        known = _builds_of(self._store.recorded("listings", name))
        if known is not None:
            return known
        with self._store.asking(name):
            known = _builds_of(self._store.recorded("listings", name))
            if known is not None:
                return known
            try:
                builds = self._hub.builds(repo_id, commit)
            except HubUnavailable as error:
                return self._stored_builds(repo_id, commit, error)
            self._store.record("listings", name, {"builds": builds})
        return builds

    def _stored_builds(self, repo_id: str, commit: str, error: HubUnavailable) -> Builds:
        """Without the Hub and its listing, the builds that are here (from a bundle, say) are all there are."""
        try:
            builds = self._recorded.builds(repo_id, commit)
        except NotCached:
            raise error from None
        self._reporter.warn(f"{error}; choosing among the stored builds of kernel {repo_id}")
        return builds

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files; asked for where the listing of all builds was too long to hold them."""
        if self._store.find(repo_id, commit, build) is not None:
            return self._recorded.files(repo_id, commit, build)
        name = f"{repo_id}@{commit}/{build}"
        known = _build_of(self._store.recorded("listings", name))
        if known is not None:
            return known
        with self._store.asking(name):
            known = _build_of(self._store.recorded("listings", name))
            if known is None:
                known = self._hub.files(repo_id, commit, build)
                self._store.record("listings", name, {"files": known})
        return known

    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> contextlib.AbstractContextManager[Iterator[bytes]]:
        """See Index.stream; a stored file that was damaged is asked for again."""
        build, below = split_path(path)
        stored = self._store.find(repo_id, commit, build)
        intact = _open_intact(stored, below) if stored else None
        if intact is not None:
            return _chunks(intact, offset)
        if below == METADATA and not offset and expected is not None:
            return self._metadata(repo_id, commit, path, expected)
        return self._hub.stream(repo_id, commit, path, offset, expected=expected)

    @contextlib.contextmanager
    def _metadata(self, repo_id: str, commit: str, path: str, listed: ListedFile) -> Iterator[Iterator[bytes]]:
        """A build's metadata: resolution reads it before anything is fetched, so it is remembered on its own."""
        name = f"{repo_id}@{commit}/{path}"
        data = self._recorded.body(name, listed)
        if data is None:
            with self._store.asking(name):
                data = self._recorded.body(name, listed)
                if data is None:
                    data = self._read_body(repo_id, commit, path, listed)
                    if listed.matches(data):
                        self._store.record("metadata", name, {"base64": base64.b64encode(data).decode()})
        yield iter([data])

    def _read_body(self, repo_id: str, commit: str, path: str, listed: ListedFile) -> bytes:
        """What was announced, or what came instead, which is for the reader to refuse; at most one byte more."""
        for _ in range(_ROUNDS):
            data = bytearray()
            with self._hub.stream(repo_id, commit, path, expected=listed) as chunks:
                for chunk in chunks:
                    data += chunk[: listed.size + 1 - len(data)]
                    if len(data) > listed.size:
                        break
            if listed.matches(bytes(data)):
                break
        return bytes(data)

    def _remembered(
        self,
        what: tuple[str, str, str],
        parse: Callable[[dict[str, Any] | None], _Answer | None],
        ask: Callable[[], _Answer],
        facts: Callable[[_Answer], dict[str, Any]],
        *,
        refresh: bool = False,
    ) -> _Answer:
        """The recorded answer while it is fresh, else the Hub's; ``what`` is kind, name and text for messages."""
        kind, name, noun = what
        started = time.time()
        record = self._store.recorded(kind, name)
        known = parse(record)
        if known is not None and not refresh and self._is_fresh(record):
            return known
        with self._store.asking(f"{kind}--{name}"):
            record = self._store.recorded(kind, name)
            known = parse(record)
            if known is not None and record is not None:
                just_asked = started <= record["time"] <= time.time()  # by another process, while this one waited
                if just_asked or (not refresh and self._is_fresh(record)):
                    return known
            try:
                answer = ask()
            except HubUnavailable as error:
                if known is None or record is None:
                    raise
                if self._only_fresh:
                    cause = f"{error.cause}; what it said of {noun} before is not used here"
                    raise HubUnavailable(error.url, cause) from error
                self._warn_stale(record, noun, error, known)
                return known
            self._store.record(kind, name, facts(answer))
            return answer

    @property
    def _hub(self) -> Index:
        return self._connect()

    def _is_fresh(self, record: dict[str, Any] | None) -> bool:
        return record is not None and 0 <= time.time() - record["time"] <= self._max_age

    def _warn_stale(self, record: dict[str, Any], what: str, error: HubUnavailable, known: object) -> None:
        if what in self._told:
            return
        self._told.add(what)
        age = max(0.0, time.time() - record["time"])
        commits = list(known.versions.items())[-_MOST_TOLD:] if isinstance(known, Refs) else []
        told = "".join(f", v{version} is {commit[:12]}" for version, commit in commits)
        self._reporter.warn(f"{error}; using what the Hub said of {what} {age / 3600:.1f} hours ago{told}")


def _open_intact(stored: StoredBuild, path: str) -> BinaryIO | None:
    """A file of a stored build, open, so that pruning cannot take it away; None unless it is what was stored."""
    expected = next((file.sha256 for file in stored.manifest.files if file.path == path), None)
    try:
        file = open_regular(stored.files_folder / path)
    except OSError:
        return None
    hasher = hashlib.sha256()
    with contextlib.suppress(OSError):
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
        if hasher.hexdigest() == expected:
            return file
    file.close()
    return None


@contextlib.contextmanager
def _chunks(file: BinaryIO, offset: int) -> Iterator[Iterator[bytes]]:
    with file:
        file.seek(offset)
        yield iter(lambda: file.read(_CHUNK), b"")


def _trusted_of(record: dict[str, Any] | None) -> bool | None:
    """A recorded flag; None when there is none or it is damaged."""
    trusted = record.get("trusted") if record else None
    return trusted if isinstance(trusted, bool) else None


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


def _build_of(record: dict[str, Any] | None) -> tuple[ListedFile, ...] | None:
    """A recorded listing of one build; None when there is none or it is damaged."""
    try:
        return _files_of(record.get("files")) if record is not None else None
    except (TypeError, ValueError):
        return None


def _files_of(files: list[Any] | None) -> tuple[ListedFile, ...] | None:
    if files is None:
        return None
    return tuple(ListedFile(path, size, ContentHash(*content_hash)) for path, size, content_hash in files)
