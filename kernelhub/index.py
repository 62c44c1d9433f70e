"""Index: what resolution needs to know about repositories, whoever answers: the Hub, the store, a folder."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kernelhub.revision import version_of_branch

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

CONTENT_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
"""The hex digits of a git blob id, or of a sha256."""


class ContentHash(NamedTuple):
    """The hash that a listing promises for a file: ``git`` (blob id, sha1) or ``sha256``; ``hex`` digits."""

    algorithm: str
    hex: str


class ListedFile(NamedTuple):
    """One file of a build as listed: path inside the build folder, size in bytes, promised hash."""

    path: str
    size: int
    hash: ContentHash

    def hasher(self) -> ContentHasher:
        """A running hash to compare with the promised one."""
        return ContentHasher(self)

    def matches(self, data: bytes) -> bool:
        """Are these the promised bytes?"""
        hasher = self.hasher()
        hasher.update(data)
        return hasher.problem() is None


class ContentHasher:
    """Hashes a body as it arrives: sha256 always, and git's blob id where that is what the listing promises."""

    def __init__(self, listed: ListedFile) -> None:
        self._listed = listed
        self._sha256 = hashlib.sha256()
        # A git blob id is sha1 over this header and the content; it identifies, the transport is what protects.
        self._git = hashlib.sha1(b"blob %d\0" % listed.size, usedforsecurity=False)
        self.size = 0

    def update(self, chunk: bytes) -> None:
        self.size += len(chunk)
        self._sha256.update(chunk)
        if self._listed.hash.algorithm == "git":
            self._git.update(chunk)

    @property
    def sha256(self) -> str:
        return self._sha256.hexdigest()

    def problem(self) -> str | None:
        """How the bytes so far differ from the promise, or None when they are what was promised."""
        if self.size != self._listed.size:
            return f"{self.size} bytes, {self._listed.size} were announced"
        found = self._git.hexdigest() if self._listed.hash.algorithm == "git" else self.sha256
        if found != self._listed.hash.hex:
            return f"content hash {found}, {self._listed.hash.hex} was announced"
        return None


@dataclass(frozen=True)
class Refs:
    """Branches and tags of a repository with the commits they point to, and the repository's type on the Hub.

    ``moved_to`` is set when the Hub redirects this name to another repository; then there are no branches.
    ``pins`` maps revisions as they are written (``v3``, ``>=2``) to the commits that a lock gives them.
    """

    branches: Mapping[str, str] = field(default_factory=dict, hash=False)
    tags: Mapping[str, str] = field(default_factory=dict, hash=False)
    repo_type: str = "kernel"
    moved_to: str | None = None
    pins: Mapping[str, str] = field(default_factory=dict, hash=False)

    @property
    def versions(self) -> dict[int, str]:
        """API versions in numeric order, from the branches v0, v1, v2, ... and nothing else (S-33)."""
        found = {version_of_branch(branch): commit for branch, commit in self.branches.items()}
        return {version: found[version] for version in sorted(version for version in found if version is not None)}

    def find(self, name: str) -> str | None:
        """The commit of a locked revision, a branch or a tag."""
        return self.pins.get(name) or self.branches.get(name) or self.tags.get(name)


Builds = Mapping[str, "tuple[ListedFile, ...] | None"]
"""Build folder names to their files; None where the listing was too long to hold the files too."""


class Index(Protocol):
    """A place that knows repositories. Every method may raise ``FetchError`` or ``ResolutionError``."""

    name: str
    """Endpoint or folder, for messages."""

    def trusts(self, publisher: str) -> bool | None:
        """Does the Hub mark this organization as a trusted kernel publisher? None: nobody could be asked."""

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """All branches and tags; ``refresh`` asks for more than a remembered answer."""

    def commit(self, repo_id: str, revision: str) -> str:
        """The commit of a revision that ``refs`` does not list (a pull request, a short commit)."""

    def builds(self, repo_id: str, commit: str) -> Builds:
        """The folders under ``build/``."""

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """The files of one build folder."""

    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """The bytes of ``build/...`` file ``path`` (relative to the repository's root) from ``offset`` on.

        What the server announces is compared with ``expected``; comparing the bytes is up to who reads them.
        """


def split_path(path: str) -> tuple[str, str]:
    """Build folder and path below it of ``build/<variant>/<path>``; no folder for files elsewhere in a repository."""
    top, _, rest = path.partition("/")
    build, _, below = rest.partition("/")
    return (build, below) if top == "build" and below else ("", path)
