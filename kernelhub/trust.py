"""Trust: may code of this repository run at all? The one choke point, asked before anything is downloaded.

Trust comes from the user's policy file, the caller's arguments and the Hub's flag on the publisher, never from data in
a repository or a model.
An opt-in is for the repositories it names; it is not passed on to what they depend on or redirect to (S-04, S-08).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernelhub.errors import InvalidRequest, PinMismatch, UntrustedPublisher, did_you_mean
from kernelhub.policy import NO_POLICY, Policy
from kernelhub.request import checked_repo_id

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernelhub.index import Index

KNOWN_PUBLISHERS = ("kernels-community",)


@dataclass(frozen=True)
class TrustPolicy:
    """The caller's opt-in under the user's policy.

    ``requested`` (True) covers the kernel asked for, ``repositories`` those that the caller names.
    """

    requested: bool = False
    repositories: frozenset[str] = frozenset()
    policy: Policy = NO_POLICY

    @classmethod
    def of(cls, trust_remote_code: bool | Iterable[str]) -> TrustPolicy:
        """From the argument ``trust_remote_code``: True, False or a list of repositories.

        Raises:
            InvalidRequest: another type, or an entry that is not ``org/name``.
        """
        if isinstance(trust_remote_code, bool):
            return cls(requested=trust_remote_code)
        if isinstance(trust_remote_code, str):
            raise InvalidRequest(trust_remote_code, "trust_remote_code is a string", f"[{trust_remote_code!r}]")
        return cls(repositories=frozenset(checked_repo_id(repo) for repo in trust_remote_code))

    def union(self, other: TrustPolicy) -> TrustPolicy:
        """Both opt-ins together: an argument of the call and one beside a mapping string."""
        return replace(
            self, requested=self.requested or other.requested, repositories=self.repositories | other.repositories
        )

    def under(self, policy: Policy) -> TrustPolicy:
        """The same opt-in under a user's policy."""
        return replace(self, policy=policy)

    def check(self, repo_id: str, index: Index, *, requested: bool, foreign: bool = False) -> str:
        """Why ``repo_id`` may run, for the report.

        ``requested`` is False for dependencies of what was asked for; ``foreign`` is True for code that others than
        the publisher may have put there (a pull request), which the Hub's mark on the publisher says nothing about.

        Raises:
            UntrustedPublisher: it may not; the message names publisher, repository and the argument to pass.
        """
        publisher = repo_id.partition("/")[0]
        if self.policy.covers(repo_id):
            return f"trusted by {self.policy.origin}"
        if self.policy.only:
            raise UntrustedPublisher(repo_id, publisher, f"which {self.policy.origin} does not list (only = true)")
        if repo_id in self.repositories or (requested and self.requested):
            return "opted in by the caller"
        if foreign:
            raise UntrustedPublisher(repo_id, publisher, "but a pull request may hold anybody's code")
        trusted = index.trusts(publisher)
        if trusted:
            return f"publisher {publisher} is trusted by {index.name}"
        similar = self._similar(publisher)
        if trusted is None:  # nothing says that it is not trusted, so opting in is not what to advise
            advice = f"With network access, `kernelhub explain {repo_id}` asks the Hub, and the answer is remembered."
            raise UntrustedPublisher(repo_id, publisher, "whose trust was never asked online", similar, advice)
        raise UntrustedPublisher(repo_id, publisher, "which is not a trusted kernel publisher", similar)

    def check_commit(self, repo_id: str, commit: str) -> None:
        """Refuse a commit that the user's policy does not pin this repository to.

        Raises:
            PinMismatch: the policy names another commit.
        """
        pin = self.policy.pins.get(repo_id, commit)
        if pin != commit:
            raise PinMismatch(repo_id, commit, pin, self.policy.origin)

    def _similar(self, publisher: str) -> str:
        known = (*KNOWN_PUBLISHERS, *sorted(self.policy.publishers))
        return did_you_mean(publisher, known) if publisher not in known else "."
