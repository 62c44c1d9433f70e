"""First use: what each name of a kernel gave when it was first used on this machine (S-01).

A version or branch can be moved by whoever holds its author's token. What it gave the first time is remembered, for
each Hub; when it gives something else, that is told before anything of it is imported, and refused in the strict mode.
A commit, and what a lock or the policy pins, cannot change and is not remembered.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kernelhub.errors import ChangedKernel
from kernelhub.resolution import DEFAULT_REVISION
from kernelhub.revision import RevisionKind

if TYPE_CHECKING:
    from kernelhub.reporter import Reporter
    from kernelhub.resolution import Resolution
    from kernelhub.store import Store
    from kernelhub.verify import VerifiedBuild

_KIND = "first-uses"


class _Seen(NamedTuple):
    """What a name gave: its commit, and the content of each variant that was used."""

    commit: str
    digests: dict[str, str]


@dataclass(frozen=True)
class FirstUse:
    """What a store remembers of first uses."""

    store: Store
    strict: bool
    reporter: Reporter

    def tell(self, resolution: Resolution) -> None:
        """Warn of a resolution whose name gave another commit before."""
        seen = self._seen(resolution)
        if seen is not None and seen.commit != resolution.commit:
            self._warn(_changed(resolution, seen))

    def check(self, build: VerifiedBuild, resolution: Resolution) -> None:
        """Compare a build that is about to be used with the first one of its name, and remember it.

        Raises:
            ChangedKernel: (strict mode) it is another one.
        """
        if _is_pinned(resolution):
            return
        seen = self._seen(resolution)
        if seen is None:
            self._remember(resolution, {build.variant: build.digest})
        elif seen.commit != resolution.commit:
            self._refuse(_changed(resolution, seen))  # ``tell`` has told it
            self._remember(resolution, {build.variant: build.digest})
        elif seen.digests.get(build.variant) != build.digest:
            if build.variant in seen.digests:
                error = _changed(resolution, seen)
                self._refuse(error)
                self._warn(error)
            self._remember(resolution, {**seen.digests, build.variant: build.digest})

    def _refuse(self, error: ChangedKernel) -> None:
        if self.strict:
            raise error

    def _warn(self, error: ChangedKernel) -> None:
        self.reporter.warn(error.change)

    def _seen(self, resolution: Resolution) -> _Seen | None:
        record = None if _is_pinned(resolution) else self.store.recorded(_KIND, _name(resolution))
        commit, digests = (record or {}).get("commit"), (record or {}).get("digests")
        return _Seen(commit, digests) if isinstance(commit, str) and isinstance(digests, dict) else None

    def _remember(self, resolution: Resolution, digests: dict[str, str]) -> None:
        if not os.access(self.store.root, os.W_OK):
            return
        name, facts = _name(resolution), {"commit": resolution.commit, "digests": digests}
        self.store.record(_KIND, name, facts)
        self.store.sweep()  # what a killed process has left


def _changed(resolution: Resolution, seen: _Seen) -> ChangedKernel:
    return ChangedKernel(resolution.build, _name(resolution), seen.commit, resolution.commit)


def _name(resolution: Resolution) -> str:
    return f"{resolution.name}@{resolution.request.revision or DEFAULT_REVISION}"


def _is_pinned(resolution: Resolution) -> bool:
    """Is it a commit, or a folder of this machine?"""
    revision = resolution.request.revision
    return not resolution.commit or (revision is not None and revision.kind is RevisionKind.COMMIT)
