"""Installation: the builds of a bundle into the store, all of them or none."""

from __future__ import annotations

import contextlib
import shutil
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

from kernelhub.buildpath import METADATA
from kernelhub.bundle.contents import CONTENTS, Bundle, BundledBuild
from kernelhub.bundle.reader import chunks_of, hashed, opened
from kernelhub.errors import (
    DigestMismatch,
    FetchError,
    InvalidBundle,
    InvalidMetadata,
    KernelHubError,
    UntrustedPublisher,
)
from kernelhub.index import Refs
from kernelhub.lockfile import LOCK_NAME
from kernelhub.metadata import MAX_BYTES as MAX_METADATA_BYTES
from kernelhub.metadata import Metadata
from kernelhub.request import KernelRequest
from kernelhub.resolution import Resolution
from kernelhub.revision import Revision
from kernelhub.store import FILES, Manifest
from kernelhub.trust import TrustPolicy
from kernelhub.verify import verify_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kernelhub.archive import ArchiveReader
    from kernelhub.index import ListedFile
    from kernelhub.session import Session
    from kernelhub.verify import VerifiedBuild

_CHUNK = 1 << 20


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
    with opened(path) as (archive, bundle), contextlib.ExitStack() as stack:
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
            for chunk in hashed(chunks, sha256, sha256):
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
        for chunk in chunks_of(bodies[files[expected.path].sha256]):
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
    return b"".join(chunks_of(folder / METADATA))


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
