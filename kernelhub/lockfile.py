"""Lock file: which commit and which bytes serve each request, on every machine, until somebody upgrades.

``kernelhub.lock`` is TOML with one ``[[kernel]]`` per request or dependency and one line per file::

    schema = 1

    [[kernel]]
    request = "org/repo@v1"
    commit = "<40 hex>"
    dependencies = ["org/other@v2"]

    [kernel.variants.torch-cuda]
    "__init__.py" = "git:<sha1 of the blob> 1234"
    "_ops.abi3.so" = "sha256:<hex> 56789"

A lock narrows what may be loaded and never grants trust (S-30). The peer's ``kernels.lock`` is read in both of its
formats (hub-format section 8); it pins commits only.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import tomli_w

from kernelhub.buildpath import check_paths
from kernelhub.durable import replace_file
from kernelhub.errors import InvalidLockfile, InvalidPath, InvalidRequest, InvalidVariant, shown
from kernelhub.index import ContentHash, ListedFile
from kernelhub.request import KernelRequest, checked_repo_id
from kernelhub.revision import Revision
from kernelhub.tomltext import NotToml, parse_toml
from kernelhub.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

LOCK_NAME = "kernelhub.lock"
SCHEMA = 1
MAX_BYTES = 4 << 20

_KEYS = {"request", "commit", "dependencies", "dependency", "variants"}
_FILE = re.compile(
    r"(?:git:(?P<git>[0-9a-f]{40})|sha256:(?P<sha256>[0-9a-f]{64})) (?P<size>0|[1-9][0-9]{0,15})", re.ASCII
)
_MERGE = re.compile(r"^(?:<{7}|={7}|>{7})", re.MULTILINE)


@dataclass(frozen=True)
class LockedKernel:
    """One locked kernel: ``request`` without a symbol, always with a revision.

    ``dependency`` is True when nobody asked for it but another kernel. ``variants`` maps each build to its files;
    it is empty in locks of the peer, which list no files.
    """

    request: KernelRequest
    commit: str
    dependencies: tuple[str, ...] = ()
    dependency: bool = False
    variants: Mapping[str, tuple[ListedFile, ...]] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return str(self.request)


@dataclass(frozen=True)
class Lock:
    """All locked kernels of a project."""

    kernels: tuple[LockedKernel, ...] = ()
    origin: str = field(default="", compare=False)

    @classmethod
    def read(cls, path: Path) -> Lock:
        """Read ``kernelhub.lock`` or the peer's ``kernels.lock``.

        Raises:
            InvalidLockfile: the path cannot be read, or what is wrong in it and where.
        """
        try:
            if path.stat().st_size > MAX_BYTES:
                raise InvalidLockfile(str(path), f"{path.stat().st_size} bytes, more than {MAX_BYTES}")
            data = path.read_bytes()
        except OSError as error:
            raise InvalidLockfile(str(path), f"cannot be read ({error.strerror})", "a lock file") from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, origin: str = LOCK_NAME) -> Lock:
        """Read the bytes of a lock file in any of the three formats; ``parse(x.dump()) == x``.

        Raises:
            InvalidLockfile: as in ``read``.
        """
        text = _decode(data, origin)
        try:
            # A TOML lock starts with its schema, as a table header in front would swallow it; JSON with a bracket.
            kernels = _read_json_lock(text) if text.lstrip()[0] in "[{" else _read_toml(text)
        except (InvalidRequest, InvalidPath, InvalidVariant) as error:
            raise InvalidLockfile(error.value, error.problem, error.expected, origin) from None
        except InvalidLockfile as error:
            raise InvalidLockfile(error.value, error.problem, error.expected, origin) from None
        _refuse_ambiguous(kernels, origin)
        return cls(kernels, origin)

    def dump(self) -> bytes:
        """Canonical TOML: the same lock gives the same bytes."""
        kernels = sorted(self.kernels, key=lambda kernel: kernel.name)
        document = {"schema": SCHEMA, "kernel": [_plain(kernel) for kernel in kernels]}
        head = "# Written by `kernelhub lock`; commit it, do not edit it.\n"
        return (head + tomli_w.dumps(document)).encode()

    def write(self, path: Path) -> None:
        """Replace the file as a whole: a crash leaves the old lock or the new one, never a part."""
        replace_file(path, self.dump(), 0o644)

    def find(self, repo_id: str, revision: Revision) -> LockedKernel | None:
        """The entry of a repository at the revision that was locked."""
        wanted = KernelRequest(repo_id, revision=revision)
        return next((kernel for kernel in self.kernels if kernel.request == wanted), None)

    def of_repository(self, repo_id: str) -> tuple[LockedKernel, ...]:
        return tuple(kernel for kernel in self.kernels if kernel.request.repo_id == repo_id)


def _decode(data: bytes, origin: str) -> str:
    if len(data) > MAX_BYTES:
        raise InvalidLockfile(data[:16], f"{len(data)} bytes, more than {MAX_BYTES}", "a lock file", origin)
    if data.startswith(b"\xef\xbb\xbf"):
        raise InvalidLockfile(data[:3], "BOM at byte 0", "UTF-8 without a byte order mark", origin)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidLockfile(data[:16], f"not UTF-8 at byte {error.start}", "UTF-8", origin) from None
    text = text.replace("\r\n", "\n")
    if not text.strip():
        raise InvalidLockfile("", "empty file", "the output of `kernelhub lock`", origin)
    if conflict := _MERGE.search(text):
        line = text.count("\n", 0, conflict.start()) + 1
        raise InvalidLockfile(conflict[0], f"unresolved merge conflict, line {line}", "run `kernelhub lock`", origin)
    return text


def _read_toml(text: str) -> tuple[LockedKernel, ...]:
    try:
        document = parse_toml(text.encode())
    except NotToml as error:
        raise InvalidLockfile("...", str(error), "TOML") from None
    if document.get("schema") != SCHEMA:
        raise InvalidLockfile(document.get("schema"), "unknown schema version", f"schema = {SCHEMA}")
    for key in document:
        if key not in ("schema", "kernel"):
            raise InvalidLockfile(key, f"unknown field {shown(key)}", "schema and [[kernel]]")
    kernels = document.get("kernel", [])
    if not isinstance(kernels, list):
        raise InvalidLockfile(kernels, "field 'kernel' is not an array of tables", "[[kernel]]")
    return tuple(_read_kernel(kernel) for kernel in kernels)


def _read_kernel(entry: Any) -> LockedKernel:
    if not isinstance(entry, dict):
        raise InvalidLockfile(entry, "not a table", "[[kernel]]")
    for key in entry:
        if key not in _KEYS:
            raise InvalidLockfile(key, f"unknown field {shown(key)} of a kernel", f"one of {', '.join(sorted(_KEYS))}")
    variants = entry.get("variants", {})
    if not isinstance(variants, dict):
        raise InvalidLockfile(variants, "field 'variants' is not a table", "[kernel.variants.<name>]")
    dependencies = entry.get("dependencies", [])
    if not isinstance(dependencies, list):
        raise InvalidLockfile(dependencies, "field 'dependencies' is not a list", '["org/repo@v1"]')
    return LockedKernel(
        request=_read_request(entry.get("request")),
        commit=_read_commit(entry.get("commit")),
        dependencies=tuple(str(_read_request(dependency)) for dependency in dependencies),
        dependency=_read_flag(entry.get("dependency", False)),
        variants={str(Variant.parse(name)): _read_files(name, files) for name, files in variants.items()},
    )


def _read_request(value: Any) -> KernelRequest:
    request = KernelRequest.parse(value)
    if request.repo_id is None or request.revision is None or request.symbol is not None:
        raise InvalidLockfile(value, "field 'request'", '"org/repo@v1"')
    return request


def _read_commit(value: Any) -> str:
    if isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value.lower(), re.ASCII):
        raise InvalidLockfile(value, "commit has 64 hex digits", "40 hex digits, as the Hub uses")
    if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{40}", value.lower(), re.ASCII):
        raise InvalidLockfile(value, "field 'commit'", "40 hex digits")
    return value.lower()


def _read_flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidLockfile(value, "field 'dependency'", "true or false")
    return value


def _read_files(variant: str, files: Any) -> tuple[ListedFile, ...]:
    if not isinstance(files, dict):
        raise InvalidLockfile(files, f"variant {variant!r} is not a table", '"path" = "git:<hex> <size>"')
    check_paths(files)
    return tuple(_read_file(path, value) for path, value in files.items())


def _read_file(path: str, value: Any) -> ListedFile:
    match = _FILE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidLockfile(value, f"file {path!r}", '"git:<40 hex> <size>" or "sha256:<64 hex> <size>"')
    content = ContentHash("git", match["git"]) if match["git"] else ContentHash("sha256", match["sha256"])
    return ListedFile(path, int(match["size"]), content)


def _read_json_lock(text: str) -> tuple[LockedKernel, ...]:
    """The peer's formats: a list of ``{"dependency", "lock"}``, or of ``{"repo_id", "sha", "variants"}``."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidLockfile("...", str(error), "JSON") from None
    if not isinstance(document, list):
        raise InvalidLockfile(type(document).__name__, "not a list of locked kernels", "the peer's kernels.lock")
    return tuple(_read_peer_entry(entry) for entry in document)


def _read_peer_entry(entry: Any) -> LockedKernel:
    if not isinstance(entry, dict):
        raise InvalidLockfile(entry, "not an object", '{"dependency": ..., "lock": ...}')
    if set(entry) == {"dependency", "lock"}:
        return _read_current_entry(entry["dependency"], entry["lock"])
    if set(entry) == {"repo_id", "sha", "variants"}:
        # This format had no versions: a kernel was what its main branch held.
        repo_id = checked_repo_id(entry["repo_id"])
        return LockedKernel(KernelRequest(repo_id, revision=Revision.version(1)), _read_commit(entry["sha"]))
    raise InvalidLockfile(sorted(entry), "unknown fields", "dependency and lock, or repo_id, sha and variants")


def _read_current_entry(dependency: Any, lock: Any) -> LockedKernel:
    if not isinstance(dependency, dict) or set(dependency) not in ({"repo-id", "version"}, {"repo-id", "revision"}):
        raise InvalidLockfile(dependency, "field 'dependency'", '{"repo-id": "org/repo", "version": 1}')
    if not isinstance(lock, dict) or set(lock) != {"commit"}:
        raise InvalidLockfile(lock, "field 'lock'", '{"commit": "<40 hex>"}')
    if "version" in dependency:
        revision = Revision.version(dependency["version"])
    else:
        revision = Revision.parse(str(dependency["revision"]))
    request = KernelRequest(checked_repo_id(dependency["repo-id"]), revision=revision)
    return LockedKernel(request, _read_commit(lock["commit"]))


def _refuse_ambiguous(kernels: Iterable[LockedKernel], origin: str) -> None:
    seen: dict[str, LockedKernel] = {}
    names: set[str] = set()
    for kernel in kernels:
        if kernel.name in names:
            raise InvalidLockfile(kernel.name, "locked twice", "each request once", origin)
        names.add(kernel.name)
        if kernel.dependency:
            continue
        other = seen.setdefault(str(kernel.request.repo_id), kernel)
        if other is not kernel:
            raise InvalidLockfile(kernel.name, f"ambiguous: {other.name} is locked too", "one version", origin)


def _plain(kernel: LockedKernel) -> dict[str, Any]:
    plain: dict[str, Any] = {"request": kernel.name, "commit": kernel.commit}
    if kernel.dependency:
        plain["dependency"] = True
    if kernel.dependencies:
        plain["dependencies"] = list(kernel.dependencies)
    plain["variants"] = {name: _plain_files(kernel.variants[name]) for name in sorted(kernel.variants)}
    return plain


def _plain_files(files: tuple[ListedFile, ...]) -> dict[str, str]:
    return {file.path: f"{file.hash.algorithm}:{file.hash.hex} {file.size}" for file in sorted(files)}
