"""Reader: a bundle's first members, strictly parsed; its files follow, each compared with its hash."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from typing import TYPE_CHECKING, Any

from kernelhub.archive import ArchiveReader
from kernelhub.buildpath import check_paths
from kernelhub.bundle.contents import CONTENTS, SCHEMA, SUFFIX, Bundle, BundledBuild
from kernelhub.errors import DigestMismatch, InvalidBundle, InvalidPath, InvalidRequest, InvalidVariant
from kernelhub.fetch import MAX_BUILD_BYTES
from kernelhub.index import Refs
from kernelhub.lockfile import LOCK_NAME, MAX_BYTES
from kernelhub.request import checked_repo_id
from kernelhub.revision import Revision
from kernelhub.store import FILES, StoredFile, open_regular
from kernelhub.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

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


def inspect(path: Path) -> Bundle:
    """What a bundle holds, after reading and comparing all of it; writes nothing.

    Raises:
        InvalidBundle: not a bundle, damaged, truncated, or with anything in it that a bundle does not have.
        DigestMismatch: a file is not what is listed.
    """
    with opened(path) as (archive, bundle):
        for sha256, size in bundle.bodies.items():
            with archive.member(f"{FILES}/{sha256}", size) as chunks:
                for _ in hashed(chunks, sha256, sha256):
                    pass
        archive.finish()
    return bundle


@contextlib.contextmanager
def opened(path: Path) -> Iterator[tuple[ArchiveReader, Bundle]]:
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
        return b"".join(hashed(chunks, sha256, LOCK_NAME))


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


def chunks_of(path: Path) -> Iterator[bytes]:
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            yield chunk


def hashed(chunks: Iterable[bytes], sha256: str, name: str) -> Iterator[bytes]:
    hasher = hashlib.sha256()
    for chunk in chunks:
        hasher.update(chunk)
        yield chunk
    if hasher.hexdigest() != sha256:
        raise DigestMismatch("in the bundle", name, f"has sha256 {hasher.hexdigest()}, listed is {sha256}")
