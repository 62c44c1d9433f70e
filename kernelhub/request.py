r"""KernelRequest: the only place that knows the grammar of a mapping string.

Accepted forms::

    org/repo                      org/repo:Symbol              version 1, as transformers reads it
    org/repo@v3:Symbol            org/repo@>=2,<4:Symbol       see revision.py for all that may follow "@"
    builtin:Symbol                builtin@v2:Symbol            the collection shipped with kernelhub
    /abs/path:Symbol   ./rel:Symbol   ~/path:Symbol   file:///abs/path:Symbol
    C:\path:Symbol     C:/path:Symbol     \\server\share:Symbol       a build or repository folder on this machine
    https://huggingface.co/kernels/org/repo/tree/v3:Symbol             a pasted page address

A symbol may be dotted. A local path is told by its first characters, never by what exists on disk.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

from kernelhub.errors import InvalidRequest, shown
from kernelhub.revision import Revision

BUILTIN = "builtin"
EXPECTED = "org/name[@revision][:Symbol], builtin:Symbol or /path[:Symbol]"

_LONGEST = 4096
_LONGEST_SEGMENT = 96
_SEGMENT = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?", re.ASCII)
_SYMBOL = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_][A-Za-z0-9_]*)*", re.ASCII)
# Besides control characters: surrogates that no file name decodes to (U+DC80 to U+DCFF are bytes that are not UTF-8).
_CONTROL = re.compile(r"[\x00-\x1f\x7f\x80-\x9f\u2028\u2029\ud800-\udc7f\udd00-\udfff]")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]", re.ASCII)
_LOCAL_STARTS = ("/", "./", ".\\", "~", "\\\\")
_PAGE = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<path>.*)", re.ASCII)


@dataclass(frozen=True)
class KernelRequest:
    """What a user asked for: one of ``repo_id``, ``path`` or the built-in collection, a revision, a symbol.

    ``revision`` None means "none given": version 1 of a Hub repository, the newest of the built-in collection.
    """

    repo_id: str | None = None
    path: str | None = None
    revision: Revision | None = None
    symbol: str | None = None

    def __post_init__(self) -> None:
        _checked_symbol(self.symbol)
        if self.path is not None:
            self._check_path(self.path)
        elif self.repo_id is not None:
            checked_repo_id(self.repo_id)

    def _check_path(self, path: str) -> None:
        _check_text(path)
        if self.repo_id is not None:
            raise InvalidRequest(path, "both a repository and a path", EXPECTED)
        if self.revision is not None:
            raise InvalidRequest(path, "a local folder has no revision", "/path[:Symbol]")
        if not _is_local(path) or path.startswith("file:"):
            raise InvalidRequest(path, "not the form of a local path", "/path, ./path, ~/path or C:\\path")
        if self.symbol is None and _split_local(path)[1] is not None:
            raise InvalidRequest(path, "the last colon would read as a symbol", "a path without it")

    @classmethod
    def parse(cls, text: str) -> KernelRequest:
        """Read a mapping string; ``parse(str(x)) == x``.

        Raises:
            InvalidRequest: what is wrong and where, with the accepted forms.
        """
        _check_text(text)
        try:
            if _is_local(text):
                return cls._parse_local(text)
            return cls._parse_hub(_from_page(text) if "://" in text else text)
        except InvalidRequest as error:
            raise InvalidRequest(text, error.problem, error.expected or EXPECTED) from None

    @classmethod
    def _parse_local(cls, text: str) -> KernelRequest:
        path, symbol = _split_local(text)
        return cls(path=_path_of_url(path) if text.startswith("file:") else path, symbol=symbol)

    @classmethod
    def _parse_hub(cls, text: str) -> KernelRequest:
        repo, colon, symbol = text.partition(":")
        if colon and ":" in symbol:
            raise InvalidRequest(text, f"second ':' at character {text.index(':', len(repo) + 1) + 1}")
        if text.startswith("@"):
            raise InvalidRequest(text, f"the organization {shown(repo.partition('/')[0])} may not start with '@'")
        if not repo:
            raise InvalidRequest(text, "no repository before ':'")
        repo, at, revision = repo.partition("@")
        if "@" in revision:
            raise InvalidRequest(text, f"second '@' at character {text.index('@', len(repo) + 1) + 1}")
        repo_id = None if repo == BUILTIN else checked_repo_id(repo)
        parsed = Revision.parse(revision) if at else None
        return cls(repo_id, revision=parsed, symbol=symbol if colon else None)

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        symbol = f":{self.symbol}" if self.symbol else ""
        return f"{self.name}{revision}{symbol}"

    @property
    def name(self) -> str:
        """Where the kernel comes from: the repository id, the path, or ``builtin``."""
        return self.repo_id or self.path or BUILTIN

    @property
    def is_builtin(self) -> bool:
        return self.repo_id is None and self.path is None

    @property
    def folder(self) -> Path:
        """The local folder of a ``path`` request, absolute.

        Raises:
            InvalidRequest: the path starts with ``~`` and there is no such home folder.
        """
        assert self.path is not None
        try:
            return Path(self.path).expanduser().absolute()
        except RuntimeError as error:
            raise InvalidRequest(self.path, f"'~' has no folder: {error}", "an absolute path") from error

    def at(self, *, version: int | None = None, revision: str | None = None) -> KernelRequest:
        """The same request with a version or revision given beside the string.

        Raises:
            InvalidRequest: given twice (also in the string), or unreadable.
        """
        if version is None and revision is None:
            return self
        if version is not None and revision is not None:
            both = f"both version={shown(version)} and revision={shown(revision)}"
            raise InvalidRequest(str(self), both, "one of them")
        if self.revision is not None:
            raise InvalidRequest(str(self), "a revision in the string and one beside it", "one of them")
        if version is not None:
            return replace(self, revision=Revision.version(version))
        assert revision is not None
        return replace(self, revision=Revision.parse(revision))


def checked_repo_id(text: str) -> str:
    """``org/name`` if it is a valid repository id.

    Raises:
        InvalidRequest: not ``org/name`` in the Hub's grammar (ASCII, at most 96 characters a segment).
    """
    _check_text(text)
    if " " in text:
        raise InvalidRequest(text, "space in the name")
    if "|" in text:
        raise InvalidRequest(text, "'|' in the name (a wrapper prefix is the caller's to strip)")
    segments = text.split("/")
    for segment in segments:
        _check_segment(text, segment)
    if len(segments) > 2:
        raise InvalidRequest(text, f"too many '/': {len(segments) - 1}")
    if len(segments) == 1:
        raise InvalidRequest(text, "no organization")
    return text


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InvalidRequest(text, f"a {type(text).__name__}, not a string", EXPECTED)
    if not text:
        raise InvalidRequest(text, "empty", EXPECTED)
    if len(text) > _LONGEST:
        raise InvalidRequest(text, f"length {len(text)} > {_LONGEST}", EXPECTED)
    if control := _CONTROL.search(text):
        raise InvalidRequest(text, f"control character U+{ord(control[0]):04X}", EXPECTED)
    if text != text.strip():
        raise InvalidRequest(text, "space at the start or end", EXPECTED)


def _is_local(text: str) -> bool:
    return text.startswith((*_LOCAL_STARTS, "file:")) or _DRIVE.match(text) is not None


def _split_local(text: str) -> tuple[str, str | None]:
    """Split at the last colon after the drive letter; a colon before a path separator belongs to the path."""
    drive = 2 if _DRIVE.match(text) else 0
    path, colon, symbol = text[drive:].rpartition(":")
    if not colon or "/" in symbol or "\\" in symbol:
        return text, None
    return text[:drive] + path, symbol


def _path_of_url(text: str) -> str:
    try:
        parts = urlsplit(text)
    except ValueError as error:
        raise InvalidRequest(text, f"unreadable address: {error}", "file:///path[:Symbol]") from error
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise InvalidRequest(text, "not a local file address", "file:///path[:Symbol]")
    if parts.query or parts.fragment:
        raise InvalidRequest(text, "'?' or '#' in a file address", "%3F or %23 in its place")
    path = unquote(parts.path)
    return path[1:] if _DRIVE.match(path[1:]) else path


def _from_page(text: str) -> str:
    """Turn the address of a repository's page into ``org/name[@revision][:Symbol]``."""
    match = _PAGE.fullmatch(text)
    if match is None or "/" not in match["path"]:
        raise InvalidRequest(text, "not the page of a kernel repository on the Hub", EXPECTED)
    path, colon, symbol = match["path"].partition(":")
    repo, _, place = path.removeprefix("kernels/").rstrip("/").partition("/tree/")
    revision = f"@{unquote(place.partition('/')[0])}" if place else ""
    return f"{repo}{revision}{colon}{symbol}"


def _check_segment(text: str, segment: str) -> None:
    if segment in ("", ".", ".."):
        raise InvalidRequest(text, f"segment {segment!r}")
    if len(segment) > _LONGEST_SEGMENT:
        raise InvalidRequest(text, f"length {len(segment)} > {_LONGEST_SEGMENT}")
    if not segment.isascii():
        raise InvalidRequest(text, f"non-ASCII character in {segment!a}")
    if not _SEGMENT.fullmatch(segment) or ".." in segment or "--" in segment or segment.endswith(".git"):
        raise InvalidRequest(text, f"segment {segment!a} breaks the Hub's name rule")


def _checked_symbol(symbol: str | None) -> str | None:
    if symbol is None:
        return None
    if not _SYMBOL.fullmatch(symbol):
        problem = f"symbol {shown(symbol)}" if symbol else "empty symbol"
        raise InvalidRequest(symbol, problem, "a (dotted) Python name after ':'")
    if any(part.startswith("__") for part in symbol.split(".")):
        raise InvalidRequest(symbol, f"symbol {shown(symbol)} is not one that a kernel defines", "a public name")
    return symbol
