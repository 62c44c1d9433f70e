"""Build path: the one rule for names of files inside a build, wherever they come from (S-10 to S-13, S-16).

Applied to listings, metadata, lock files, archives and folders on disk before anything is opened.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from kernelhub.errors import InvalidPath

if TYPE_CHECKING:
    from collections.abc import Iterable

METADATA = "metadata.json"
SIGNATURE = "metadata.json.sigstore"

_LONGEST = 255
_DEEPEST = 16
_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+\- ]*", re.ASCII)
_BYTECODE = (".pyc", ".pyo", ".pth")
_RESERVED = frozenset(
    ["con", "prn", "aux", "nul", *(f"{device}{digit}" for device in ("com", "lpt") for digit in range(1, 10))]
)


def check_path(path: str) -> str:
    """``path`` itself if it may name a file of a build: relative, ``/``-separated, plain ASCII, no bytecode.

    Raises:
        InvalidPath: with the rule that it breaks.
    """
    problem = _problem(path)
    if problem:
        raise InvalidPath(path, problem, "a relative path of plain ASCII names joined by '/'")
    return path


def check_paths(paths: Iterable[str]) -> None:
    """Check every path, and that they can lie side by side, also on a case-insensitive file system.

    Raises:
        InvalidPath: the first offending path: names a file or folder that differs from another one in letter case
            only, or a file that is also a folder.
    """
    seen: dict[str, str] = {}
    files: set[str] = set()
    folders: set[str] = set()
    for path in paths:
        check_path(path)
        segments = path.split("/")
        parents = {"/".join(segments[:depth]) for depth in range(1, len(segments))}
        for name in (*sorted(parents), path):
            twin = seen.setdefault(name.casefold(), name)
            if twin != name:
                expected = "names that differ in more than case"
                raise InvalidPath(path, f"same name as {twin!r} but for letter case", expected)
        files.add(path)
        folders |= parents
        if path in folders or not files.isdisjoint(parents):
            raise InvalidPath(path, "a file and a folder of one name", "each name once")


def is_bytecode(path: str) -> bool:
    """Compiled Python, which is never read, written or downloaded (S-16)."""
    return path.endswith(_BYTECODE) or "__pycache__" in path.split("/")


def _problem(path: str) -> str | None:
    if len(path) > _LONGEST:
        return f"length {len(path)} > {_LONGEST}"
    if "\\" in path:
        return "backslash"
    segments = path.split("/")
    if len(segments) > _DEEPEST:
        return f"{len(segments)} levels deep, more than {_DEEPEST}"
    if is_bytecode(path):
        return "Python bytecode"
    return next((problem for segment in segments if (problem := _segment_problem(segment))), None)


def _segment_problem(segment: str) -> str | None:
    if segment in ("", ".", ".."):
        return f"segment {segment!r}"
    if not _SEGMENT.fullmatch(segment) or segment != segment.rstrip(". "):
        return f"segment {segment!a} has a character that is not allowed"
    if segment.partition(".")[0].lower() in _RESERVED:
        return f"segment {segment!r} is a reserved device name"
    return None
