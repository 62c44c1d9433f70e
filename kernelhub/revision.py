"""Revision: which state of a repository is asked for.

Accepted forms::

    v3  3            API version 3 (the branch v3)
    latest           the newest API version
    >=2,<4           the newest API version in that range
    main  refs/pr/3  a branch, a tag or another git reference (it may move)
    <40 hex>         one commit, for ever;  7 to 39 hex digits are looked up as a name, then as a short commit
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from packaging.specifiers import SpecifierSet

from kernelhub.errors import InvalidRequest, shown

MAX_VERSION = 999_999
EXPECTED = "v3, 3, latest, >=2,<4, a branch, a tag or a commit"

_VERSION = re.compile(r"v?(?P<number>0|[1-9][0-9]{0,5})", re.ASCII)
_VERSION_BRANCH = re.compile(r"v(?P<number>0|[1-9][0-9]{0,5})", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_SHORT_COMMIT = re.compile(r"[0-9a-f]{7,39}", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9._/+-]{0,253}[A-Za-z0-9_])?", re.ASCII)
_RANGE_PART = re.compile(r"(?:>=|<=|==|!=|<|>)(?:0|[1-9][0-9]{0,5})", re.ASCII)
_PULL_REQUEST = re.compile(r"refs/pr/[1-9][0-9]*", re.ASCII)


class RevisionKind(Enum):
    VERSION = "version"
    LATEST = "latest"
    RANGE = "range"
    NAME = "name"
    COMMIT = "commit"


@dataclass(frozen=True)
class Revision:
    """One revision; ``text`` is canonical (``v3``, ``latest``, ``<4,>=2``, ``main``, 40 lower-case hex digits)."""

    kind: RevisionKind
    text: str

    @classmethod
    def parse(cls, text: str) -> Revision:
        """Read a revision; ``parse(str(x)) == x``.

        Raises:
            InvalidRequest: empty, or not of an accepted form.
        """
        if not isinstance(text, str):
            raise InvalidRequest(text, f"a revision is text, not a {type(text).__name__}", EXPECTED)
        if not text:
            raise InvalidRequest(text, "empty revision", EXPECTED)
        if version := _VERSION.fullmatch(text):
            return cls.version(int(version["number"]))
        if text == "latest":
            return cls(RevisionKind.LATEST, text)
        if text[0] in "<>=!":
            return cls(RevisionKind.RANGE, _canonical_range(text))
        if _COMMIT.fullmatch(text.lower()):
            return cls(RevisionKind.COMMIT, text.lower())
        _check_name(text)
        return cls(RevisionKind.NAME, text)

    @classmethod
    def version(cls, number: int) -> Revision:
        """API version ``number``, an int from 0 to 999999.

        Raises:
            InvalidRequest: not an int (True and 1.0 are not), or out of range.
        """
        if type(number) is not int or not 0 <= number <= MAX_VERSION:
            raise InvalidRequest(number, "version out of range or not an int", f"an int from 0 to {MAX_VERSION}")
        return cls(RevisionKind.VERSION, f"v{number}")

    def __str__(self) -> str:
        return self.text

    @property
    def number(self) -> int:
        """The API version, of a VERSION revision."""
        return int(self.text[1:])

    @property
    def moves(self) -> bool:
        """May the same text mean another commit tomorrow?"""
        return self.kind is not RevisionKind.COMMIT

    @property
    def is_pull_request(self) -> bool:
        return _PULL_REQUEST.fullmatch(self.text) is not None

    @property
    def may_be_short_commit(self) -> bool:
        return self.kind is RevisionKind.NAME and _SHORT_COMMIT.fullmatch(self.text) is not None

    def admits(self, version: int) -> bool:
        """Does this version, range or ``latest`` admit that API version?"""
        if self.kind is RevisionKind.RANGE:
            return SpecifierSet(self.text).contains(str(version))
        if self.kind is RevisionKind.LATEST:
            return version > 0
        return self.kind is RevisionKind.VERSION and version == self.number


def version_of_branch(branch: str) -> int | None:
    """The API version that a branch name stands for; ``v01``, ``V1``, ``v1.0`` stand for none (S-33)."""
    match = _VERSION_BRANCH.fullmatch(branch)
    return int(match["number"]) if match else None


def _canonical_range(text: str) -> str:
    for part in text.split(","):
        if not _RANGE_PART.fullmatch(part):
            raise InvalidRequest(text, f"range part {shown(part)}", "comparisons with whole versions, e.g. >=2,<4")
    return str(SpecifierSet(text))


def _check_name(text: str) -> None:
    if _NAME.fullmatch(text) is None or ".." in text or "//" in text or text.endswith(".lock") or "/." in text:
        raise InvalidRequest(text, "not a branch, tag or commit name", EXPECTED)
    if re.fullmatch(r"[0-9a-fA-F]{41,}", text, re.ASCII):
        raise InvalidRequest(text, f"{len(text)} hex digits", "40 for a commit")
