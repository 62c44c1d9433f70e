"""Creation: stored builds into one file."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from kernelhub.archive import ArchiveWriter
from kernelhub.bundle.contents import CONTENTS, Bundle, BundledBuild
from kernelhub.bundle.reader import chunks_of, hashed, inspect
from kernelhub.errors import FetchError, InvalidBundle, InvalidLockfile
from kernelhub.index import Refs
from kernelhub.lockfile import LOCK_NAME, Lock, LockedKernel
from kernelhub.request import KernelRequest
from kernelhub.resolution import DEFAULT_REVISION
from kernelhub.revision import Revision, RevisionKind
from kernelhub.store import FILES, StoredFile

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kernelhub.resolution import Resolution
    from kernelhub.session import Session
    from kernelhub.store import StoredBuild


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
        archive.add(f"{FILES}/{sha256}", size, hashed(chunks_of(sources[sha256]), sha256, str(sources[sha256])))
    archive.close()
