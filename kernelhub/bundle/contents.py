"""Contents: what a bundle holds, as its first members tell it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelhub.lockfile import LOCK_NAME, Lock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernelhub.index import Refs
    from kernelhub.store import StoredFile

SCHEMA = 1
CONTENTS = "bundle.json"
SUFFIX = ".tar.gz"


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
            "lock": None if self.lock_bytes is None else [len(self.lock_bytes), sha256_of(self.lock_bytes)],
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
        return sha256_of(self.contents)

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


def sha256_of(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
