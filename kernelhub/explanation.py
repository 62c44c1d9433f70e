"""Explanation: what would be loaded for a request, why, and what else was considered; nothing is downloaded.

Listing a repository runs none of its code, so an explanation is given for untrusted publishers too; it says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kernelhub.buildpath import SIGNATURE
from kernelhub.compatibility import Selection
from kernelhub.errors import InvalidVariant, NoCompatibleVariant, UntrustedPublisher, VerificationError
from kernelhub.preflight import PreflightReport, preflight_folder
from kernelhub.resolution import DEFAULT_REVISION
from kernelhub.trust import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kernelhub.environment import Environment
    from kernelhub.index import Index
    from kernelhub.request import KernelRequest
    from kernelhub.resolution import Resolution
    from kernelhub.session import Session

_SHOWN_NAMES = 3
UNKNOWN = "unknown (torch is not installed)"
UNSIGNED = "none"


@dataclass(frozen=True)
class Explanation:
    """Everything that was considered for one request.

    ``resolution`` is None when no build fits; then ``problem`` says why and ``advice`` what to do. ``libraries`` is
    what the native libraries of the build need, and ``signature`` who signed it, as far as they are on this machine
    already.
    """

    request: KernelRequest
    environment: Environment
    trust: str
    trusted: bool
    selection: Selection
    resolution: Resolution | None = None
    problem: str = ""
    advice: str = ""
    libraries: PreflightReport | None = None
    signature: str = ""

    @property
    def verdict(self) -> str:
        """One line: the choice, or that there is none."""
        if self.environment.torch is None:
            return UNKNOWN
        if self.resolution is None:
            return "no build fits"
        refused = self.libraries.refused if self.libraries else None
        if refused is not None:
            return f"{self.resolution.variant}, which cannot be loaded here: {'; '.join(refused.reasons)}"
        if not self.selection.accepted:
            return f"{self.resolution.variant}, as the folder itself is a build"
        return f"{self.resolution.variant}, the best of {len(self.selection.accepted)} that fit"

    @property
    def reasons(self) -> dict[str, str]:
        """Every build with why it fits or not, those that fit first, best first."""
        known = self.environment.torch is not None
        rows = {str(variant): "fits" if known else UNKNOWN for variant in self.selection.accepted}
        rows |= {str(each.variant): each.reason if known else UNKNOWN for each in self.selection.rejected}
        return rows | {str(error.value): "ignored: not a build variant" for error in self.selection.unknown}

    @property
    def info(self) -> dict[str, Any]:
        """What the chosen build says about itself: license, origin, digest, dependencies, size."""
        facts = {"request": str(self.request), "trust": self.trust, "verdict": self.verdict}
        return facts | self._build_facts()

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "request": str(self.request),
            "environment": str(self.environment),
            "trusted": self.trusted,
            "trust": self.trust,
            "verdict": self.verdict,
            "build": self._build_facts() or None,
            "accepted": [str(variant) for variant in self.selection.accepted],
            "rejected": {str(rejection.variant): rejection.reason for rejection in self.selection.rejected},
            "unknown": [str(error.value) for error in self.selection.unknown],
            "advice": self.advice,
            "libraries": {} if self.libraries is None else self.libraries.to_dict(),
        }

    def _build_facts(self) -> dict[str, Any]:
        return {} if self.resolution is None else {**_facts_of(self.resolution), "signature": self.signature}

    def __str__(self) -> str:
        return "\n".join([*self._head(), *self._considered(), *self._tail()])

    def _head(self) -> list[str]:
        lines = [f"request      {self.request}{self._pin_hint()}", f"environment  {self.environment}"]
        if self.environment.torch_build:
            lines.append(f"torch        {self.environment.torch_build}")
        lines.append(f"trust        {'' if self.trusted else 'NOT TRUSTED: '}{self.trust}")
        if self.resolution is not None:
            lines += [f"commit       {self.resolution.commit}", f"choice       {self.verdict}"]
            lines.append(f"download     {len(self.resolution.files)} files, {self.resolution.size} bytes")
        else:
            lines.append(f"choice       {self.verdict}")
        return lines

    def _pin_hint(self) -> str:
        if self.request.revision is not None or self.request.repo_id is None:
            return ""
        pinned = replace(self.request, revision=DEFAULT_REVISION)
        return f"   (no version given: {DEFAULT_REVISION}; pin it as {pinned})"

    def _considered(self) -> list[str]:
        lines = [f"  fits       {variant}" for variant in self.selection.accepted]
        reasons: dict[str, list[str]] = {}
        for rejection in self.selection.rejected:
            reasons.setdefault(rejection.reason, []).append(str(rejection.variant))
        lines += [f"  rejected   {reason}: {_few(names)}" for reason, names in reasons.items()]
        if self.selection.unknown:
            lines.append(f"  ignored    not a build variant: {_few([repr(e.value) for e in self.selection.unknown])}")
        return lines

    def _tail(self) -> list[str]:
        dependencies = list(self.resolution.tree())[:-1] if self.resolution else []
        lines = [f"depends on   {dependency.build}" for dependency in dependencies]
        lines += [f"signature    {self.signature}"] if self.signature not in ("", UNSIGNED) else []
        lines += [f"library      {line}" for line in (self.libraries.lines() if self.libraries else ())]
        lines += [f"note         {note}" for note in (self.resolution.notes if self.resolution else ())]
        return [*lines, *([f"next         {self.advice}"] if self.advice else [])]


class _ListingOnly(TrustPolicy):
    """Lets resolution list what it will not run."""

    def check(self, repo_id: str, index: Index, *, requested: bool, foreign: bool = False) -> str:
        return "not asked, as nothing of it is run"


def explain(
    request: KernelRequest, session: Session, *, backend: str | None = None, trust: bool | Iterable[str] = False
) -> Explanation:
    """Explain what ``session`` would load for ``request``.

    Raises:
        RepositoryNotFound, RevisionNotFound, FetchError: there is nothing to explain.
    """
    environment = session.environment_for(backend)
    reason, trusted = _trust_of(request, session, TrustPolicy.of(trust))
    try:
        resolution = session.resolve(request, backend=backend, trust=_ListingOnly())
    except NoCompatibleVariant as error:
        unknown = tuple(InvalidVariant(name, "not a build variant") for name in error.unknown)
        considered = Selection((), tuple(error.rejections), unknown)
        advice = str(error).rpartition("\n")[2]
        return Explanation(request, environment, reason, trusted, considered, None, str(error), advice)
    selection = resolution.selection or Selection((), (), ())
    libraries = _libraries(resolution, session)
    advice = session.suggest(resolution, backend=backend) if libraries is not None and libraries.refused else ""
    signature = _signature(resolution, session)
    return Explanation(
        request, environment, reason, trusted, selection, resolution, "", advice, libraries, signature=signature
    )


def _signature(resolution: Resolution, session: Session) -> str:
    """Who signed the build, if that was or can be checked on this machine, and otherwise why not."""
    if not any(file.path == SIGNATURE for file in resolution.files):
        return UNSIGNED
    acceptance = session.acceptance
    if acceptance.rule(resolution) == "off":
        return "there is one; not looked at, as the policy does not ask for it"
    stored = session.store.find(resolution.name, resolution.commit, resolution.variant)
    if stored is None:
        return "there is one; checked when the build is fetched"
    try:
        finding = acceptance.look(resolution, stored.files_folder, stored)
    except VerificationError as error:
        return f"REFUSED: {error}"
    return f"not checked: {finding.reason}" if finding.signer is None else str(finding.signer)


def _libraries(resolution: Resolution, session: Session) -> PreflightReport | None:
    """The libraries of a build that is on this machine and for this machine."""
    if session.environment is not None:
        return None
    stored = None if resolution.folder else session.store.find(resolution.name, resolution.commit, resolution.variant)
    folder = stored.files_folder if stored else resolution.folder
    if folder is None:
        return None
    names = [resolution.metadata.id] if resolution.metadata and resolution.metadata.id else []
    return preflight_folder(resolution.build, resolution.variant, folder, names=names)


def _trust_of(request: KernelRequest, session: Session, policy: TrustPolicy) -> tuple[str, bool]:
    if request.repo_id is None or session.override_of(request.repo_id) is not None:
        return "on this machine", True
    try:
        return session.trust_of(request.repo_id, policy), True
    except UntrustedPublisher as error:
        return f"publisher {error.publisher}, {error.reason}; pass trust_remote_code=[{error.repo_id!r}]", False


def _facts_of(resolution: Resolution) -> dict[str, Any]:
    metadata = resolution.metadata
    return {
        "kernel": resolution.name,
        "commit": resolution.commit,
        "variant": resolution.variant,
        "files": len(resolution.files),
        "bytes": resolution.size,
        "dependencies": [dependency.build for dependency in list(resolution.tree())[:-1]],
        "license": metadata.license if metadata else None,
        "upstream": metadata.upstream if metadata else None,
        "archs": list(metadata.archs) if metadata else [],
        "digest": metadata.digest.algorithm if metadata and metadata.digest else None,
        "provenance": dict(metadata.provenance) if metadata else {},
    }


def _few(names: list[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    return shown if len(names) <= _SHOWN_NAMES else f"{shown} and {len(names) - _SHOWN_NAMES} more"
