"""Metadata: what ``metadata.json`` says about a build, parsed strictly and within bounds (S-14, S-15)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from dataclasses import dataclass, field
from decimal import Decimal
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from packaging.version import Version

from kernelhub.backend import BACKENDS
from kernelhub.buildpath import METADATA, SIGNATURE, check_paths
from kernelhub.errors import InvalidMetadata, InvalidPath, InvalidRequest, shown
from kernelhub.request import checked_repo_id
from kernelhub.revision import MAX_VERSION, Revision

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MAX_BYTES = 1 << 20
_MAX_DEPTH = 32
_MAX_FILES = 10_000
_MAX_ID = 128
_MAX_NAME = 64
_ALGORITHMS = {"sha256": 32, "sha512": 64}
_BACKEND_TYPES = tuple(sorted(kind.name for kind in BACKENDS))
_UPSTREAM_SCHEMES = ("", "https", "http", "git", "ssh")

_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*", re.ASCII)
_ID = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# A string that is never closed ends with the text: were it no match, the search would start anew at each quote.
_BRACKETS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)|[\[{]|[\]}]', re.DOTALL)
_ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})|\\.",
    re.ASCII | re.DOTALL,
)
_LONGEST_INTEGER = 20


@dataclass(frozen=True)
class Digest:
    """The hashes that a build lists for its own files: ``files`` maps a relative path to its raw hash."""

    algorithm: str
    files: Mapping[str, bytes] = field(hash=False)


@dataclass(frozen=True)
class KernelDependency:
    """Another kernel that this one needs, at a version or revision."""

    repo_id: str
    revision: Revision


@dataclass(frozen=True)
class Metadata:
    """One build's metadata; absent keys are None or empty, as older builds lack most of them."""

    name: str | None = None
    id: str | None = None
    version: int | None = None
    license: str | None = None
    upstream: str | None = None
    source: str | None = None
    python_depends: tuple[str, ...] = ()
    kernel_depends: tuple[KernelDependency, ...] = ()
    backend: str | None = None
    archs: tuple[str, ...] = ()
    digest: Digest | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict, hash=False)
    kernels_minver: str | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What is worth saying about a build that is accepted all the same."""
        return () if self.license else ("the kernel states no license",)

    @classmethod
    def parse(cls, data: bytes, origin: str = "") -> Metadata:
        """Read the bytes of a ``metadata.json``.

        Raises:
            InvalidMetadata: with the key, or line and column, that is wrong; ``origin`` says where it came from.
        """
        document = _parse_json(data, origin)
        try:
            return _read(document)
        except (InvalidMetadata, InvalidPath, InvalidRequest) as error:
            raise InvalidMetadata(error.value, error.problem, error.expected, origin) from None


def seal(files: Mapping[str, bytes], facts: Mapping[str, Any]) -> bytes:
    """The bytes of a ``metadata.json`` with ``facts`` and the sha256 digest of ``files`` (paths without metadata)."""
    check_paths(files)
    hashes = {path: base64.b64encode(hashlib.sha256(files[path]).digest()).decode() for path in sorted(files)}
    document = {**facts, "digest": {"algorithm": "sha256", "files": hashes}}
    return json.dumps(document, indent=2).encode() + b"\n"


def _parse_json(data: bytes, origin: str) -> dict[str, Any]:
    text = _decode(data, origin)
    if not text.strip():
        raise InvalidMetadata(text, f"empty ({len(data)} bytes)", "a JSON object with name, id, ...", origin)
    if _depth(text) > _MAX_DEPTH:
        raise InvalidMetadata("...", f"nested deeper than {_MAX_DEPTH} levels", "a flat JSON object", origin)
    try:
        document = json.loads(
            text, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant, parse_int=_read_integer
        )
    except json.JSONDecodeError as error:
        raise InvalidMetadata("...", f"{error.msg} at {error.lineno}:{error.colno}", "JSON", origin) from None
    except InvalidMetadata as error:
        raise InvalidMetadata(error.value, error.problem, error.expected, origin) from None
    if not isinstance(document, dict) or not document:
        raise InvalidMetadata(document, "not a filled JSON object", "a JSON object with name, id, ...", origin)
    _refuse_surrogates(document, text, origin)
    return document


def _decode(data: bytes, origin: str) -> str:
    if len(data) > MAX_BYTES:
        raise InvalidMetadata(data[:16], f"{len(data)} bytes, more than {MAX_BYTES}", "a small JSON file", origin)
    if data.startswith(b"\xef\xbb\xbf"):
        raise InvalidMetadata(data[:3], "BOM at byte 0", "UTF-8 without a byte order mark", origin)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidMetadata(data[:16], f"not UTF-8 at byte {error.start}", "UTF-8", origin) from None


def _depth(text: str) -> int:
    """The deepest nesting of brackets outside strings, counted without recursion."""
    depth = deepest = 0
    for match in _BRACKETS.finditer(text):
        depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(match[0], 0)
        deepest = max(deepest, depth)
    return deepest


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for key, value in pairs:
        if key in keys:
            raise InvalidMetadata(key, f"duplicate key {shown(key)}", "each key once")
        keys[key] = value
    return keys


def _refuse_constant(name: str) -> Any:
    raise InvalidMetadata(name, f"{name} is not JSON", "a number")


def _read_integer(text: str) -> int | Decimal:
    """An int; ``-0`` and what is too long for any key stay as written, for the key's own check to refuse."""
    return Decimal(text) if text == "-0" or len(text) > _LONGEST_INTEGER else int(text)


def _refuse_surrogates(document: object, text: str, origin: str) -> None:
    for string in _strings(document):
        if not string.isascii() and any("\ud800" <= character <= "\udfff" for character in string):
            start = next((match.start() for match in _ESCAPE.finditer(text) if match["lone"]), 0)
            line, column = text.count("\n", 0, start) + 1, start - text.rfind("\n", 0, start)
            raise InvalidMetadata(string, f"lone surrogate at {line}:{column}", "valid Unicode", origin)


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)


def _read(document: dict[str, Any]) -> Metadata:
    digest = _read_digest(document.get("digest"))
    for key in ("id", "name", "version"):
        if digest is not None and document.get(key) is None:
            raise InvalidMetadata(None, f"key {key!r} is missing", "name, id, version, backend and digest")
    backend, archs = _read_backend(document.get("backend"), required=digest is not None)
    return Metadata(
        name=_read_name(document.get("name")),
        id=_read_id(document.get("id")),
        version=_read_version(document.get("version")),
        license=_read_text(document, "license"),
        upstream=_read_upstream(_read_text(document, "upstream")),
        source=_read_text(document, "source"),
        python_depends=_read_names(document, "python-depends"),
        kernel_depends=tuple(map(_read_dependency, _read_list(document, "kernel-depends"))),
        backend=backend,
        archs=archs,
        digest=digest,
        provenance=_read_object(document, "provenance"),
        kernels_minver=_read_minver(_read_text(document, "kernels-minver")),
    )


def _read_list(document: Mapping[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidMetadata(value, f"key {key!r} is a {type(value).__name__}", "a list")
    return value


def _read_object(document: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = document.get(key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidMetadata(value, f"key {key!r} is a {type(value).__name__}", "an object")
    return value


def _read_names(document: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = _read_list(document, key)
    for name in names:
        if not isinstance(name, str) or not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
            raise InvalidMetadata(name, f"entry of {key!r}", "package names")
    return tuple(names)


def _read_text(document: Mapping[str, Any], key: str) -> str | None:
    value = document.get(key)
    if value is not None and not isinstance(value, str):
        raise InvalidMetadata(value, f"key {key!r} is a {type(value).__name__}", "a string")
    return value


def _read_name(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _NAME.fullmatch(value) or not 2 <= len(value) <= _MAX_NAME:
        raise InvalidMetadata(value, "key 'name'", f"2 to {_MAX_NAME} lower-case letters, digits and dashes")
    return value


def _read_id(value: object) -> str | None:
    if value is None:
        return None
    if not isinstance(value, str) or not _ID.fullmatch(value) or len(value) > _MAX_ID:
        raise InvalidMetadata(value, "key 'id' is not an identifier", f"a Python name of at most {_MAX_ID} characters")
    return value


def _read_version(value: object) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 0 <= value <= MAX_VERSION:
        raise InvalidMetadata(value, "key 'version'", f"an integer from 0 to {MAX_VERSION}")
    return value


def _read_upstream(value: str | None) -> str | None:
    try:
        scheme = urlsplit(value or "").scheme
    except ValueError as error:
        raise InvalidMetadata(value, f"key 'upstream': {error}", "an https address") from None
    if scheme not in _UPSTREAM_SCHEMES:
        raise InvalidMetadata(value, f"scheme {shown(scheme)} of 'upstream'", "an https address")
    return value


def _read_minver(value: str | None) -> str | None:
    """The oldest version of the ``kernels`` package that the build says it needs: shown, never compared with ours."""
    try:
        return value if value is None else str(Version(value))
    except ValueError:  # InvalidVersion, or a number of more digits than Python converts
        raise InvalidMetadata(value, "key 'kernels-minver'", "a version such as 0.17.0") from None


def _read_backend(value: object, *, required: bool) -> tuple[str | None, tuple[str, ...]]:
    if value is None and not required:
        return None, ()
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(value, dict) or kind not in _BACKEND_TYPES:
        raise InvalidMetadata(value, "key 'backend.type'", f"one of {', '.join(_BACKEND_TYPES)}")
    archs = _read_list(value, "archs")
    if not all(isinstance(arch, str) and 0 < len(arch) <= _MAX_NAME for arch in archs):
        raise InvalidMetadata(archs, "key 'backend.archs'", "a list of architecture names")
    return kind, tuple(archs)


def _read_dependency(value: object) -> KernelDependency:
    expected = '{"repo-id": "org/name", "version": 1} or {"repo-id": ..., "revision": ...}'
    if not isinstance(value, dict) or set(value) not in ({"repo-id", "version"}, {"repo-id", "revision"}):
        raise InvalidMetadata(value, "entry of 'kernel-depends'", expected)
    revision = Revision.version(value["version"]) if "version" in value else Revision.parse(value["revision"])
    return KernelDependency(checked_repo_id(value["repo-id"]), revision)


def _read_digest(value: object) -> Digest | None:
    if value is None:
        return None
    algorithm = value.get("algorithm") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(algorithm, str) or algorithm not in _ALGORITHMS:
        raise InvalidMetadata(value, "key 'digest.algorithm'", f"one of {', '.join(_ALGORITHMS)}")
    files = value.get("files")
    if not isinstance(files, dict) or len(files) > _MAX_FILES:
        raise InvalidMetadata(files, "key 'digest.files'", f"an object of at most {_MAX_FILES} paths")
    check_paths(files)
    for path in (METADATA, SIGNATURE):
        if path in files:
            raise InvalidMetadata(path, "key 'digest.files' lists the metadata itself", "the build's other files")
    size = _ALGORITHMS[algorithm]
    return Digest(algorithm, {path: _read_hash(path, files[path], size) for path in files})


def _read_hash(path: str, value: object, size: int) -> bytes:
    try:
        raw = base64.b64decode(value, validate=True) if isinstance(value, str) else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != size or base64.b64encode(raw).decode() != value:
        raise InvalidMetadata(value, f"digest of {path!r}", f"canonical base64 of {size} bytes")
    return raw
