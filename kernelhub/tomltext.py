"""TOML text: documents that somebody else may have written, read within bounds.

``tomllib`` recurses on nested brackets and takes time that grows with the square of a key's parts: 80 kB of ``a.a.a``
keep it busy for half a minute. So brackets and dots are counted first, in one pass. Strings of several lines, which
would make that count unsure, are in none of our formats and are refused.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_MAX_DEPTH = 32
_MAX_DOTS = 8  # on one line, outside strings
_LONGEST_LINE = 1 << 14  # characters

_TOKEN = re.compile(r"\\[^\n]|\"\"\"|\'\'\'|[\n\"\'#.\[\]{}]")
_COMMENT = "\n"  # what ends one


class NotToml(ValueError):
    """The bytes are no TOML document, or one that is costly to read; the message says what is wrong and where."""


def parse_toml(data: bytes) -> dict[str, Any]:
    """The table that ``data`` holds.

    Raises:
        NotToml: with the byte, or the line, that is wrong.
    """
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotToml(f"not UTF-8 at byte {error.start}") from None
    _refuse_costly(text)
    try:
        document: dict[str, Any] = tomllib.loads(text)
    except ValueError as error:  # TOMLDecodeError, or a number of more digits than Python converts
        raise NotToml(str(error)) from None
    return document


def _refuse_costly(text: str) -> None:
    for number, content in enumerate(text.split("\n"), 1):
        if len(content) > _LONGEST_LINE:
            raise NotToml(f"more than {_LONGEST_LINE} characters on line {number}")
    line, depth, dots = 1, 0, 0
    for token in _tokens(text):
        if token == "\n":
            line, dots = line + 1, 0
        elif token == ".":
            dots += 1
        elif token in "[{":
            depth += 1
        elif token in "]}":
            depth -= 1
        else:
            raise NotToml(f"a string of several lines at line {line}")
        if depth > _MAX_DEPTH:
            raise NotToml(f"nested deeper than {_MAX_DEPTH} levels at line {line}")
        if dots > _MAX_DOTS:
            raise NotToml(f"a key of more than {_MAX_DOTS} parts at line {line}")


def _tokens(text: str) -> Iterator[str]:
    """Ends of lines, and outside strings and comments: dots, brackets, and the start of a string of several lines.

    One token at a time: a pattern for whole strings would need memory for each of their characters.
    """
    inside = ""
    for match in _TOKEN.finditer(text):
        token = match[0]
        if token == "\n":
            inside = ""
            yield token
        elif inside:
            escaped = token[0] == "\\" and inside != "'"
            inside = "" if token[-1] == inside and not escaped else inside
        elif token in ("'", '"', "#"):
            inside = _COMMENT if token == "#" else token
        elif token[0] != "\\":
            yield token
