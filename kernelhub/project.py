"""Project: the kernels that a ``pyproject.toml`` asks for, in our table or the peer's."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kernelhub.errors import InvalidConfig, InvalidRequest
from kernelhub.request import KernelRequest, checked_repo_id
from kernelhub.revision import Revision

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_BYTES = 4 << 20


def read_requirements(folder: Path) -> list[KernelRequest]:
    """What ``pyproject.toml`` in ``folder`` lists under ``[tool.kernelhub]`` and ``[tool.kernels]`` ``dependencies``.

    Each entry is ``"org/repo" = 1``, or a string: a version, a range (``">=1,<3"``), a branch or a commit.

    Raises:
        InvalidConfig: the file or an entry cannot be read.
    """
    path = folder / "pyproject.toml"
    if not path.is_file():
        return []
    tools = _read(path).get("tool", {})
    found: dict[str, KernelRequest] = {}
    for table in ("kernels", "kernelhub"):
        dependencies = tools.get(table, {}).get("dependencies", {})
        for repo_id, revision in dependencies.items():
            found[repo_id] = _requirement(repo_id, revision, f"{path}, [tool.{table}.dependencies]")
    return list(found.values())


def _read(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        raise InvalidConfig(str(path), f"{len(data)} bytes, more than {_MAX_BYTES}", "a small TOML file")
    try:
        document: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidConfig(str(path), str(error), "TOML") from None
    return document


def _requirement(repo_id: str, revision: object, origin: str) -> KernelRequest:
    try:
        parsed = Revision.parse(revision) if isinstance(revision, str) else Revision.version(revision)  # type: ignore[arg-type]  # version() refuses what is no int
        return KernelRequest(checked_repo_id(repo_id), revision=parsed)
    except InvalidRequest as error:
        raise InvalidConfig(error.value, error.problem, error.expected, origin) from None
