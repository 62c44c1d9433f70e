"""Policy: what the user of this machine has decided about publishers, once for all programs.

``kernelhub.toml``, from ``KERNELHUB_POLICY`` or the user's configuration folder, never from a project or a model::

    [trust]
    publishers = ["my-org"]              # trusted besides those that the Hub marks
    repositories = ["other/kernel"]      # single repositories of other publishers
    only = true                          # nothing but these: the Hub's mark and trust_remote_code do not count

    [pins]
    "org/repo" = "<40 hex>"              # any other commit of this repository is refused

    [signatures]
    "my-org" = "require"                 # or "warn" or "off"
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernelhub.errors import InvalidConfig, InvalidRequest, did_you_mean
from kernelhub.request import checked_repo_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

POLICY_NAME = "kernelhub.toml"

_MAX_BYTES = 1 << 20
_TABLES = ("trust", "pins", "signatures")
_TRUST_KEYS = ("publishers", "repositories", "only")
_SIGNATURES = ("require", "warn", "off")
_PUBLISHER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


@dataclass(frozen=True)
class Policy:
    """The decisions; an empty policy leaves everything to the Hub's mark and the caller's opt-in."""

    publishers: frozenset[str] = frozenset()
    repositories: frozenset[str] = frozenset()
    only: bool = False
    pins: Mapping[str, str] = field(default_factory=dict, hash=False)
    signatures: Mapping[str, str] = field(default_factory=dict, hash=False)
    origin: str = field(default="", compare=False)

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read a policy file.

        Raises:
            InvalidConfig: it cannot be read, or an unknown key or value, which is never skipped.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise InvalidConfig(str(path), f"cannot be read ({error.strerror})", "a policy file") from error
        return cls.parse(data, str(path))

    @classmethod
    def parse(cls, data: bytes, origin: str = POLICY_NAME) -> Policy:
        """Read the bytes of a policy file.

        Raises:
            InvalidConfig: as in ``read``.
        """
        document = _read_toml(data, origin)
        _refuse_unknown(document, _TABLES, origin)
        trust = _table(document, "trust", origin)
        _refuse_unknown(trust, _TRUST_KEYS, f"{origin} [trust]")
        only = trust.get("only", False)
        if not isinstance(only, bool):
            raise InvalidConfig(only, "key 'only'", "true or false", f"{origin} [trust]")
        return cls(
            publishers=frozenset(_publisher(name, origin) for name in _names(trust, "publishers", origin)),
            repositories=frozenset(_repository(name, origin) for name in _names(trust, "repositories", origin)),
            only=only,
            pins={
                _repository(repo, origin): _pin(pin, origin) for repo, pin in _table(document, "pins", origin).items()
            },
            signatures=_signatures(_table(document, "signatures", origin), origin),
            origin=origin,
        )

    def covers(self, repo_id: str) -> bool:
        """Does this policy trust the repository by itself?"""
        return repo_id in self.repositories or repo_id.partition("/")[0] in self.publishers


NO_POLICY = Policy()


def _read_toml(data: bytes, origin: str) -> dict[str, Any]:
    if len(data) > _MAX_BYTES:
        raise InvalidConfig(data[:16], f"{len(data)} bytes, more than {_MAX_BYTES}", "a small TOML file", origin)
    try:
        document: dict[str, Any] = tomllib.loads(data.decode("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidConfig("...", str(error), "TOML", origin) from None
    return document


def _refuse_unknown(table: Mapping[str, Any], known: tuple[str, ...], origin: str) -> None:
    for key in table:
        if key not in known:
            raise InvalidConfig(key, f"unknown key{did_you_mean(key, known)}", f"one of {', '.join(known)}", origin)


def _table(document: Mapping[str, Any], key: str, origin: str) -> dict[str, Any]:
    table = document.get(key, {})
    if not isinstance(table, dict):
        raise InvalidConfig(table, f"{key!r} is not a table", f"[{key}]", origin)
    return table


def _names(table: Mapping[str, Any], key: str, origin: str) -> list[Any]:
    names = table.get(key, [])
    if not isinstance(names, list):
        raise InvalidConfig(names, f"key {key!r} is not a list", '["name"]', f"{origin} [trust]")
    return names


def _publisher(name: object, origin: str) -> str:
    if not isinstance(name, str) or not _PUBLISHER.fullmatch(name):
        raise InvalidConfig(name, "not an organization's name", '"my-org"', origin)
    return name


def _repository(name: object, origin: str) -> str:
    try:
        return checked_repo_id(name)  # type: ignore[arg-type]  # it refuses what is no string
    except InvalidRequest as error:
        raise InvalidConfig(name, error.problem, '"org/repo"', origin) from None


def _pin(commit: object, origin: str) -> str:
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise InvalidConfig(commit, "not a commit", "40 lower-case hex digits", f"{origin} [pins]")
    return commit


def _signatures(table: Mapping[str, Any], origin: str) -> dict[str, str]:
    for publisher, rule in table.items():
        _publisher(publisher, origin)
        if rule not in _SIGNATURES:
            raise InvalidConfig(
                rule, f"rule for {publisher!r}", f"one of {', '.join(_SIGNATURES)}", f"{origin} [signatures]"
            )
    return dict(table)
