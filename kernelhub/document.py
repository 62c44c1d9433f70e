"""Document: a small TOML or JSON file that the user wrote, as plain data; the ending tells which."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from kernelhub.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_BYTES = 1 << 20


def read_document(path: Path) -> dict[str, Any]:
    """The table of a ``.toml`` file, or the object of a ``.json`` file.

    Raises:
        InvalidConfig: it cannot be read, is larger than such a file may be, or says a key twice.
    """
    readers = {".toml": tomllib.loads, ".json": _load_json}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise InvalidConfig(str(path), f"file name ends in {path.suffix!r}", "a .toml or .json file")
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidConfig(str(path), f"cannot be read ({error.strerror})", "a config file") from error
    if len(data) > _MAX_BYTES:
        raise InvalidConfig(str(path), f"more than {_MAX_BYTES} bytes", "a small file")
    try:
        document = reader(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8, TOML and JSON are ValueErrors
        raise InvalidConfig(str(path), str(error), f"{path.suffix[1:].upper()} in UTF-8") from None
    if not isinstance(document, dict):
        raise InvalidConfig(document, f"a {type(document).__name__}", "a table or an object", str(path))
    return document


def _load_json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_unique_keys)


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!a} given twice")
        found[key] = value
    return found
