"""Acceptance: does a build whose files were verified prove enough for the user's policy?

======================  ==============================================================================================
state                   what happens
======================  ==============================================================================================
locked+signed, signed   loaded
locked, self-attested   loaded; refused where ``[signatures]`` says ``require``, told where it says ``warn``
unverified              as these, and told; refused where ``[digests]`` says ``require`` and in the strict mode
a bad signature         refused wherever signatures are looked at (``warn`` too): it is no missing one, somebody changed
                        something
======================  ==============================================================================================

A refusal is a ``VerificationError``, which is never a reason to fall back to something else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernelhub.errors import UnsignedKernel
from kernelhub.provenance import Finding
from kernelhub.resolution import checked_files
from kernelhub.verify import VerificationState, verify_listed

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.lockfile import Lock
    from kernelhub.manifest import StoredBuild
    from kernelhub.policy import Policy
    from kernelhub.provenance import Provenance
    from kernelhub.reporter import Reporter
    from kernelhub.resolution import Resolution
    from kernelhub.verify import VerifiedBuild

_STATES = {
    (True, True): VerificationState.LOCKED_SIGNED,
    (True, False): VerificationState.LOCKED,
    (False, True): VerificationState.SIGNED,
}


@dataclass(frozen=True)
class Acceptance:
    """One user's policy, the lock in force, and whether the strict mode is on."""

    policy: Policy
    provenance: Provenance
    lock: Lock | None
    strict: bool
    reporter: Reporter

    def accept(self, build: VerifiedBuild, resolution: Resolution, stored: StoredBuild | None) -> VerifiedBuild:
        """``build`` with the state that it proves, if that is enough.

        Raises:
            UnsignedKernel: it is not; the message says what is missing.
            BadSignature, OlderBuild, DigestMismatch: as in ``Provenance.check``.
        """
        looked_at = self.rule(resolution) != "off"
        finding = self.look(resolution, build.folder, stored) if looked_at else Finding()
        proven = replace(build, state=self.state(build.state, finding, resolution, stored))
        refusal = self.refusal(proven.state, finding, resolution)
        if proven.state is VerificationState.UNVERIFIED:
            self.reporter.warn(f"kernel build {build.build} lists no digests: its files are loaded unverified")
        if refusal is not None:
            raise refusal
        if looked_at and finding.signer is None:
            self.reporter.warn(f"kernel build {build.build} is {proven.state.value}, not signed: {finding.reason}")
        return proven

    def rule(self, resolution: Resolution) -> str:
        """What the policy says about the signature of a build; builds read in place have no publisher, and no rule."""
        return "off" if resolution.request.repo_id is None else self.policy.signature_rule(resolution.name)

    def look(self, resolution: Resolution, folder: Path, stored: StoredBuild | None, publisher: str = "") -> Finding:
        """Who signed it; see ``Provenance.check``."""
        return self.provenance.check(resolution, folder, stored, pinned=self.lock is not None, publisher=publisher)

    def state(
        self, state: VerificationState, finding: Finding, resolution: Resolution, stored: StoredBuild | None
    ) -> VerificationState:
        """What a build in ``state`` proves with that signer and under the lock in force.

        Raises:
            DigestMismatch: its files are not those that the lock lists.
        """
        return _STATES.get((self._is_locked(resolution, stored), finding.signer is not None), state)

    def refusal(self, state: VerificationState, finding: Finding, resolution: Resolution) -> UnsignedKernel | None:
        """Why a build that proves that much may not be loaded; None when it may."""
        required, reason = "", ""
        if self.rule(resolution) == "require" and finding.signer is None:
            required, reason = f"a signature ({self.policy.origin})", finding.reason
        elif state is VerificationState.UNVERIFIED and self.strict:
            required = "a digest of each file (strict mode)"
        elif state is VerificationState.UNVERIFIED and self._requires_digest(resolution):
            required = f"a digest of each file ({self.policy.origin})"
        return UnsignedKernel(resolution.build, state.value, required, reason) if required else None

    def _requires_digest(self, resolution: Resolution) -> bool:
        return resolution.request.repo_id is not None and self.policy.digest_rule(resolution.name) == "require"

    def _is_locked(self, resolution: Resolution, stored: StoredBuild | None) -> bool:
        """Does the lock list the files of this build? The peer's locks, which name commits only, list none."""
        if self.lock is None or stored is None:
            return False
        kernels = [each for each in self.lock.of_repository(resolution.name) if each.commit == resolution.commit]
        files = next((each.variants[resolution.variant] for each in kernels if resolution.variant in each.variants), ())
        if files:
            verify_listed(stored, resolution.build, checked_files(files))
        return bool(files)
