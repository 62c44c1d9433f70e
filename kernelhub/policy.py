"""Policy: what the user of this machine has decided about publishers, once for all programs.

``kernelhub.toml``, from ``KERNELHUB_POLICY`` or the user's configuration folder, never from a project or a model::

    [trust]
    publishers = ["my-org"]              # trusted besides those that the Hub marks
    repositories = ["other/kernel"]      # single repositories of other publishers
    only = true                          # nothing but these: the Hub's mark and trust_remote_code do not count

    [pins]
    "org/repo" = "<40 hex>"              # any other commit of this repository is refused

    [signatures]
    "my-org" = "require"                 # or "warn" or "off", the default; "*" is every other publisher

    [digests]
    "*" = "require"                      # or "warn", the default

    [identities.my-org]                  # who has to have signed
    issuer = "https://token.actions.githubusercontent.com"
    signers = ["https://github.com/my-org/kernels/.github/workflows/build.yaml@refs/heads/main"]
    source = "https://github.com/my-org/kernels"

    [names]
    "my-org/relu-kernel" = "relu"        # the name in the signed metadata, where the repository has another

    [older]
    allow = ["my-org/relu-kernel"]       # may go back to builds older than those seen; or "my-org"

    [trust_root]
    file = "/etc/kernelhub/trust-root.json"
    warn_days = 7
    fail_days = 90
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelhub.errors import InvalidConfig, InvalidRequest, did_you_mean
from kernelhub.identity import KNOWN_IDENTITIES, Identity
from kernelhub.request import checked_repo_id
from kernelhub.tomltext import NotToml, parse_toml

if TYPE_CHECKING:
    from collections.abc import Mapping

POLICY_NAME = "kernelhub.toml"

_MAX_BYTES = 1 << 20
_TABLES = ("trust", "pins", "signatures", "digests", "identities", "names", "older", "trust_root")
_TRUST_KEYS = ("publishers", "repositories", "only")
_IDENTITY_KEYS = ("issuer", "signers", "source")
_ROOT_KEYS = ("file", "warn_days", "fail_days")
_SIGNATURES = ("require", "warn", "off")
_DIGESTS = ("require", "warn")
_ANY = "*"
_LONGEST_DAYS = 36_500
_PUBLISHER = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_KERNEL_NAME = re.compile(r"[a-z][a-z0-9]*(?:[-_.][a-z0-9]+)*", re.ASCII)


@dataclass(frozen=True)
class Policy:
    """The decisions; an empty policy leaves everything to the Hub's mark and the caller's opt-in."""

    publishers: frozenset[str] = frozenset()
    repositories: frozenset[str] = frozenset()
    only: bool = False
    pins: Mapping[str, str] = field(default_factory=dict, hash=False)
    signatures: Mapping[str, str] = field(default_factory=dict, hash=False)
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)
    identities: Mapping[str, Identity] = field(default_factory=dict, hash=False)
    names: Mapping[str, str] = field(default_factory=dict, hash=False)
    older: frozenset[str] = frozenset()
    trust_root: Path | None = None
    root_days: tuple[int, int] = (7, 90)
    """Age of the trust root in days at which it is warned of, and at which it proves nothing any more."""
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
            signatures=_rules(document, "signatures", _SIGNATURES, origin),
            digests=_rules(document, "digests", _DIGESTS, origin),
            identities=_identities(_table(document, "identities", origin), origin),
            names=_kernel_names(_table(document, "names", origin), origin),
            older=_older(_table(document, "older", origin), origin),
            trust_root=_root_file(_table(document, "trust_root", origin), origin),
            root_days=_root_days(_table(document, "trust_root", origin), origin),
            origin=origin,
        )

    def covers(self, repo_id: str) -> bool:
        """Does this policy trust the repository by itself?"""
        return repo_id in self.repositories or repo_id.partition("/")[0] in self.publishers

    def signature_rule(self, repo_id: str) -> str:
        """``require``, ``warn`` or ``off``: what a build without a good signature means here."""
        return self.signatures.get(repo_id.partition("/")[0], self.signatures.get(_ANY, "off"))

    def digest_rule(self, repo_id: str) -> str:
        """``require`` or ``warn``: what a build without digests means here."""
        return self.digests.get(repo_id.partition("/")[0], self.digests.get(_ANY, "warn"))

    def identity_of(self, repo_id: str) -> Identity | None:
        """Who has to have signed the builds of this repository; None when nobody has said."""
        publisher = repo_id.partition("/")[0]
        return self.identities.get(publisher) or KNOWN_IDENTITIES.get(publisher)

    def allows_older(self, repo_id: str) -> bool:
        """May this repository go back to builds older than those that were seen?"""
        return repo_id in self.older or repo_id.partition("/")[0] in self.older


NO_POLICY = Policy()


def _read_toml(data: bytes, origin: str) -> dict[str, Any]:
    if len(data) > _MAX_BYTES:
        raise InvalidConfig(data[:16], f"{len(data)} bytes, more than {_MAX_BYTES}", "a small TOML file", origin)
    try:
        return parse_toml(data)
    except NotToml as error:
        raise InvalidConfig("...", str(error), "TOML", origin) from None


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


def _rules(document: Mapping[str, Any], key: str, known: tuple[str, ...], origin: str) -> dict[str, str]:
    table = _table(document, key, origin)
    for publisher, rule in table.items():
        if publisher != _ANY:
            _publisher(publisher, origin)
        if rule not in known:
            raise InvalidConfig(rule, f"rule for {publisher!r}", f"one of {', '.join(known)}", f"{origin} [{key}]")
    return table


def _identities(table: Mapping[str, Any], origin: str) -> dict[str, Identity]:
    found = {}
    for publisher in table:
        where = f"{origin} [identities.{_publisher(publisher, origin)}]"
        entry = _table(table, publisher, where)
        _refuse_unknown(entry, _IDENTITY_KEYS, where)
        found[publisher] = Identity.checked(entry.get("issuer"), entry.get("signers"), entry.get("source"), where)
    return found


def _kernel_names(table: Mapping[str, Any], origin: str) -> dict[str, str]:
    for repo_id, name in table.items():
        _repository(repo_id, origin)
        if not isinstance(name, str) or not _KERNEL_NAME.fullmatch(name):
            raise InvalidConfig(name, f"name for {repo_id!r}", '"relu"', f"{origin} [names]")
    return dict(table)


def _older(table: Mapping[str, Any], origin: str) -> frozenset[str]:
    where = f"{origin} [older]"
    _refuse_unknown(table, ("allow",), where)
    names = table.get("allow", [])
    if not isinstance(names, list):
        raise InvalidConfig(names, "key 'allow' is not a list", '["org/repo"]', where)
    return frozenset(
        _repository(name, origin) if isinstance(name, str) and "/" in name else _publisher(name, origin)
        for name in names
    )


def _root_file(table: Mapping[str, Any], origin: str) -> Path | None:
    where = f"{origin} [trust_root]"
    _refuse_unknown(table, _ROOT_KEYS, where)
    name = table.get("file")
    if name is None:
        return None
    if not isinstance(name, str) or "\0" in name or not Path(name).is_absolute():
        raise InvalidConfig(name, "key 'file'", "an absolute path", where)
    return Path(name)


def _root_days(table: Mapping[str, Any], origin: str) -> tuple[int, int]:
    days = (table.get("warn_days", 7), table.get("fail_days", 90))
    if not all(type(number) is int and 0 < number <= _LONGEST_DAYS for number in days):
        expected = f"whole days from 1 to {_LONGEST_DAYS}"
        raise InvalidConfig(days, "keys 'warn_days' and 'fail_days'", expected, f"{origin} [trust_root]")
    return days
