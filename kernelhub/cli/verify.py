"""``kernelhub verify``: are the builds on this machine what they should be? Nothing of them is imported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from kernelhub.buildpath import METADATA, SIGNATURE
from kernelhub.cli import option
from kernelhub.durable import open_regular
from kernelhub.errors import InvalidMetadata, InvalidRequest, KernelHubError
from kernelhub.explanation import explain
from kernelhub.folder import LocalFolder, open_builtin
from kernelhub.metadata import MAX_BYTES, Metadata
from kernelhub.request import KernelRequest
from kernelhub.resolution import Resolution
from kernelhub.revision import Revision
from kernelhub.verify import VerificationState, check_digest, rehash, verify_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kernelhub.manifest import StoredBuild
    from kernelhub.session import Session

BAD = "bad"


@dataclass(frozen=True)
class Row:
    """One build: how far it proves what it is (``signed``, ``self-attested``, ...) or that it does not (``bad``).

    ``note`` says why a signature was not checked; ``refused`` that the policy in force would not load the build.
    """

    build: str
    state: str
    problem: str = ""
    signer: str = ""
    note: str = ""
    refused: bool = False

    def __str__(self) -> str:
        told = self.problem or self.note or (f"by {self.signer}" if self.signer else "")
        return f"{self.build}: {self.state}{f': {told}' if told else ''}"


def verify(
    request: Annotated[str | None, typer.Argument(help="A repository, with or without a version, or a folder.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every build in the store.")] = False,
    publisher: Annotated[str, typer.Option(help="Whose signature the builds of a folder are meant to have.")] = "",
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    as_json: option.AsJson = False,
) -> None:
    """Hash every file of the builds of REQUEST that are on this machine, and check their signatures anew.

    Exit code 1 if one of them is bad, or would be refused by the policy, the lock or the strict mode in force.
    """
    session = option.open_session(None, cache_dir, offline)
    if (request is None) is not everything:
        raise InvalidRequest(request or "", "nothing to verify" if request is None else "a request and --all", "one")
    parsed = None if request is None else KernelRequest.parse(request)
    rows = list(_rows(parsed, session, publisher))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        typer.echo("\n".join(map(str, rows)) or "no such build is on this machine")
    if any(row.refused or row.state == BAD for row in rows) or not (rows or everything):
        raise typer.Exit(1)


def _rows(request: KernelRequest | None, session: Session, publisher: str) -> Iterator[Row]:
    if request is not None and request.repo_id is None:
        local = open_builtin(request.revision) if request.is_builtin else LocalFolder.open(request.folder)
        builds = local.builds or {folder.name: folder for folder in [local.unnamed] if folder}
        for variant, folder in builds.items():
            yield _judged(
                f"{local.label} {variant}", partial(_folder, request, local.label, folder), session, publisher
            )
        return
    commit = _commit(request, session)
    for stored in session.store.builds():
        manifest = stored.manifest
        if request is None or (manifest.repo_id == request.repo_id and commit in (None, manifest.commit)):
            build = f"{manifest.repo_id}@{manifest.commit[:12]} {manifest.variant}"
            yield _judged(build, partial(_stored, stored), session, publisher)


def _commit(request: KernelRequest | None, session: Session) -> str | None:
    """The commit that was asked for; None for any."""
    if request is None or request.revision is None:
        return None
    resolution = explain(request, session).resolution
    return resolution.commit if resolution else request.revision.text


class Found(NamedTuple):
    """A build on this machine whose files are those that its manifest and its own metadata list."""

    resolution: Resolution
    folder: Path
    stored: StoredBuild | None = None


def _judged(build: str, find: Callable[[], Found], session: Session, publisher: str) -> Row:
    acceptance = session.acceptance
    try:
        found = find()
        finding = acceptance.look(*found, publisher)
        state = acceptance.state(_attested(found.resolution), finding, found.resolution, found.stored)
    except KernelHubError as error:
        return Row(build, BAD, str(error))
    refusal = acceptance.refusal(state, finding, found.resolution)
    signer, problem = str(finding.signer or ""), str(refusal or "")
    note = "" if finding.signer or not (found.folder / SIGNATURE).exists() else finding.reason
    return Row(build, state.value, problem, signer, note, refusal is not None)


def _stored(stored: StoredBuild) -> Found:
    """Against the manifest that was written when it was downloaded, and against the digest in its own metadata."""
    manifest, folder = stored.manifest, stored.files_folder
    rehash(stored)
    request = KernelRequest(manifest.repo_id, revision=Revision.parse(manifest.commit))
    resolution = _resolution(request, manifest.repo_id, manifest.variant, folder, manifest.commit)
    check_digest(resolution, folder, manifest.files)
    return Found(resolution, folder, replace(stored, always_hash=True))  # nothing that was found before counts


def _folder(request: KernelRequest, label: str, folder: Path) -> Found:
    resolution = _resolution(request, label, folder.name, folder)
    verify_folder(resolution)
    return Found(resolution, folder)


def _attested(resolution: Resolution) -> VerificationState:
    attested = resolution.metadata is not None and resolution.metadata.digest is not None
    return VerificationState.SELF_ATTESTED if attested else VerificationState.UNVERIFIED


def _resolution(request: KernelRequest, name: str, variant: str, folder: Path, commit: str = "") -> Resolution:
    """What verification has to know about a build that is here, whether or not it fits this machine."""
    path = folder / METADATA
    try:
        with open_regular(path) as file:
            data: bytes = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return Resolution(request, name, commit, variant, "", "", folder=folder)
    except OSError as error:
        raise InvalidMetadata(METADATA, f"cannot be read ({error.strerror})", "a regular file", str(path)) from error
    metadata = Metadata.parse(data, f"{name} {variant}")
    return Resolution(request, name, commit, variant, "", "", folder=folder, metadata=metadata, metadata_bytes=data)
