"""Inventory: what is in a store, how good it is, and what can go; nothing that a process uses is ever removed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kernelhub.buildpath import METADATA
from kernelhub.durable import open_regular
from kernelhub.errors import InvalidMetadata, KernelHubError
from kernelhub.manifest import MANIFEST
from kernelhub.metadata import MAX_BYTES, Metadata
from kernelhub.revision import RevisionKind
from kernelhub.verify import VerificationState, rehash

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.manifest import StoredBuild
    from kernelhub.request import KernelRequest
    from kernelhub.store import Store

DAY = 24 * 3600.0


@dataclass(frozen=True)
class StoredKernel:
    """One stored build with what the store knows about it; ``last_use`` is a time, to the day."""

    build: StoredBuild
    last_use: float
    in_use: bool
    state: str
    license: str | None = None

    @property
    def name(self) -> str:
        return f"{self.build.manifest.repo_id}@{self.build.manifest.commit[:12]} {self.build.manifest.variant}"

    def to_dict(self) -> dict[str, Any]:
        manifest = self.build.manifest
        return {
            "repo_id": manifest.repo_id,
            "commit": manifest.commit,
            "variant": manifest.variant,
            "endpoint": manifest.endpoint,
            "size": manifest.size,
            "files": len(manifest.files),
            "last_use": time.strftime("%Y-%m-%d", time.localtime(self.last_use)),
            "in_use": self.in_use,
            "state": self.state,
            "license": self.license,
            "digest": manifest.digest,
            "folder": str(self.build.folder),
        }


def stored_kernels(store: Store) -> Iterator[StoredKernel]:
    """Every build of a store, of all Hubs."""
    for build in store.builds(all_hubs=True):
        state, license_ = _claims(build)
        try:
            last_use = (build.folder / MANIFEST).stat().st_mtime
        except OSError:  # removed meanwhile
            continue
        yield StoredKernel(build, last_use, store.is_leased(build), state, license_)


def matching(kernels: list[StoredKernel], request: KernelRequest, store: Store) -> list[StoredKernel]:
    """Those that a request names: all of its repository, or those at its revision as the store knows it."""
    named = [kernel for kernel in kernels if kernel.build.manifest.repo_id == request.repo_id]
    if request.revision is None:
        return named
    text = request.revision.text
    commits = {kernel.build.manifest.commit for kernel in named if kernel.build.manifest.commit.startswith(text)}
    if request.revision.kind is not RevisionKind.COMMIT:
        branches = (store.recorded("repositories", str(request.repo_id)) or {}).get("branches")
        commits |= {str(branches[text])} if isinstance(branches, dict) and text in branches else set()
    return [kernel for kernel in named if kernel.build.manifest.commit in commits]


def outdated(kernels: list[StoredKernel], older_than: float | None, *, keep_newest: bool) -> list[StoredKernel]:
    """Those not used for ``older_than`` days; with ``keep_newest``, not the last used build of each repository."""
    now = time.time()
    old = [kernel for kernel in kernels if older_than is None or now - kernel.last_use > older_than * DAY]
    if not keep_newest:
        return old
    newest: dict[tuple[str, str], StoredKernel] = {}
    for kernel in sorted(kernels, key=lambda kernel: (kernel.last_use, kernel.name)):
        newest[(kernel.build.manifest.endpoint, kernel.build.manifest.repo_id)] = kernel
    kept = {kernel.build.folder for kernel in newest.values()}
    return [kernel for kernel in old if kernel.build.folder not in kept]


def damage(kernel: StoredKernel) -> str | None:
    """What is wrong with a build once all its files are hashed again; None when nothing is."""
    try:
        rehash(kernel.build)
    except KernelHubError as error:
        return str(error)
    return None


def _claims(build: StoredBuild) -> tuple[str, str | None]:
    """How far a build proves what it is, and its license, as its metadata says."""
    try:
        with open_regular(build.files_folder / METADATA) as file:
            metadata = Metadata.parse(file.read(MAX_BYTES + 1))
    except FileNotFoundError:
        return VerificationState.UNVERIFIED.value, None
    except (OSError, InvalidMetadata):
        return "damaged", None
    attested = metadata.digest is not None
    return (VerificationState.SELF_ATTESTED if attested else VerificationState.UNVERIFIED).value, metadata.license
