"""Trust root: the keys of the authorities that may vouch for a signer, and how old our knowledge of them is.

Which one is in use: ``KERNELHUB_TRUST_ROOT``, else the policy file's ``[trust_root] file``, else the one that
``kernelhub trust-root refresh`` has brought, else the public instance's as it was when this package was made. Reading
one opens no socket.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cached_property, lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from kernelhub import setting
from kernelhub.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.policy import Policy

SCHEMA = 1
MEDIA_TYPE = "application/vnd.dev.sigstore.trustedroot"
BUNDLED = "bundled with kernelhub"
REFRESH = "kernelhub trust-root refresh"

_ROOTS = "roots"
_MAX_BYTES = 1 << 20
_DAY = 24 * 3600.0
_EXPECTED = f"what `{REFRESH} --to FILE` writes, or sigstore's trusted_root.json"


@dataclass(frozen=True)
class TrustRoot:
    """One trust root: ``keys`` is sigstore's trusted root; ``time`` is when it was known to be right."""

    keys: dict[str, Any] = field(repr=False, hash=False)
    time: float
    origin: str
    source: str = ""

    @classmethod
    def in_use(cls, policy: Policy) -> TrustRoot:
        """The one that this user's signatures are checked with.

        Raises:
            InvalidConfig: a file was named, or refreshed, and is not a trust root.
        """
        path = setting.trust_root_path() or policy.trust_root or setting.refreshed_root_path()
        return cls.bundled() if path is None else cls.read(path)

    @classmethod
    def read(cls, path: Path) -> TrustRoot:
        """Read a file that ``refresh`` wrote, or a plain ``trusted_root.json``, whose age is that of the file.

        Raises:
            InvalidConfig: it cannot be read or is neither.
        """
        try:
            with path.open("rb") as file:
                data, modified = file.read(_MAX_BYTES + 1), path.stat().st_mtime
        except OSError as error:
            raise InvalidConfig(str(path), f"cannot be read ({error.strerror})", _EXPECTED, "trust root") from error
        return cls.parse(data, str(path), modified)

    @classmethod
    def bundled(cls) -> TrustRoot:
        """The public instance's, as it was when this package was made."""
        return cls.parse(bundled_file("trust-root.json"), BUNDLED)

    @classmethod
    @lru_cache(maxsize=4)
    def parse(cls, data: bytes, origin: str, modified: float = 0.0) -> TrustRoot:
        """Read the bytes of such a file; ``modified`` dates those that say no time themselves.

        Raises:
            InvalidConfig: as in ``read``.
        """
        document = _read_json(data, origin)
        if _is_keys(document):
            return cls(document, modified, origin)
        keys, written = document.get("trusted_root"), document.get("time")
        if document.get("schema") != SCHEMA or keys is None or not _is_keys(keys) or not isinstance(written, str):
            raise InvalidConfig(origin, "not a trust root", _EXPECTED)
        try:
            moment = datetime.strptime(written, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=timezone.utc).timestamp()
        except ValueError:
            raise InvalidConfig(written, "key 'time'", "a time such as 2026-10-16T00:00:00Z", origin) from None
        return cls(keys, moment, origin, str(document.get("source", "")))

    def to_dict(self) -> dict[str, Any]:
        """What stands in a file that ``read`` takes, on this machine or another."""
        return {"schema": SCHEMA, "time": self.told_time, "source": self.source, "trusted_root": self.keys}

    @property
    def authorities(self) -> list[str]:
        """The addresses of the certificate authorities and logs whose word counts."""
        listed = [*self.keys.get("certificateAuthorities", ()), *self.keys.get("tlogs", ())]
        return list(dict.fromkeys(str(each.get("uri") or each.get("baseUrl")) for each in listed))

    @property
    def told_time(self) -> str:
        return datetime.fromtimestamp(self.time, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")

    @cached_property
    def digest(self) -> str:
        """sha256 of the keys: what was verified with other keys is verified again."""
        return hashlib.sha256(json.dumps(self.keys, sort_keys=True).encode()).hexdigest()

    @property
    def days(self) -> float:
        """Age in days; 0 for one from the future, where the clock was set back."""
        return max(0.0, (time.time() - self.time) / _DAY)

    def __str__(self) -> str:
        return f"trust root ({self.origin}, of {self.told_time[:10]}, {self.days:.0f} days old)"


def bundled_file(name: str) -> bytes:
    """A file of the public instance that is shipped with the package."""
    return resources.files("kernelhub").joinpath(_ROOTS).joinpath(name).read_bytes()


def _is_keys(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("mediaType")).startswith(MEDIA_TYPE)


def _read_json(data: bytes, origin: str) -> dict[str, Any]:
    try:
        document = json.loads(data) if len(data) <= _MAX_BYTES else None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        problem = "not a JSON object" if len(data) <= _MAX_BYTES else f"more than {_MAX_BYTES} bytes"
        raise InvalidConfig(origin, problem, _EXPECTED, "trust root")
    return document
