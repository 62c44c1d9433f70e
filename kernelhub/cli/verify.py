"""``kernelhub verify``: are the builds on this machine what they should be? Nothing of them is imported."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelhub.buildpath import METADATA
from kernelhub.cli import option
from kernelhub.durable import open_regular
from kernelhub.errors import InvalidMetadata, InvalidRequest, KernelHubError
from kernelhub.explanation import explain
from kernelhub.folder import LocalFolder, open_builtin
from kernelhub.metadata import MAX_BYTES, Metadata
from kernelhub.request import KernelRequest
from kernelhub.resolution import Resolution
from kernelhub.verify import VerificationState, check_digest, rehash, verify_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.manifest import StoredBuild
    from kernelhub.session import Session

BAD = "bad"


@dataclass(frozen=True)
class Row:
    """One build: how far it proves what it is (``self-attested``, ``unverified``) or that it does not (``bad``)."""

    build: str
    state: str
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.build}: {self.state}{f': {self.problem}' if self.problem else ''}"


def verify(
    request: Annotated[str | None, typer.Argument(help="A repository, with or without a version, or a folder.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every build in the store.")] = False,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    as_json: option.AsJson = False,
) -> None:
    """Hash every file of the builds of REQUEST that are on this machine, and compare with what they should be.

    Exit code 1 if one of them is bad, or, in the strict mode, proves nothing.
    """
    session = option.open_session(None, cache_dir, offline)
    if (request is None) is not everything:
        raise InvalidRequest(request or "", "nothing to verify" if request is None else "a request and --all", "one")
    rows = list(_rows(None if request is None else KernelRequest.parse(request), session))
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        typer.echo("\n".join(map(str, rows)) or "no such build is on this machine")
    failing = {BAD, *([VerificationState.UNVERIFIED.value] if session.is_strict else [])}
    if failing.intersection(row.state for row in rows) or not (rows or everything):
        raise typer.Exit(1)


def _rows(request: KernelRequest | None, session: Session) -> Iterator[Row]:
    if request is not None and request.repo_id is None:
        local = open_builtin(request.revision) if request.is_builtin else LocalFolder.open(request.folder)
        builds = local.builds or {folder.name: folder for folder in [local.unnamed] if folder}
        for variant, folder in builds.items():
            yield _judge_folder(request, local.label, variant, folder)
        return
    commit = _commit(request, session)
    for stored in session.store.builds():
        if request is None or (stored.manifest.repo_id == request.repo_id and commit in (None, stored.manifest.commit)):
            yield _judge_stored(stored)


def _commit(request: KernelRequest | None, session: Session) -> str | None:
    """The commit that was asked for; None for any."""
    if request is None or request.revision is None:
        return None
    resolution = explain(request, session).resolution
    return resolution.commit if resolution else request.revision.text


def _judge_stored(stored: StoredBuild) -> Row:
    """Against the manifest that was written when it was downloaded, and against the digest in its own metadata."""
    manifest = stored.manifest
    build = f"{manifest.repo_id}@{manifest.commit[:12]} {manifest.variant}"
    try:
        rehash(stored)
        request = KernelRequest(manifest.repo_id)
        resolution = _resolution(request, manifest.repo_id, manifest.variant, stored.files_folder, manifest.commit)
        check_digest(resolution, stored.files_folder, manifest.files)
    except KernelHubError as error:
        return Row(build, BAD, str(error))
    return Row(build, _state(resolution).value)


def _judge_folder(request: KernelRequest, label: str, variant: str, folder: Path) -> Row:
    try:
        state = verify_folder(_resolution(request, label, variant, folder)).state
    except KernelHubError as error:
        return Row(f"{label} {variant}", BAD, str(error))
    return Row(f"{label} {variant}", state.value)


def _state(resolution: Resolution) -> VerificationState:
    attested = resolution.metadata is not None and resolution.metadata.digest is not None
    return VerificationState.SELF_ATTESTED if attested else VerificationState.UNVERIFIED


def _resolution(request: KernelRequest, name: str, variant: str, folder: Path, commit: str = "") -> Resolution:
    """What verification has to know about a build that is here, whether or not it fits this machine."""
    path = folder / METADATA
    try:
        with open_regular(path) as file:
            metadata = Metadata.parse(file.read(MAX_BYTES + 1), f"{name} {variant}")
    except FileNotFoundError:
        metadata = None
    except OSError as error:
        raise InvalidMetadata(METADATA, f"cannot be read ({error.strerror})", "a regular file", str(path)) from error
    return Resolution(request, name, commit, variant, "", "", folder=folder, metadata=metadata)
