"""Verify: are the files on disk exactly those that were resolved? Nothing is imported before this says so.

Only this module makes a ``VerifiedBuild``, and a ``VerifiedBuild`` is the only thing the loader takes.
"""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from kernelhub.buildpath import METADATA, SIGNATURE, check_paths, is_bytecode
from kernelhub.errors import DigestMismatch, InvalidPath, shown
from kernelhub.store import FileStat, Manifest, StoredBuild, StoredFile, open_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from kernelhub.index import ListedFile
    from kernelhub.metadata import Metadata
    from kernelhub.resolution import Resolution

_CHUNK = 1 << 20
_FEW = 5
_NOT_IN_DIGEST = (METADATA, SIGNATURE)
_LISTED = "listed"


class VerificationState(Enum):
    """How far a build proves what it is, best first."""

    LOCKED_SIGNED = "locked+signed"
    """Both of the next two."""

    LOCKED = "locked"
    """The lock in force lists the hashes of all its files, and they match."""

    SIGNED = "signed"
    """Whom the user expects has signed its metadata, which lists the digests of all its files, and they match."""

    SELF_ATTESTED = "self-attested"
    """Its own metadata lists the digests of all its files, and they match."""

    UNVERIFIED = "unverified"
    """It has no metadata, or metadata without a digest."""


@dataclass(frozen=True)
class VerifiedBuild:
    """A build whose files were found to be what they should be. ``digest`` identifies its content.

    ``strict`` asks the loader to run nothing but bytes that it hashed itself; ``alternatives`` are other variants that
    resolution would have accepted, for messages; ``stored`` is its place in the store, None for one read in place.
    """

    kernel: str
    variant: str
    folder: Path
    digest: str
    state: VerificationState
    metadata: Metadata | None = None
    dependencies: tuple[VerifiedBuild, ...] = ()
    strict: bool = False
    alternatives: tuple[str, ...] = field(default=(), compare=False)
    stored: StoredBuild | None = field(default=None, compare=False, repr=False)

    @property
    def build(self) -> str:
        return f"{self.kernel} {self.variant}"

    @property
    def name(self) -> str:
        """The kernel's name as a Python name: from its metadata, else from the repository."""
        name = self.metadata.name if self.metadata and self.metadata.name else self.kernel.partition("@")[0]
        plain = "".join(character if character.isalnum() else "_" for character in name.rpartition("/")[2])
        return plain if plain.isidentifier() else f"kernel_{plain}"


def verify_stored(
    stored: StoredBuild, resolution: Resolution, dependencies: tuple[VerifiedBuild, ...] = ()
) -> VerifiedBuild:
    """Check a build of the store against its manifest; files whose stat is unchanged are not hashed again.

    All files are hashed where others can write (a shared store), and each that has another name elsewhere (S-40).

    Raises:
        DigestMismatch: a file is missing, extra, changed, or not a regular file.
    """
    found = _scan(resolution.build, stored.files_folder)
    _compare_sets(resolution.build, found, [file.path for file in stored.manifest.files])
    receipt = stored.receipt()
    stale = [
        file
        for file in stored.manifest.files
        if stored.always_hash or found[file.path].links != 1 or receipt.get(file.path) != found[file.path]
    ]
    for file in stale:
        _check_file(resolution.build, stored.files_folder, file)
    if stale and receipt != found:
        stored.write_receipt(found)
    return _verified(resolution, stored.files_folder, stored.manifest, dependencies)


def verify_listed(stored: StoredBuild, build: str, files: tuple[ListedFile, ...]) -> None:
    """Compare a stored build with the files that a lock lists, whoever stored it before.

    Raises:
        DigestMismatch: the first file that differs.
    """
    if stored.kept(_LISTED, files) is not None:
        return
    found = {file.path: file for file in stored.manifest.files}
    _compare_sets(build, found, [file.path for file in files])
    for listed in files:
        if listed.hash.algorithm == "sha256":
            same = (found[listed.path].size, found[listed.path].sha256) == (listed.size, listed.hash.hex)
        else:
            same = _matches(build, stored.files_folder, listed)
        if not same:
            raise DigestMismatch(build, listed.path, "is not the one that the lock lists")
    stored.keep(_LISTED, {}, files)


def _matches(build: str, folder: Path, listed: ListedFile) -> bool:
    hasher = listed.hasher()
    try:
        with open_regular(folder / listed.path) as file:
            while chunk := file.read(_CHUNK):
                hasher.update(chunk)
    except OSError as error:
        raise DigestMismatch(build, listed.path, f"cannot be read ({error.strerror})") from error
    return hasher.problem() is None


def rehash(stored: StoredBuild) -> None:
    """Compare all files of a build with its manifest, whatever their stats say; for people who ask.

    Raises:
        DigestMismatch: a file is missing, extra, changed, or not a regular file.
    """
    manifest = stored.manifest
    build = f"{manifest.repo_id}@{manifest.commit[:12]} {manifest.variant}"
    _compare_sets(build, _scan(build, stored.files_folder), [file.path for file in manifest.files])
    for file in manifest.files:
        _check_file(build, stored.files_folder, file)


def _check_file(build: str, folder: Path, file: StoredFile) -> None:
    found = _hash(build, folder, file.path)
    if found != file.sha256:
        problem = f"has changed since it was stored (sha256 {found}, stored was {file.sha256})"
        raise DigestMismatch(build, file.path, problem)


def verify_folder(resolution: Resolution, dependencies: tuple[VerifiedBuild, ...] = ()) -> VerifiedBuild:
    """Check a build read in place (a local folder, the shipped collection) against its own metadata.

    Raises:
        DigestMismatch: its files are not those that its metadata lists.
    """
    assert resolution.folder is not None
    # Installers compile what they install; that bytecode is ours to ignore, and nobody reads it.
    found = _scan(resolution.build, resolution.folder, ignore_bytecode=resolution.request.is_builtin)
    files = tuple(
        StoredFile(path, found[path].size, _hash(resolution.build, resolution.folder, path)) for path in sorted(found)
    )
    manifest = Manifest(resolution.name, resolution.commit, resolution.variant, "", files)
    check_digest(resolution, resolution.folder, files)
    return _verified(resolution, resolution.folder, manifest, dependencies)


def check_digest(resolution: Resolution, folder: Path, files: tuple[StoredFile, ...]) -> None:
    """Compare files with the digest in the build's own metadata, if it has one: the same set, the same hashes.

    Raises:
        DigestMismatch: the first file that differs.
    """
    digest = resolution.metadata.digest if resolution.metadata else None
    if digest is None:
        return
    covered = {file.path: file for file in files if file.path not in _NOT_IN_DIGEST}
    _compare_sets(resolution.build, covered, digest.files)
    for path, file in covered.items():
        same = digest.algorithm == "sha256"
        found = file.sha256 if same else _hash(resolution.build, folder, path, digest.algorithm)
        if bytes.fromhex(found) != digest.files[path]:
            raise DigestMismatch(resolution.build, path, f"does not match the {digest.algorithm} in {METADATA}")


def hash_file(path: Path, algorithm: str = "sha256") -> str:
    """The hash of a regular file in hex, read in chunks; a symbolic link or special file is not followed or read."""
    hasher = hashlib.new(algorithm)
    with open_regular(path) as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    return hasher.hexdigest()


def _hash(build: str, folder: Path, path: str, algorithm: str = "sha256") -> str:
    try:
        return hash_file(folder / path, algorithm)
    except OSError as error:
        raise DigestMismatch(build, path, f"cannot be read ({error.strerror})") from error


def _scan(build: str, folder: Path, *, ignore_bytecode: bool = False) -> dict[str, FileStat]:
    """Every file below ``folder`` with its stat; anything but plain files and folders is refused (S-13, S-37)."""
    found = {
        path: FileStat.of(status)
        for path, status in _walk(build, folder, "")
        if not (ignore_bytecode and is_bytecode(path))
    }
    try:
        check_paths(found)
    except InvalidPath as error:
        raise DigestMismatch(build, str(error.value), f"is refused: {error.problem}") from error
    return found


def _walk(build: str, folder: Path, prefix: str) -> Iterator[tuple[str, os.stat_result]]:
    try:
        entries = [(entry.name, entry.stat(follow_symlinks=False)) for entry in os.scandir(folder)]
    except OSError as error:
        raise DigestMismatch(build, prefix or ".", f"cannot be read ({error.strerror})") from error
    for name, status in sorted(entries):
        path = f"{prefix}{name}"
        if stat.S_ISDIR(status.st_mode):
            yield from _walk(build, folder / name, f"{path}/")
        elif stat.S_ISREG(status.st_mode):
            yield path, status
        else:
            raise DigestMismatch(build, path, "is neither a file nor a folder (a link or a special file)")


def _compare_sets(build: str, found: Mapping[str, object], listed: Mapping[str, object] | list[str]) -> None:
    expected = set(listed)
    for path in sorted(expected - set(found)):
        raise DigestMismatch(build, path, "is missing")
    unlisted = sorted(set(found) - expected)
    if unlisted:
        others = ", ".join(map(shown, unlisted[1:_FEW]))
        more = f", nor are {len(unlisted) - 1} others ({others}{', ...' if len(unlisted) > _FEW else ''})"
        raise DigestMismatch(build, unlisted[0], f"is not listed{more if others else ''}")


def _verified(
    resolution: Resolution, folder: Path, manifest: Manifest, dependencies: tuple[VerifiedBuild, ...]
) -> VerifiedBuild:
    metadata = resolution.metadata
    attested = metadata is not None and metadata.digest is not None
    state = VerificationState.SELF_ATTESTED if attested else VerificationState.UNVERIFIED
    return VerifiedBuild(resolution.kernel, resolution.variant, folder, manifest.digest, state, metadata, dependencies)
