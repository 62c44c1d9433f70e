"""Override: folders of this machine that take the place of repositories, from ``LOCAL_KERNELS`` (S-19).

``LOCAL_KERNELS=org/repo=/path:org/other=/path``, or a JSON object where a path holds a colon. The variable decides
which code runs, and anything may have set it: the folder must be this user's own, each use is told once, and under a
lock or in the strict mode there is none.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any

from kernelhub.errors import InvalidConfig, InvalidRequest
from kernelhub.request import checked_repo_id

VARIABLE = "LOCAL_KERNELS"

_EXPECTED = 'org/repo=/absolute/path, joined by ":", or {"org/repo": "/absolute/path"}'
_ORIGIN = f"variable {VARIABLE}"


def override_of(repo_id: str) -> Path | None:
    """The folder that takes the place of a repository, or None.

    Raises:
        InvalidConfig: an entry cannot be read, or somebody else could write into the folder.
    """
    folder = parse_overrides(os.environ.get(VARIABLE, "")).get(repo_id)
    return None if folder is None else _checked_folder(folder)


def parse_overrides(text: str) -> dict[str, Path]:
    """The folders by repository.

    Raises:
        InvalidConfig: with the number of the entry that is wrong.
    """
    if not text:
        return {}
    entries = _json_entries(text) if text.lstrip().startswith("{") else _plain_entries(text)
    found: dict[str, Path] = {}
    for number, (repo_id, path) in enumerate(entries, 1):
        name, folder = _checked_entry(repo_id, path, number)
        if name in found:
            raise InvalidConfig(name, f"entry {number}: named twice", "each repository once", _ORIGIN)
        found[name] = folder
    return found


def _plain_entries(text: str) -> list[tuple[Any, Any]]:
    entries = []
    for number, entry in enumerate(text.split(os.pathsep), 1):
        repo_id, equals, path = entry.partition("=")
        if not equals:
            problem = f"entry {number}: no '='; a path that holds {os.pathsep!r} needs the JSON form"
            raise InvalidConfig(entry, problem, _EXPECTED, _ORIGIN)
        entries.append((repo_id, path))
    return entries


def _json_entries(text: str) -> list[tuple[Any, Any]]:
    try:
        pairs: Any = json.loads(text, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise InvalidConfig(text, f"not JSON ({error})", _EXPECTED, _ORIGIN) from None
    return [(repo_id, path) for repo_id, path in pairs]


def _checked_entry(repo_id: Any, path: Any, number: int) -> tuple[str, Path]:
    try:
        name = checked_repo_id(repo_id)
    except InvalidRequest as error:
        raise InvalidConfig(repo_id, f"entry {number}: {error.problem}", _EXPECTED, _ORIGIN) from None
    if not isinstance(path, str) or path != path.strip() or "\0" in path:
        raise InvalidConfig(path, f"entry {number}: not a path (spaces around it are not taken away)", "", _ORIGIN)
    if not Path(path).is_absolute():
        raise InvalidConfig(path, f"entry {number}: not absolute", "a path from the root, without ~ or $", _ORIGIN)
    return name, Path(path)


def _checked_folder(folder: Path) -> Path:
    try:
        status = folder.stat()
    except OSError as error:
        raise InvalidConfig(str(folder), f"cannot be used ({error.strerror})", "a folder", _ORIGIN) from error
    if not stat.S_ISDIR(status.st_mode):
        raise InvalidConfig(str(folder), "not a folder", "a folder with a build", _ORIGIN)
    if hasattr(os, "geteuid"):
        _refuse_others(folder, status)
    return folder


def _refuse_others(folder: Path, status: os.stat_result) -> None:
    if status.st_uid not in (os.geteuid(), 0):
        expected = f"a folder of your own (user {os.geteuid()})"
        raise InvalidConfig(str(folder), f"it belongs to user {status.st_uid}", expected, _ORIGIN)
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        problem = f"others can write into it (mode {stat.S_IMODE(status.st_mode):o})"
        raise InvalidConfig(str(folder), problem, f"`chmod go-w '{folder}'` first", _ORIGIN)
