"""Provenance: was a build signed by whom the user expects, is it the one asked for, and is it no older than before?

What has been found about a stored build is kept beside it, with what it depends on: its content, the trust root, and
whom the user expects. So a warm load checks no signature again, and any change of these does. In a store that others
can write into nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

from kernelhub.backend import BACKENDS
from kernelhub.buildpath import METADATA, SIGNATURE
from kernelhub.durable import open_regular
from kernelhub.errors import BadSignature, DigestMismatch, InvalidConfig, InvalidVariant, OlderBuild
from kernelhub.history import History, SignedBuild
from kernelhub.metadata import MAX_BYTES, Metadata
from kernelhub.resolution import DEFAULT_REVISION
from kernelhub.revision import RevisionKind
from kernelhub.signer import MAX_BYTES as MAX_BUNDLE_BYTES
from kernelhub.signer import Signer, find_signer, missing_verifier
from kernelhub.trustroot import REFRESH, TrustRoot
from kernelhub.variant import UNIVERSAL, Variant
from kernelhub.verify import check_digest

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.identity import Identity
    from kernelhub.manifest import StoredBuild
    from kernelhub.policy import Policy
    from kernelhub.reporter import Reporter
    from kernelhub.resolution import Resolution
    from kernelhub.store import Store

_KEPT = "signature"


@dataclass(frozen=True)
class Finding:
    """Who signed a build, or the reason why nobody can say."""

    signer: Signer | None = None
    reason: str = ""


class Provenance:
    """Checks the signatures of builds under one user's policy.

    Args:
        policy: whom the user expects, and how old a trust root may be.
        store: remembers what was seen.
        reporter: is told of an old trust root, and of older builds that are allowed.
        allow_older: older builds than those seen are told, not refused.
    """

    def __init__(self, policy: Policy, store: Store, reporter: Reporter, *, allow_older: bool = False) -> None:
        self._policy = policy
        self._store = store
        self._reporter = reporter
        self._allow_older = allow_older

    def check(
        self,
        resolution: Resolution,
        folder: Path,
        stored: StoredBuild | None = None,
        *,
        pinned: bool = False,
        publisher: str = "",
    ) -> Finding:
        """Find the signer of a build whose files were found to be those listed.

        Args:
            resolution: what was asked for.
            folder: the build's files.
            stored: the same build as the store knows it, None for a folder read in place.
            pinned: a lock names the commit, so that it cannot be an older one by mistake.
            publisher: whose build it is meant to be, where its place does not say so.

        Raises:
            BadSignature: there is a signature, and it does not hold or is for another build.
            OlderBuild: a newer one was seen under the same name.
            DigestMismatch: the files are not those that the signed metadata lists.
        """
        if not (folder / SIGNATURE).is_file():
            return Finding(reason="it carries no signature")
        identity = self._policy.identity_of(publisher or resolution.name)
        if identity is None:
            return Finding(reason=_unnamed(publisher or resolution.name.partition("/")[0]))
        try:
            finding = self._find(resolution, folder, identity, stored)
        except InvalidConfig as error:  # no trust root: nothing is proven, and nothing may fall back on that account
            return Finding(reason=str(error))
        if finding.signer is not None:
            self._compare(resolution)
            if not (pinned or self._names_commit(resolution)):
                self._check_age(resolution, finding.signer)
        return finding

    @cached_property
    def root(self) -> TrustRoot:
        """The trust root in use; told when it is old.

        Raises:
            InvalidConfig: the file that was named cannot be read.
        """
        root = TrustRoot.in_use(self._policy)
        if self._policy.root_days[0] < root.days:
            self._reporter.warn(f"the {root} may lack keys that were added or withdrawn since: run `{REFRESH}`")
        return root

    @cached_property
    def _stale(self) -> str:
        """Why the trust root proves nothing any more; empty when it does."""
        limit = self._policy.root_days[1]
        return f"the {self.root} is older than {limit} days: run `{REFRESH}`" if self.root.days > limit else ""

    def _find(self, resolution: Resolution, folder: Path, identity: Identity, stored: StoredBuild | None) -> Finding:
        """The signer as it was found before, or as it is found now and kept."""
        if self._stale:
            return Finding(reason=self._stale)
        signer = self._kept(resolution, identity, stored)
        if signer is None:
            if missing := missing_verifier():
                return Finding(reason=missing)
            signer = self._verified(resolution, folder, identity, stored)
            self._keep(signer, identity, stored)
        return Finding(signer)

    def _verified(self, resolution: Resolution, folder: Path, identity: Identity, stored: StoredBuild | None) -> Signer:
        """The signer, after the signature first, then the metadata, then the files that it lists."""
        data = _read(resolution, folder, METADATA, MAX_BYTES)
        bundle = _read(resolution, folder, SIGNATURE, MAX_BUNDLE_BYTES)
        signer = find_signer(resolution.build, data, bundle, identity, self.root)
        metadata = Metadata.parse(data, resolution.build)
        if metadata != resolution.metadata or resolution.metadata_bytes not in (None, data):
            raise DigestMismatch(resolution.build, METADATA, "is not the one that this build was chosen by")
        if metadata.digest is None:
            problem = f"the signed {METADATA} lists no digests, so it says nothing of the files"
            raise BadSignature(resolution.build, problem)
        if stored is not None:  # a folder has just been compared
            check_digest(replace(resolution, metadata=metadata), folder, stored.manifest.files)
        return signer

    def _compare(self, resolution: Resolution) -> None:
        """Refuse a build that was signed for something else than what was asked for (S-23)."""
        if resolution.request.repo_id is None or resolution.metadata is None:
            return
        for problem in (self._name_problem(resolution), _version_problem(resolution), _variant_problem(resolution)):
            if problem:
                raise BadSignature(resolution.build, problem)

    def _name_problem(self, resolution: Resolution) -> str:
        found = resolution.metadata.name if resolution.metadata else None
        wanted = self._policy.names.get(resolution.name, resolution.name.partition("/")[2])
        if found is None or _plain(found) == _plain(wanted):
            return ""
        entry = f"{json.dumps(resolution.name)} = {json.dumps(found)}"
        advice = f"if that is right, say so under [names] in the policy: {entry}"
        return f"it is for a kernel named {found!r}, not {wanted!r} ({advice})"

    def _names_commit(self, resolution: Resolution) -> bool:
        """Did the user say which commit or folder it is?"""
        if resolution.request.repo_id is None or resolution.name in self._policy.pins:
            return True
        revision = resolution.request.revision or DEFAULT_REVISION
        short = revision.may_be_short_commit and resolution.commit.startswith(revision.text)
        return short or revision.kind is RevisionKind.COMMIT

    def _check_age(self, resolution: Resolution, signer: Signer) -> None:
        revision = resolution.request.revision or DEFAULT_REVISION
        version = resolution.metadata.version if resolution.metadata else None
        signed = SignedBuild(resolution.build, resolution.name, resolution.variant, revision, version, signer)
        try:
            History(self._store).check(signed)
        except OlderBuild as older:
            if not (self._allow_older or self._policy.allows_older(resolution.name)):
                raise
            self._reporter.warn(
                f"kernel build {older.build} is older than before: {older.found}, {older.seen} was seen"
            )

    def _kept(self, resolution: Resolution, identity: Identity, stored: StoredBuild | None) -> Signer | None:
        """What was found before, if nothing has changed that it depends on."""
        facts = None if stored is None else stored.kept(_KEPT, self._depends_on(identity))
        if stored is None or facts is None or not _is_of(resolution, stored):
            return None
        try:
            return Signer(str(facts["name"]), str(facts["issuer"]), int(facts["time"]))
        except (KeyError, TypeError, ValueError):
            return None

    def _keep(self, signer: Signer, identity: Identity, stored: StoredBuild | None) -> None:
        if stored is not None:
            stored.keep(_KEPT, signer.__dict__, self._depends_on(identity))

    def _depends_on(self, identity: Identity) -> tuple[str, Identity]:
        return self.root.digest, identity


def _is_of(resolution: Resolution, stored: StoredBuild) -> bool:
    """Is the metadata that resolution has read the one in the store, byte for byte (S-02)?"""
    if resolution.metadata_bytes is None:
        return False
    listed = next((file.sha256 for file in stored.manifest.files if file.path == METADATA), None)
    return listed == hashlib.sha256(resolution.metadata_bytes).hexdigest()


def _read(resolution: Resolution, folder: Path, name: str, limit: int) -> bytes:
    try:
        with open_regular(folder / name) as file:
            data: bytes = file.read(limit + 1)
    except OSError as error:
        raise DigestMismatch(resolution.build, name, f"cannot be read ({error.strerror})") from error
    return data


def _unnamed(publisher: str) -> str:
    """Why nothing can be said of a signature when nobody has said who signs."""
    if publisher:
        return f"it is signed, but nothing says by whom: add [identities.{publisher}] to the policy"
    return "it is signed, but a folder does not say who its publisher is"


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _version_problem(resolution: Resolution) -> str:
    revision = resolution.request.revision or DEFAULT_REVISION
    version = resolution.metadata.version if resolution.metadata else None
    if version is None or revision.kind in (RevisionKind.COMMIT, RevisionKind.NAME) or revision.admits(version):
        return ""
    return f"it is for version {version}, not for {revision}"


def _variant_problem(resolution: Resolution) -> str:
    try:
        variant = Variant.parse(resolution.variant)
    except InvalidVariant:
        return ""
    found = resolution.metadata.backend if resolution.metadata else None
    wanted = variant.backend.name if variant.backend else _noarch_backend(variant)
    if found is None or wanted in (found, UNIVERSAL):
        return ""
    return f"it is for {found}, not for {wanted} ({resolution.variant})"


def _noarch_backend(variant: Variant) -> str:
    return next((kind.name for kind in BACKENDS if kind.noarch == variant.noarch), str(variant.noarch))
