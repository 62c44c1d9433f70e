"""DeviceRange: the device key of a config: a backend, and optionally a range of compute capability.

Accepted forms::

    cuda          cuda>=9.0,<10          rocm>=9.4          cuda==8.9          mps (an alias of metal)

Capabilities are ``major.minor`` (CUDA's 9.0 is ``sm_90``), compared as numbers; ``10`` reads as ``10.0``. A range is
kept as its smallest member and the first above it, so ``<=9.0`` and ``<9.1`` are the same range.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from kernelhub.backend import Release, backend_kind
from kernelhub.errors import InvalidBackend

_KEY = re.compile(r"(?P<name>[A-Za-z]+)(?P<bounds>\s*(?:[<>=]).*)?", re.ASCII)
_BOUND = re.compile(r"\s*(?P<sign>>=|<=|==|>|<)\s*(?P<major>[0-9]{1,4})(?:\.(?P<minor>[0-9]{1,2}))?\s*", re.ASCII)
_RANGED = ("cuda", "rocm")
_EXPECTED = "a device such as 'cuda' or a range such as 'cuda>=9.0,<10'"
_MINORS = 100  # more than any major version has


@dataclass(frozen=True)
class DeviceRange:
    """Devices of one backend whose capability is at least ``lowest`` and below ``below`` (None: no such bound)."""

    backend: str
    lowest: Release | None = None
    below: Release | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceRange:
        """Read a device key; ``parse(str(x)) == x``.

        Raises:
            InvalidBackend: no such backend, an unreadable or empty range, or one for a backend without capabilities.
        """
        match = _KEY.fullmatch(text)
        if match is None or not match["bounds"]:
            return cls(backend_kind(text).name)
        kind = backend_kind(match["name"])
        if kind.name not in _RANGED:
            raise InvalidBackend(text, f"{kind.name} has no capabilities", f"a range for {' or '.join(_RANGED)}")
        found = cls(kind.name)
        for part in match["bounds"].split(","):
            found = found._with_bound(text, part)
        if found.lowest is not None and found.below is not None and found.lowest >= found.below:
            raise InvalidBackend(text, "no capability is in this range", _EXPECTED)
        return found

    @classmethod
    def of(cls, device: Any) -> DeviceRange:
        """The same for a key that may be the peer's ``Device`` (``type`` and ``properties``).

        Raises:
            InvalidBackend: as ``parse``, or no device key at all.
        """
        if isinstance(device, str):
            return cls.parse(device)
        name = getattr(device, "type", None)
        if not isinstance(name, str):
            raise InvalidBackend(device, "name is not a string", "a name such as 'cuda'")
        properties = getattr(device, "properties", None)
        lowest, highest = (getattr(properties, f"{end}_capability", None) for end in ("min", "max"))
        # Capabilities there are major * 10 + minor, both ends included; a missing end is 0 or a huge number.
        below = Release(*divmod(highest + 1, 10)) if isinstance(highest, int) and highest < 10 * _MINORS else None
        return cls(backend_kind(name).name, Release(*divmod(lowest, 10)) if lowest else None, below)

    def _with_bound(self, text: str, part: str) -> DeviceRange:
        match = _BOUND.fullmatch(part)
        if match is None:
            raise InvalidBackend(text, f"unreadable bound {part.strip()!r}", _EXPECTED)
        release = Release(int(match["major"]), int(match["minor"] or 0))
        after = Release(release.major, release.minor + 1)
        lowest = {">=": release, "==": release, ">": after}.get(match["sign"])
        below = {"<": release, "==": after, "<=": after}.get(match["sign"])
        return DeviceRange(
            self.backend,
            max(filter(None, (self.lowest, lowest)), default=None),
            min(filter(None, (self.below, below)), default=None),
        )

    def __str__(self) -> str:
        bounds = [f">={self.lowest}"] if self.lowest is not None else []
        bounds += [f"<{self.below}"] if self.below is not None else []
        return self.backend + ",".join(bounds)

    @property
    def is_range(self) -> bool:
        return self.lowest is not None or self.below is not None

    @property
    def width(self) -> float:
        """How much it covers: the narrower of two ranges is the better one."""
        if self.lowest is None or self.below is None:
            return float("inf") if not self.is_range else float(2 * _MINORS**2)
        lowest, below = (release.major * _MINORS + release.minor for release in (self.lowest, self.below))
        return float(below - lowest)

    def holds(self, backend: str, capability: Release | None) -> bool:
        """Does a device belong here? One whose capability is unknown belongs to no range."""
        if backend != self.backend or (self.is_range and capability is None):
            return False
        above = self.lowest is None or (capability is not None and capability >= self.lowest)
        return above and (self.below is None or (capability is not None and capability < self.below))


@lru_cache(maxsize=256)
def device_range(key: str) -> DeviceRange:
    """``DeviceRange.parse``, remembered."""
    return DeviceRange.parse(key)
