"""Manifest: what a stored build consists of, where it came from, and what its files looked like when verified."""

from __future__ import annotations

import contextlib
import hashlib
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelhub.durable import read_json, sweep, write_json

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

SCHEMA = 1
MANIFEST = "manifest.json"
RECEIPT = "receipt.json"
FILES = "files"


class StoredFile(NamedTuple):
    """One file of a stored build: path, size in bytes, sha256 in hex."""

    path: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """What a stored build consists of and where it came from."""

    repo_id: str
    commit: str
    variant: str
    endpoint: str
    files: tuple[StoredFile, ...]

    @property
    def digest(self) -> str:
        """sha256 over the sorted list of paths and hashes: two builds with the same digest are the same code."""
        lines = "".join(f"{file.sha256}  {file.path}\n" for file in sorted(self.files))
        return hashlib.sha256(lines.encode()).hexdigest()

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def to_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "schema": SCHEMA, "files": [file._asdict() for file in self.files]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Manifest:
        files = tuple(StoredFile(file["path"], file["size"], file["sha256"]) for file in data["files"])
        return cls(data["repo_id"], data["commit"], data["variant"], data["endpoint"], files)


class FileStat(NamedTuple):
    """What a ``stat`` says about a verified file; any difference means "hash it again"."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    links: int = 1

    @classmethod
    def of(cls, result: os.stat_result) -> FileStat:
        return cls(result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino, result.st_nlink)


@dataclass(frozen=True)
class StoredBuild:
    """A complete build in the store.

    ``id`` was drawn when it was published: a build that took its place has another one. ``always_hash`` is set where
    others can write (S-18): no stat proves anything then. ``scratch`` is where a receipt may be written before it takes
    its place, None where nothing may be written.
    """

    folder: Path
    manifest: Manifest
    id: str = ""
    always_hash: bool = False
    scratch: Path | None = None

    @property
    def files_folder(self) -> Path:
        return self.folder / FILES

    @property
    def is_current(self) -> bool:
        """Is this build still the one under its name?"""
        current = read_build(self.folder)
        return current is not None and current.id == self.id

    def receipt(self) -> dict[str, FileStat]:
        """The stats of the files when they were last verified; empty when unreadable or absent."""
        data = read_json(self.folder / RECEIPT)
        try:
            return {path: FileStat(*stat) for path, stat in data["files"].items()} if data else {}
        except (KeyError, TypeError, AttributeError):
            return {}

    def write_receipt(self, stats: Mapping[str, FileStat]) -> None:
        """Remember a verification; a store that cannot be written (read-only mount) simply verifies again."""
        self._write(RECEIPT, {"files": {path: list(stats[path]) for path in stats}})

    def kept(self, name: str, depends_on: object) -> dict[str, Any] | None:
        """What was found about this build and kept as ``name``, if nothing that it depends on has changed.

        Besides ``depends_on`` that is the build itself: files that were copied here, with whatever lay beside them,
        are not the files that the finding was made on. None where others can write.
        """
        data = None if self.always_hash else read_json(self.folder / f"{name}.json")
        return data if data is not None and data.get("depends_on") == self._fingerprint(depends_on) else None

    def keep(self, name: str, facts: Mapping[str, Any], depends_on: object) -> None:
        """Keep a finding beside the receipt, where one would be kept."""
        self._write(f"{name}.json", {**facts, "depends_on": self._fingerprint(depends_on)})

    def _fingerprint(self, depends_on: object) -> str:
        first = self.manifest.files[0].path if self.manifest.files else ""
        try:
            stat = FileStat.of((self.files_folder / first).stat(follow_symlinks=False))
        except OSError:
            stat = None
        return hashlib.sha256(repr((self.id, self.manifest.digest, stat, depends_on)).encode()).hexdigest()

    def _write(self, name: str, facts: Mapping[str, Any]) -> None:
        if self.scratch is None or self.always_hash or not os.access(self.folder, os.W_OK):
            return
        with contextlib.suppress(OSError):
            write_json(self.folder / name, {"schema": SCHEMA, **facts}, self.scratch, durable=False)
        sweep(self.scratch)  # who was killed while it wrote this may have left something


def read_build(folder: Path, scratch: Path | None = None, *, always_hash: bool = False) -> StoredBuild | None:
    """The build in a folder of the store; None without a readable manifest."""
    data = read_json(folder / MANIFEST)
    try:
        return (
            StoredBuild(folder, Manifest.from_dict(data), str(data.get("id")), always_hash, scratch) if data else None
        )
    except (KeyError, TypeError):
        return None
