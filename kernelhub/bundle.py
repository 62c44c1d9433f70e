"""Bundle: builds with all that they need, in one file, for machines without network.

A bundle is an archive (``archive.py``) of these members, in this order::

    bundle.json        which builds (repository, commit, variant, path, size and sha256 of each file), and what the
                       versions and branches of their repositories mean
    kernelhub.lock     a lock of the same kernels; absent where one lock cannot hold them all
    files/<sha256>     each file once, whichever builds it belongs to

The sha256 of ``bundle.json`` covers everything and is the bundle's digest. Who made a bundle is not in it, so it never
grants trust: the Hub's mark on a publisher does not count for bytes that do not come from the Hub. Each repository has
to be named by whoever installs it, or be in the user's policy file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelhub.archive import ArchiveReader, ArchiveWriter
from kernelhub.buildpath import METADATA, check_paths
from kernelhub.errors import (
    DigestMismatch,
    FetchError,
    InvalidBundle,
    InvalidLockfile,
    InvalidMetadata,
    InvalidPath,
    InvalidRequest,
    InvalidVariant,
    KernelHubError,
    UntrustedPublisher,
)
from kernelhub.fetch import MAX_BUILD_BYTES
from kernelhub.index import Refs
from kernelhub.lockfile import LOCK_NAME, MAX_BYTES, Lock, LockedKernel
from kernelhub.metadata import MAX_BYTES as MAX_METADATA_BYTES
from kernelhub.metadata import Metadata
from kernelhub.request import KernelRequest, checked_repo_id
from kernelhub.resolution import DEFAULT_REVISION, Resolution
from kernelhub.revision import Revision, RevisionKind
from kernelhub.store import FILES, Manifest, StoredFile, open_regular
from kernelhub.trust import TrustPolicy
from kernelhub.variant import Variant
from kernelhub.verify import verify_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kernelhub.index import ListedFile
    from kernelhub.session import Session
    from kernelhub.store import StoredBuild
    from kernelhub.verify import VerifiedBuild

SCHEMA = 1
CONTENTS = "bundle.json"
SUFFIX = ".tar.gz"

_MAX_CONTENTS = 16 << 20
_MAX_BUILDS = 4096
_MAX_FILES = 10_000
_MAX_RATIO = 200  # native code shrinks to a third; 200 times smaller is a bomb
_MAX_COPIES = 1000  # the same for all builds unpacked, which may share files
_SMALL = 1 << 20  # bytes; no bomb
_CHUNK = 1 << 20
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)
_KEYS = {"builds", "endpoint", "lock", "repositories", "schema"}


class BundledBuild(NamedTuple):
    """One build; ``files`` are sorted."""

    repo_id: str
    commit: str
    variant: str
    files: tuple[StoredFile, ...]

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def title(self) -> str:
        return f"{self.repo_id}@{self.commit[:12]} {self.variant}"


@dataclass(frozen=True)
class Bundle:
    """The contents of a bundle, as its first members tell them.

    ``repositories`` says what branches and tags mean, those only whose commits are in the bundle.
    """

    endpoint: str
    builds: tuple[BundledBuild, ...]
    repositories: Mapping[str, Refs] = field(default_factory=dict, hash=False)
    lock_bytes: bytes | None = None

    @cached_property
    def contents(self) -> bytes:
        """``bundle.json``: the same content gives the same bytes."""
        document = {
            "schema": SCHEMA,
            "endpoint": self.endpoint,
            "lock": None if self.lock_bytes is None else [len(self.lock_bytes), _sha256(self.lock_bytes)],
            "builds": [
                {
                    "repo_id": build.repo_id,
                    "commit": build.commit,
                    "variant": build.variant,
                    "files": [list(file) for file in build.files],
                }
                for build in sorted(self.builds)
            ],
            "repositories": {
                repo_id: {"type": refs.repo_type, "branches": dict(refs.branches), "tags": dict(refs.tags)}
                for repo_id, refs in self.repositories.items()
            },
        }
        return json.dumps(document, indent=1, sort_keys=True).encode() + b"\n"

    @property
    def digest(self) -> str:
        """sha256 over the contents, which list the hash of everything else."""
        return _sha256(self.contents)

    @property
    def lock(self) -> Lock | None:
        return None if self.lock_bytes is None else Lock.parse(self.lock_bytes, LOCK_NAME)

    @property
    def bodies(self) -> dict[str, int]:
        """sha256 to size of every distinct file, in the order of the archive."""
        sizes = {file.sha256: file.size for build in self.builds for file in build.files}
        return {sha256: sizes[sha256] for sha256 in sorted(sizes)}

    @property
    def size(self) -> int:
        """Bytes of all builds, unpacked."""
        return sum(build.size for build in self.builds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, without the list of files."""
        return {
            "digest": self.digest,
            "endpoint": self.endpoint,
            "bytes": self.size,
            "locked": self.lock_bytes is not None,
            "builds": [
                {"kernel": b.repo_id, "commit": b.commit, "variant": b.variant, "files": len(b.files), "bytes": b.size}
                for b in self.builds
            ],
        }

    def __str__(self) -> str:
        lines = [f"digest    sha256:{self.digest}", f"endpoint  {self.endpoint}"]
        lines += [f"build     {build.title}  {len(build.files)} files, {build.size} bytes" for build in self.builds]
        names = {kernel.name: kernel.commit for kernel in self.lock.kernels} if self.lock else {}
        lines += [f"locked    {name} at {commit[:12]}" for name, commit in names.items()]
        return "\n".join([*lines, f"total     {len(self.builds)} builds, {self.size} bytes"])


# Making one


def create(resolutions: Iterable[Resolution], session: Session, path: Path, lock: Lock | None = None) -> Bundle:
    """Write a bundle of builds that are in the store; the same builds give the same bytes.

    Args:
        resolutions: with their dependencies.
        lock: put this lock into it; None makes one of the resolutions, if one lock can hold them.

    Raises:
        DigestMismatch: a stored file has changed.
        InvalidBundle: it would not be one that can be installed.
        CacheError: the file cannot be written.
    """
    distinct = {found.build: found for resolution in resolutions for found in resolution.tree()}
    stored = [_stored(found, session) for found in distinct.values()]
    builds = tuple(sorted(_bundled(build) for build in stored))
    made = _lock_of(distinct.values()) if lock is None else lock
    repositories = _repositories(distinct.values(), session)
    bundle = Bundle(session.store.endpoint, builds, repositories, None if made is None else made.dump())
    sources = {file.sha256: build.files_folder / file.path for build in stored for file in build.manifest.files}
    _write(bundle, sources, path)
    return bundle


def _stored(resolution: Resolution, session: Session) -> StoredBuild:
    if resolution.folder is not None:
        raise InvalidBundle(resolution.name, "is on this machine, not on the Hub", "a repository on the Hub")
    stored = session.store.find(resolution.name, resolution.commit, resolution.variant)
    if stored is None:
        raise InvalidBundle(resolution.build, "is not in the store", "a build that was prefetched")
    return stored


def _bundled(stored: StoredBuild) -> BundledBuild:
    manifest = stored.manifest
    files = tuple(sorted(StoredFile(*file) for file in manifest.files))
    return BundledBuild(manifest.repo_id, manifest.commit, manifest.variant, files)


def _repositories(resolutions: Iterable[Resolution], session: Session) -> dict[str, Refs]:
    """What the names mean that these builds were asked for by, and others of the same commits."""
    commits: dict[str, set[str]] = {}
    asked: dict[str, dict[str, str]] = {}
    for found in resolutions:
        commits.setdefault(found.name, set()).add(found.commit)
        revision = found.request.revision
        if revision is not None and revision.kind is RevisionKind.NAME:  # also what is no branch: a pull request
            asked.setdefault(found.name, {})[revision.text] = found.commit
    known = {repo_id: _known_refs(repo_id, commits[repo_id], session) for repo_id in sorted(commits)}
    return {
        repo_id: replace(refs, branches={**refs.branches, **_others(asked.get(repo_id, {}), refs)})
        for repo_id, refs in known.items()
    }


def _others(names: Mapping[str, str], refs: Refs) -> dict[str, str]:
    return {name: commit for name, commit in names.items() if refs.find(name) is None}


def _known_refs(repo_id: str, commits: set[str], session: Session) -> Refs:
    """What is known of the names of these commits; nothing when only commits were ever asked for."""
    try:
        refs = session.refs(repo_id)
    except FetchError:
        return Refs()
    branches = {name: commit for name, commit in refs.branches.items() if commit in commits}
    for text, commit in refs.pins.items():  # under a lock, which knows no branches
        if Revision.parse(text).kind in (RevisionKind.VERSION, RevisionKind.NAME) and commit in commits:
            branches[text] = commit
    return Refs(branches, {name: commit for name, commit in refs.tags.items() if commit in commits}, refs.repo_type)


def _lock_of(resolutions: Iterable[Resolution]) -> Lock | None:
    """A lock of exactly these builds; None when two versions of one repository were asked for."""
    kernels: dict[str, LockedKernel] = {}
    needed: set[str] = set()
    for found in resolutions:
        request = KernelRequest(found.name, revision=found.request.revision or DEFAULT_REVISION)
        wanted = found.metadata.kernel_depends if found.metadata else ()
        names = [str(KernelRequest(each.repo_id, revision=each.revision)) for each in wanted]
        needed.update(names)
        kernel = kernels.setdefault(str(request), LockedKernel(request, found.commit))
        dependencies = tuple(sorted({*kernel.dependencies, *names}))
        variants = {**kernel.variants, found.variant: found.files}
        kernels[str(request)] = replace(kernel, dependencies=dependencies, variants=variants)
    lock = Lock(tuple(replace(kernel, dependency=name in needed) for name, kernel in kernels.items()))
    try:
        return Lock.parse(lock.dump())
    except InvalidLockfile:
        return None


def _write(bundle: Bundle, sources: Mapping[str, Path], path: Path) -> None:
    """Replace ``path`` as a whole; what was written is read back as a stranger would."""
    try:
        handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.absolute().parent)
    except OSError as error:
        raise InvalidBundle(str(path), f"cannot be written ({error.strerror})", "a file in a folder") from error
    try:
        with os.fdopen(handle, "wb") as file:
            _write_members(bundle, sources, ArchiveWriter(file))
            file.flush()
            os.fsync(file.fileno())
        inspect(Path(temporary))
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _write_members(bundle: Bundle, sources: Mapping[str, Path], archive: ArchiveWriter) -> None:
    archive.add(CONTENTS, len(bundle.contents), [bundle.contents])
    if bundle.lock_bytes is not None:
        archive.add(LOCK_NAME, len(bundle.lock_bytes), [bundle.lock_bytes])
    for sha256, size in bundle.bodies.items():
        archive.add(f"{FILES}/{sha256}", size, _hashed(_chunks_of(sources[sha256]), sha256, str(sources[sha256])))
    archive.close()


def _chunks_of(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def _hashed(chunks: Iterable[bytes], sha256: str, name: str) -> Iterator[bytes]:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk
    if hasher.hexdigest() != sha256:
        raise DigestMismatch("in the bundle", name, f"has sha256 {hasher.hexdigest()}, listed is {sha256}")


# Reading one


def inspect(path: Path) -> Bundle:
    """What a bundle holds, after reading and comparing all of it; writes nothing.

    Raises:
        InvalidBundle: not a bundle, damaged, truncated, or with anything in it that a bundle does not have.
        DigestMismatch: a file is not what is listed.
    """
    with _opened(path) as (archive, bundle):
        for sha256, size in bundle.bodies.items():
            with archive.member(f"{FILES}/{sha256}", size) as chunks:
                for _ in _hashed(chunks, sha256, sha256):
                    pass
        archive.finish()
    return bundle


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[ArchiveReader, Bundle]]:
    """An archive with its first members read; the files come next."""
    try:
        file = open_regular(path.resolve())
    except OSError as error:
        raise InvalidBundle(str(path), f"cannot be read ({error.strerror})", f"a {SUFFIX} file") from error
    with file:
        archive = ArchiveReader(file, str(path))
        try:
            bundle = _parse(archive.first(CONTENTS, _MAX_CONTENTS), archive)
        except (InvalidRequest, InvalidVariant, InvalidPath) as error:
            raise InvalidBundle(error.value, error.problem, error.expected, str(path)) from None
        _refuse_bomb(bundle, os.fstat(file.fileno()).st_size, path)
        yield archive, bundle


def _parse(data: bytes, archive: ArchiveReader) -> Bundle:
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidBundle(CONTENTS, str(error), "JSON") from None
    _expect(isinstance(document, dict) and set(document) == _KEYS, document, f"an object with {sorted(_KEYS)}")
    _expect(document["schema"] == SCHEMA, document["schema"], f"schema {SCHEMA}")
    _expect(isinstance(document["endpoint"], str), document["endpoint"], "an address")
    listed = document["builds"]
    _expect(isinstance(listed, list) and 0 < len(listed) <= _MAX_BUILDS, listed, f"1 to {_MAX_BUILDS} builds")
    builds = tuple(map(_read_build, listed))
    repositories = document["repositories"]
    _expect(isinstance(repositories, dict), repositories, "an object")
    refs = {checked_repo_id(repo_id): _read_refs(value) for repo_id, value in repositories.items()}
    _expect(set(refs) == {build.repo_id for build in builds}, sorted(refs), "the repositories of the builds")
    lock = _read_lock(document["lock"], archive)
    bundle = Bundle(document["endpoint"], builds, refs, lock)
    if bundle.contents != data:  # keys given twice, another order, unknown keys
        raise InvalidBundle(CONTENTS, "not in canonical form", "the output of `kernelhub bundle create`")
    _refuse_contradictions(bundle)
    return bundle


def _read_build(entry: Any) -> BundledBuild:
    keys = {"repo_id", "commit", "variant", "files"}
    _expect(isinstance(entry, dict) and set(entry) == keys, entry, f"an object with {sorted(keys)}")
    repo_id, commit, files = checked_repo_id(entry["repo_id"]), entry["commit"], entry["files"]
    _expect(_matches(_COMMIT, commit), commit, "a commit of 40 hex digits")
    _expect(isinstance(entry["variant"], str), entry["variant"], "the name of a variant")
    variant = str(Variant.parse(entry["variant"]))
    _expect(isinstance(files, list) and 0 < len(files) <= _MAX_FILES, files, f"1 to {_MAX_FILES} files")
    read = tuple(map(_read_file, files))
    check_paths(file.path for file in read)
    build = BundledBuild(repo_id, commit, variant, read)
    _expect(len({file.path for file in read}) == len(read), build.title, "each file once")
    _expect(build.size <= MAX_BUILD_BYTES, build.size, f"at most {MAX_BUILD_BYTES} bytes a build")
    return build


def _read_file(entry: Any) -> StoredFile:
    _expect(isinstance(entry, list) and len(entry) == 3, entry, "[path, size, sha256]")
    path, size, sha256 = entry
    _expect(isinstance(path, str), path, "a path")
    _expect(type(size) is int and 0 <= size <= MAX_BUILD_BYTES, size, "a size in bytes")
    _expect(_matches(_SHA256, sha256), sha256, "64 hex digits")
    return StoredFile(path, size, sha256)


def _read_refs(entry: Any) -> Refs:
    keys = {"type", "branches", "tags"}
    _expect(isinstance(entry, dict) and set(entry) == keys, entry, f"an object with {sorted(keys)}")
    _expect(entry["type"] in ("kernel", "model"), entry["type"], "'kernel' or 'model'")
    for kind in ("branches", "tags"):
        _expect(isinstance(entry[kind], dict), entry[kind], "an object")
        for name, commit in entry[kind].items():
            _expect(_matches(_COMMIT, commit), commit, f"the commit of {name!a}")
            Revision.parse(name)
    return Refs(entry["branches"], entry["tags"], entry["type"])


def _read_lock(entry: Any, archive: ArchiveReader) -> bytes | None:
    if entry is None:
        return None
    _expect(isinstance(entry, list) and len(entry) == 2, entry, "[size, sha256]")
    size, sha256 = entry
    _expect(type(size) is int and 0 <= size <= MAX_BYTES, size, f"at most {MAX_BYTES} bytes")
    _expect(_matches(_SHA256, sha256), sha256, "64 hex digits")
    with archive.member(LOCK_NAME, size) as chunks:
        return b"".join(_hashed(chunks, sha256, LOCK_NAME))


def _refuse_contradictions(bundle: Bundle) -> None:
    keys = [build[:3] for build in bundle.builds]
    _expect(len(set(keys)) == len(keys), bundle.builds[0].title, "each build once")
    sizes: dict[str, int] = {}
    for file in (file for build in bundle.builds for file in build.files):
        _expect(sizes.setdefault(file.sha256, file.size) == file.size, file.path, "one size for one content")
    commits = {(build.repo_id, build.commit) for build in bundle.builds}
    for repo_id, refs in bundle.repositories.items():
        for commit in (*refs.branches.values(), *refs.tags.values()):
            _expect((repo_id, commit) in commits, commit, "names of commits that are in the bundle")
    for kernel in bundle.lock.kernels if bundle.lock else ():
        known = (str(kernel.request.repo_id), kernel.commit) in commits
        _expect(known, kernel.name, "a lock of the kernels in the bundle")


def _refuse_bomb(bundle: Bundle, size: int, path: Path) -> None:
    for announced, ratio in ((sum(bundle.bodies.values()), _MAX_RATIO), (bundle.size, _MAX_COPIES)):
        if announced > _SMALL and announced > ratio * size:
            problem = f"{announced} bytes of files in an archive of {size}, more than {ratio} times its size"
            raise InvalidBundle(str(path), problem, "what code can be compressed to")


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _expect(holds: bool, value: object, expected: str) -> None:
    if not holds:
        raise InvalidBundle(value, f"in {CONTENTS}", expected)


# Installing one


class Installed(NamedTuple):
    """One build after ``install``; ``is_new`` is False when the store had it already."""

    build: BundledBuild
    is_new: bool
    verification: str


def install(
    path: Path, session: Session, *, trust: Iterable[str] = (), digest: str | None = None
) -> tuple[Bundle, list[Installed]]:
    """Bring the builds of a bundle into the store, all of them or none.

    Everything is read, compared and verified in a private folder first. What the bundle says about versions and
    branches is recorded, so that its builds load offline by version, revision, commit, lock and mapping.

    Args:
        path: the bundle.
        trust: repositories whose code may run, beside those in the user's policy file. That the Hub trusts a
            publisher does not count here.
        digest: refuse any other bundle than the one with this digest (``sha256:`` may stand in front).

    Raises:
        InvalidBundle: as in ``inspect``, another digest, or made for another Hub than this session's.
        UntrustedPublisher, PinMismatch, UnsignedKernel: the user's policy or nobody's opt-in allows it.
        DigestMismatch: files that are not what the bundle, a build's own metadata or the store says.
        CacheError, CacheFullError: the store cannot take it.
    """
    store = session.store
    with _opened(path) as (archive, bundle), contextlib.ExitStack() as stack:
        _refuse_other(bundle, digest, store.endpoint, path)
        policy = TrustPolicy.of(list(trust)).under(session.policy)
        for build in bundle.builds:
            _check_trust(build, policy)
        missing = [build for build in bundle.builds if not _is_stored(build, session)]
        store.check_space(sum(bundle.bodies.values()) + sum(build.size for build in missing))
        try:
            bodies = _unpack(archive, bundle, stack.enter_context(store.staging()))
            _check_locked(bundle, bodies)
            staged = [(build, stack.enter_context(store.staging())) for build in missing]
            verified = {build: _assemble(build, folder, bodies, session) for build, folder in staged}
            for build, folder in staged:
                store.publish(folder, _manifest(build, store.endpoint))
        except OSError as error:
            if isinstance(error, KernelHubError):
                raise
            raise store.unwritable(error, bundle.size) from error
    for repo_id, refs in bundle.repositories.items():
        _record(repo_id, refs, session)
    return bundle, [
        Installed(build, build in verified, verified[build].state.value if build in verified else "stored already")
        for build in bundle.builds
    ]


def _refuse_other(bundle: Bundle, digest: str | None, endpoint: str, path: Path) -> None:
    if digest is not None and digest.removeprefix("sha256:").lower() != bundle.digest:
        raise InvalidBundle(str(path), f"its digest is sha256:{bundle.digest}", f"sha256:{digest[-64:]}")
    if bundle.endpoint != endpoint:
        expected = f"the same for all: set HF_ENDPOINT={bundle.endpoint} here and where it is loaded"
        raise InvalidBundle(
            str(path), f"its builds come from {bundle.endpoint}, this store is for {endpoint}", expected
        )


class _Nobody:
    """The Hub's word on publishers, which a bundle does not have."""

    name = "nobody"

    def trusts(self, publisher: str) -> bool | None:
        return None


def _check_trust(build: BundledBuild, policy: TrustPolicy) -> None:
    try:
        policy.check(build.repo_id, _Nobody(), requested=False)  # type: ignore[arg-type]  # asks for trusts() only
    except UntrustedPublisher as error:
        if policy.policy.only:
            raise
        reason = "and a bundle does not prove who made it."
        raise UntrustedPublisher(error.repo_id, error.publisher, reason) from None
    policy.check_commit(build.repo_id, build.commit)


def _is_stored(build: BundledBuild, session: Session) -> bool:
    stored = session.store.find(build.repo_id, build.commit, build.variant)
    if stored is None:
        return False
    manifest = _manifest(build, session.store.endpoint)
    if stored.manifest.digest != manifest.digest:
        problem = f"the store has other files for this commit (digest {stored.manifest.digest[:12]})"
        raise DigestMismatch(build.title, CONTENTS, problem)
    return True


def _manifest(build: BundledBuild, endpoint: str) -> Manifest:
    return Manifest(build.repo_id, build.commit, build.variant, endpoint, build.files)


def _unpack(archive: ArchiveReader, bundle: Bundle, folder: Path) -> dict[str, Path]:
    """Every file by its hash, in a private folder."""
    bodies = {}
    for sha256, size in bundle.bodies.items():
        bodies[sha256] = folder / sha256
        with archive.member(f"{FILES}/{sha256}", size) as chunks, bodies[sha256].open("xb") as file:
            for chunk in _hashed(chunks, sha256, sha256):
                file.write(chunk)
    archive.finish()
    return bodies


def _check_locked(bundle: Bundle, bodies: Mapping[str, Path]) -> None:
    """The lock in the bundle and the builds in it have to be the same bytes."""
    builds = {build[:3]: build for build in bundle.builds}
    for kernel in bundle.lock.kernels if bundle.lock else ():
        for variant, listed in kernel.variants.items():
            build = builds.get((str(kernel.request.repo_id), kernel.commit, variant))
            if build is not None:
                _compare(build, listed, bodies)


def _compare(build: BundledBuild, listed: tuple[ListedFile, ...], bodies: Mapping[str, Path]) -> None:
    files = {file.path: file for file in build.files}
    if set(files) != {file.path for file in listed}:
        raise DigestMismatch(build.title, LOCK_NAME, "lists other files than the bundle has")
    for expected in listed:
        hasher = expected.hasher()
        for chunk in _chunks_of(bodies[files[expected.path].sha256]):
            hasher.update(chunk)
        if problem := hasher.problem():
            raise DigestMismatch(build.title, expected.path, f"is not the one that the bundle's lock lists: {problem}")


def _assemble(build: BundledBuild, folder: Path, bodies: Mapping[str, Path], session: Session) -> VerifiedBuild:
    """Lay out one build and verify it as if it were loaded from there."""
    files = folder / FILES
    files.mkdir(mode=0o700)
    for file in build.files:
        target = files / file.path
        target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _copy(bodies[file.sha256], target)
    data = _metadata_bytes(build, files)
    resolution = Resolution(
        request=KernelRequest(build.repo_id, revision=Revision.parse(build.commit)),
        name=build.repo_id,
        commit=build.commit,
        variant=build.variant,
        endpoint=session.store.endpoint,
        trust="opted in by the installer",
        folder=files,
        metadata=None if data is None else Metadata.parse(data, build.title),
        metadata_bytes=data,
    )
    verified = session.accept(verify_folder(resolution), resolution)
    if verified.digest != _manifest(build, "").digest:
        raise DigestMismatch(build.title, CONTENTS, "lists other files than were unpacked")
    return verified


def _metadata_bytes(build: BundledBuild, folder: Path) -> bytes | None:
    listed = next((file for file in build.files if file.path == METADATA), None)
    if listed is None:
        return None
    if listed.size > MAX_METADATA_BYTES:
        raise InvalidMetadata(METADATA, f"{listed.size} bytes", f"at most {MAX_METADATA_BYTES}", build.title)
    return b"".join(_chunks_of(folder / METADATA))


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as body, target.open("xb") as file:
        shutil.copyfileobj(body, file, _CHUNK)
    target.chmod(0o444)


def _record(repo_id: str, refs: Refs, session: Session) -> None:
    """Remember what the names in the bundle mean; what is known of others stays, what moves is told (S-01)."""
    if not refs.branches and not refs.tags:
        return
    known = _recorded_refs(repo_id, session)
    for branch, commit in refs.branches.items():
        before = known.branches.get(branch, commit)
        if before != commit:
            session.reporter.warn(f"kernel {repo_id}: branch {branch} moves from {before[:12]} to {commit[:12]}")
    merged = Refs({**known.branches, **refs.branches}, {**known.tags, **refs.tags}, refs.repo_type)
    session.store.record("repositories", repo_id, asdict(merged))


def _recorded_refs(repo_id: str, session: Session) -> Refs:
    try:
        return replace(session, offline=True, lockfile=False).refs(repo_id)
    except FetchError:
        return Refs()


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
