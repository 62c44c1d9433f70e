"""History: the newest signed build that each name of a repository has given, so that no mirror goes back unseen (S-23).

What is remembered, for each Hub: for a version or branch and a variant, when the newest build was signed; for a
repository, the highest version. Only a name that the Hub resolves can go back: a commit that the user, a lock or a
policy names is what it is, and is neither compared nor remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelhub.errors import OlderBuild
from kernelhub.revision import Revision, RevisionKind
from kernelhub.signer import told

if TYPE_CHECKING:
    from kernelhub.signer import Signer
    from kernelhub.store import Store

_KIND = "newest"
_LATEST = 1 << 36  # seconds: no clock shows that


@dataclass(frozen=True)
class SignedBuild:
    """One signed build as it was asked for: the revision in the request, and the version in the signed metadata."""

    build: str
    repo_id: str
    variant: str
    revision: Revision
    version: int | None
    signer: Signer

    @property
    def name(self) -> str:
        """What gave this build: a range gives what the version that it chose gives."""
        chosen = self.revision.kind in (RevisionKind.RANGE, RevisionKind.LATEST) and self.version is not None
        return f"{self.repo_id}@{f'v{self.version}' if chosen else self.revision}"


class History:
    """What a store remembers of signed builds."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def check(self, signed: SignedBuild) -> None:
        """Compare a build with the newest that was seen under its name, and remember it if it is the newest now.

        Raises:
            OlderBuild: it was signed earlier, or a range gives a lower version than it gave before.
        """
        self._check_version(signed)
        self._check_time(signed)

    def _check_version(self, signed: SignedBuild) -> None:
        if signed.version is None:
            return
        seen = self._seen(signed.repo_id)
        asks_range = signed.revision.kind in (RevisionKind.RANGE, RevisionKind.LATEST)
        if asks_range and signed.version < seen and signed.revision.admits(seen):
            raise OlderBuild(signed.build, signed.repo_id, f"version {signed.version}", f"version {seen}")
        if signed.version > seen:
            self._remember(signed.repo_id, signed.version)

    def _check_time(self, signed: SignedBuild) -> None:
        key = f"{signed.name} {signed.variant}"
        seen, found = self._seen(key), signed.signer.time
        if found < seen:
            raise OlderBuild(signed.build, signed.repo_id, f"signed {told(found)}", f"one signed {told(seen)}")
        if found > seen:
            self._remember(key, found)

    def _seen(self, key: str) -> int:
        newest = (self._store.recorded(_KIND, key) or {}).get("newest")
        return newest if type(newest) is int and 0 <= newest < _LATEST else -1

    def _remember(self, key: str, newest: int) -> None:
        with self._store.asking(f"newest--{key}"):
            if newest > self._seen(key):  # another process may have seen a newer one meanwhile
                self._store.record(_KIND, key, {"newest": newest}, durable=True)
