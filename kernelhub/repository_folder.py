"""A folder of repositories read as git would: blob, tree and commit ids, and all states seen so far.

Layout: ``<root>/<org>/<repo>/<branch>/...files...``. Beside the branches of a repository may lie
``repository.json`` (see `RepositorySettings`), beside the repositories of an organization
``organization.json``. Names that begin with a dot, ``__pycache__``, and links that lead out of the root are
not part of any repository.

Ids are those that git computes: ``git hash-object`` for a file, ``git write-tree`` for a folder, and a commit
without parent, author date 0 and the repository id as its message. As on the Hub, a large or binary file is
an LFS file: its blob is the pointer text, its body is known by SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kernelhub.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

LFS_SUFFIXES = (".so", ".dll", ".dylib", ".safetensors")
LFS_THRESHOLD = 1 << 20
_CHUNK = 1 << 20
# A write may leave the time stamp as it was when it follows within one tick of the kernel's clock (git calls
# such an entry racily clean), so younger files are read again at the next look.
_SETTLED_AFTER_NS = 100_000_000
_SEGMENT = re.compile(r"(?!\.)[A-Za-z0-9._-]+")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"v(\d+)")
_SETTING_TYPES = {"type": str, "tags": dict, "redirect": str, "gated": bool, "private": bool}
_SIGNATURE = "kernelhub <serve@kernelhub.invalid> 0 +0000"


def git_id(kind: str, content: bytes) -> str:
    """The SHA-1 object id that git gives ``content`` as an object of ``kind`` (blob, tree, commit)."""
    return hashlib.sha1(f"{kind} {len(content)}\0".encode() + content, usedforsecurity=False).hexdigest()


def lfs_pointer(sha256: str, size: int) -> bytes:
    """The text that git stores in place of an LFS file (Git LFS specification, version 1)."""
    return f"version https://git-lfs.github.com/spec/v1\noid sha256:{sha256}\nsize {size}\n".encode()


@dataclass(frozen=True)
class File:
    """One file of a commit. ``oid`` is its git blob id, for an LFS file that of the pointer."""

    oid: str
    sha256: str
    size: int
    pointer_size: int | None
    body: Path

    @property
    def lfs(self) -> bool:
        return self.pointer_size is not None

    @property
    def etag(self) -> str:
        """What the Hub names the body by: the SHA-256 of an LFS file, else the blob id."""
        return self.sha256 if self.lfs else self.oid


@dataclass(frozen=True)
class Folder:
    """One folder of a commit; ``oid`` is its git tree id."""

    oid: str


Entry: TypeAlias = "File | Folder"


@dataclass(frozen=True)
class Commit:
    """One state of a branch: ``entries`` maps each path to its file or folder, in git's order."""

    id: str
    tree: str
    entries: Mapping[str, Entry]
    modified: float

    def listing(self, path: str = "", *, recursive: bool = False) -> list[tuple[str, Entry]] | None:
        """The entries under the folder ``path`` (``""`` is the root); None when there is no such folder."""
        if path and not isinstance(self.entries.get(path), Folder):
            return None
        prefix = f"{path}/" if path else ""
        under = [(name, entry) for name, entry in self.entries.items() if name.startswith(prefix)]
        return under if recursive else [pair for pair in under if "/" not in pair[0][len(prefix) :]]


@dataclass(frozen=True)
class Stamp:
    """What ``stat`` says about a file: equal stamps mean equal contents, once the file has settled."""

    size: int
    modified_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, status: os.stat_result) -> Stamp:
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def settled(self, now_ns: int) -> bool:
        return max(self.modified_ns, self.changed_ns) + _SETTLED_AFTER_NS < now_ns


class ContentStore:
    """Copies of all file bodies ever seen, named by SHA-256, so that old commits outlive their folder."""

    def __init__(self, folder: Path, *, lfs_threshold: int = LFS_THRESHOLD) -> None:
        self._folder = folder
        self._lfs_threshold = lfs_threshold
        self._known: dict[Path, tuple[Stamp, File]] = {}

    def add(self, path: Path, stamp: Stamp) -> File:
        """The file at ``path``, read and copied only when its stamp is new or too young to be believed."""
        known = self._known.get(path)
        if known is not None and known[0] == stamp:
            return known[1]
        now = time.time_ns()
        file = self._copy(path)
        if stamp.settled(now):
            self._known[path] = (stamp, file)
        return file

    def _copy(self, path: Path) -> File:
        """Hash what is written, not what lies in the folder, which may change meanwhile."""
        digest, size = hashlib.sha256(), 0
        with path.open("rb") as source, tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as copy:
            while chunk := source.read(_CHUNK):
                digest.update(chunk)
                size += copy.write(chunk)
        body = self._folder / digest.hexdigest()
        Path(copy.name).replace(body)
        return self._file(path.suffix, digest.hexdigest(), size, body)

    def _file(self, suffix: str, sha256: str, size: int, body: Path) -> File:
        if size >= self._lfs_threshold or suffix in LFS_SUFFIXES:
            pointer = lfs_pointer(sha256, size)
            return File(git_id("blob", pointer), sha256, size, len(pointer), body)
        return File(git_id("blob", body.read_bytes()), sha256, size, None, body)


@dataclass(frozen=True)
class RepositorySettings:
    """``repository.json``: ``type`` (kernel or model), ``tags`` (name to branch or commit), ``redirect`` (the
    new id of a renamed repository), ``gated`` and ``private``. All are optional."""

    type: str = "kernel"
    tags: Mapping[str, str] = field(default_factory=dict)
    redirect: str | None = None
    gated: bool = False
    private: bool = False

    @classmethod
    def read(cls, path: Path) -> RepositorySettings:
        """Raises `kernelhub.errors.InvalidConfig` when the file is not an object of these keys."""
        values = read_object(path)
        for key, value in values.items():
            if not isinstance(value, _SETTING_TYPES.get(key, ())):
                raise InvalidConfig(key, "unknown key or wrong type", ", ".join(_SETTING_TYPES), str(path))
        settings = cls(**values)
        if settings.type not in ("kernel", "model"):
            raise InvalidConfig(settings.type, "unknown repository type", "kernel or model", str(path))
        return settings


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty when there is no file; `InvalidConfig` when it is something else."""
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise InvalidConfig(path.name, str(error), "JSON", str(path)) from error
    if not isinstance(values, dict):
        raise InvalidConfig(values, "not a JSON object", origin=str(path))
    return values


class RepositoryFolder:
    """One repository: a folder of branches, and every commit that they were seen at."""

    def __init__(self, root: Path, repo_id: str, store: ContentStore) -> None:
        self.repo_id = repo_id
        self._root = root
        self._path = root / repo_id
        self._store = store
        self._commits: dict[str, Commit] = {}
        self._heads: dict[Path, tuple[list[tuple[str, Stamp]], Commit]] = {}
        self._lock = threading.Lock()

    @property
    def settings(self) -> RepositorySettings:
        return RepositorySettings.read(self._path / "repository.json")

    def branches(self) -> dict[str, Commit]:
        """The branches as they are now; ``main`` is the newest version when there is no such folder."""
        return {name: self._head(folder) for name, folder in self._branch_folders().items()}

    def tags(self) -> dict[str, Commit]:
        """The tags of ``repository.json`` whose target exists."""
        targets = {name: self._branch_or_commit(target) for name, target in self.settings.tags.items()}
        return {name: commit for name, commit in targets.items() if commit is not None}

    def commit(self, revision: str) -> Commit | None:
        """What a branch, a tag, ``refs/heads/...``, ``refs/tags/...`` or a full commit id names."""
        name = revision.removeprefix("refs/heads/").removeprefix("refs/tags/")
        found = self._branch_or_commit(name)
        target = self.settings.tags.get(name) if found is None else None
        return found if target is None else self._branch_or_commit(target)

    def _branch_or_commit(self, name: str) -> Commit | None:
        if _COMMIT.fullmatch(name):
            if name not in self._commits:
                self.branches()
            return self._commits.get(name)
        folder = self._branch_folders().get(name)
        return None if folder is None else self._head(folder)

    def _branch_folders(self) -> dict[str, Path]:
        folders = {}
        for path in sorted(self._path.iterdir()):
            if _listed(path.name) and path.is_dir() and path.resolve().is_relative_to(self._root):
                folders[path.name] = path.resolve()
        versions = [name for name in folders if _VERSION.fullmatch(name)]
        if versions and "main" not in folders:
            folders["main"] = folders[max(versions, key=lambda name: int(name[1:]))]
        return folders

    def _head(self, folder: Path, attempts: int = 3) -> Commit:
        """The commit of a branch folder; looks again when files go away while they are read."""
        try:
            with self._lock:
                return self._scan(folder)
        except FileNotFoundError:
            if attempts == 1:
                raise
        return self._head(folder, attempts - 1)

    def _scan(self, folder: Path) -> Commit:
        """Build the commit anew only when a stat of its files says that they changed."""
        now = time.time_ns()
        found = list(_files(folder, self._root))
        seen = [(path, stamp) for path, _, stamp in found]
        known = self._heads.get(folder)
        if known is not None and known[0] == seen:
            return known[1]
        commit = self._build(found)
        if all(stamp.settled(now) for _, stamp in seen):
            self._heads[folder] = (seen, commit)
        return self._commits.setdefault(commit.id, commit)

    def _build(self, found: list[tuple[str, Path, Stamp]]) -> Commit:
        tree: _Tree = {}
        for path, source, stamp in found:
            *folders, name = path.split("/")
            level = tree
            for folder in folders:
                level = level.setdefault(folder, {})  # type: ignore[assignment]  # a folder is never a file too
            level[name] = self._store.add(source, stamp)
        oid, entries = _tree_entries(tree, "")
        modified = max((stamp.modified_ns for _, _, stamp in found), default=0) / 1e9
        text = f"tree {oid}\nauthor {_SIGNATURE}\ncommitter {_SIGNATURE}\n\n{self.repo_id}\n"
        return Commit(git_id("commit", text.encode()), oid, dict(entries), modified)


class HubFolder:
    """The root folder: organizations and their repositories, found by name."""

    def __init__(self, root: Path, store: ContentStore) -> None:
        self._root = root.resolve()
        self._store = store
        self._repositories: dict[str, RepositoryFolder] = {}

    def repository(self, repo_id: str) -> RepositoryFolder | None:
        """The repository ``org/name``; None when there is no such folder inside the root."""
        if repo_id.count("/") != 1 or not self._is_folder(*repo_id.split("/")):
            return None
        return self._repositories.setdefault(repo_id, RepositoryFolder(self._root, repo_id, self._store))

    def organization(self, name: str) -> dict[str, Any] | None:
        """What ``organization.json`` says, ``{}`` without it; None when there is no such organization."""
        return read_object(self._root / name / "organization.json") if self._is_folder(name) else None

    def _is_folder(self, *names: str) -> bool:
        path = self._root.joinpath(*names)
        inside = all(_SEGMENT.fullmatch(name) for name in names) and path.resolve().is_relative_to(self._root)
        return inside and path.is_dir()


_Tree: TypeAlias = "dict[str, File | _Tree]"


def _tree_entries(tree: _Tree, prefix: str) -> tuple[str, list[tuple[str, Entry]]]:
    """The tree id of a folder, and its entries below ``prefix``, each folder before what it holds."""
    content, entries = b"", list[tuple[str, Entry]]()
    for name in sorted(tree, key=lambda name: _git_order(name, tree[name])):
        node = tree[name]
        if isinstance(node, File):
            mode, oid, below = "100644", node.oid, list[tuple[str, Entry]]()
            entries.append((prefix + name, node))
        else:
            mode, (oid, below) = "40000", _tree_entries(node, f"{prefix}{name}/")
            entries += [(prefix + name, Folder(oid)), *below]
        content += f"{mode} {name}\0".encode() + bytes.fromhex(oid)
    return git_id("tree", content), entries


def _git_order(name: str, node: File | _Tree) -> bytes:
    """Git compares names as bytes, those of folders as if they ended in a slash."""
    return (name if isinstance(node, File) else f"{name}/").encode()


def _files(folder: Path, root: Path, prefix: str = "") -> Iterator[tuple[str, Path, Stamp]]:
    """Each file to serve below ``folder``: its path in the repository, where it lies, its stamp.

    A link to a file is followed inside ``root``; a link to a folder never, for it could lead in circles.
    """
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if not _listed(entry.name):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path), root, f"{prefix}{entry.name}/")
        elif (status := _regular(entry, root)) is not None:
            yield prefix + entry.name, Path(entry.path), Stamp.of(status)


def _regular(entry: os.DirEntry[str], root: Path) -> os.stat_result | None:
    """The status of a regular file inside ``root``; None for anything else, or when it cannot be reached."""
    try:
        status = entry.stat()
        inside = not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(root)
    except OSError:  # gone since, or a link to nothing or in circles
        return None
    return status if inside and stat.S_ISREG(status.st_mode) else None


def _listed(name: str) -> bool:
    """Whether a name is part of the repository; one that is not UTF-8 has no place in JSON or a URL."""
    utf8 = name.encode(errors="ignore").decode() == name
    return utf8 and not name.startswith(".") and name != "__pycache__"
