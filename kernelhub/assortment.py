"""Assortment: every build of a kernel and of the kernels that these depend on, whatever machine they are for."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernelhub.errors import KernelHubError, RepositoryNotFound
from kernelhub.metadata import Metadata
from kernelhub.request import KernelRequest
from kernelhub.resolution import (
    DEFAULT_REVISION,
    Resolution,
    checked_files,
    find_commit,
    read_metadata,
    refuse_backslashes,
    refuse_endless,
)
from kernelhub.revision import RevisionKind
from kernelhub.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.index import Builds, Index
    from kernelhub.trust import TrustPolicy

_PARALLEL = 8


@dataclass(frozen=True)
class Assortment:
    """Builds, those that others depend on first; ``failures`` maps what could not be resolved to its error."""

    builds: tuple[Resolution, ...]
    failures: tuple[tuple[str, KernelHubError], ...] = ()


def resolve_all(request: KernelRequest, index: Index, trust: TrustPolicy) -> Assortment:
    """Every build of ``request`` and, each on its own, every build of the kernels that any of them depends on.

    A build with unreadable metadata is a failure of its own and leaves the others alone.

    Raises:
        UntrustedPublisher: asked first, for each repository on its own.
        RepositoryNotFound, RevisionNotFound, KernelDependencyError, FetchError: as in ``resolve``.
    """
    walker = _Walker(index, trust)
    walker.visit(request, ())
    return Assortment(tuple(walker.builds), tuple(walker.failures))


class _Walker:
    """One walk over the dependency tree: each repository and revision once (S-09)."""

    def __init__(self, index: Index, trust: TrustPolicy) -> None:
        self.builds: list[Resolution] = []
        self.failures: list[tuple[str, KernelHubError]] = []
        self._index = index
        self._trust = trust
        self._seen: set[str] = set()

    def visit(self, request: KernelRequest, parents: tuple[str, ...]) -> None:
        repo_id, revision = str(request.repo_id), request.revision or DEFAULT_REVISION
        name = f"{repo_id}@{revision}"
        refuse_endless(name, parents, len(self._seen))
        if name in self._seen:
            return
        self._seen.add(name)
        foreign = revision.is_pull_request
        trust = self._trust.check(repo_id, self._index, requested=not parents, foreign=foreign)
        moved_to = None if revision.kind is RevisionKind.COMMIT else self._index.refs(repo_id).moved_to
        if moved_to is not None:
            self._follow(request, moved_to, (*parents, name))
            return
        commit = find_commit(repo_id, revision, self._index)
        self._trust.check_commit(repo_id, commit)
        found = list(self._resolutions(request, commit, trust))
        for dependency in _dependencies(found):
            self.visit(dependency, (*parents, name))
        self.builds += found

    def _follow(self, request: KernelRequest, moved_to: str, parents: tuple[str, ...]) -> None:
        """A renamed repository at its new name, trusted on its own; one hop only (S-04)."""
        if self._index.refs(moved_to).moved_to is not None:
            problem = f"it moved to {moved_to}, which moved again"
            raise RepositoryNotFound(str(request.repo_id), self._index.name, problem)
        self.visit(replace(request, repo_id=moved_to), parents)

    def _resolutions(self, request: KernelRequest, commit: str, trust: str) -> Iterator[Resolution]:
        builds = self._index.builds(str(request.repo_id), commit)
        refuse_backslashes(builds, f"{request.repo_id}@{commit[:12]}")
        names = sorted(name for name in builds if Variant.is_name(name))
        if not names:
            raise RepositoryNotFound(str(request.repo_id), self._index.name, f"it has no builds at {commit[:12]}")

        def attempt(name: str) -> Resolution | KernelHubError:
            try:
                return self._resolution(request, commit, trust, builds, name)
            except KernelHubError as error:
                return error

        with ThreadPoolExecutor(_PARALLEL, thread_name_prefix="kernelhub-metadata") as pool:
            for name, found in zip(names, pool.map(attempt, names), strict=True):
                if isinstance(found, Resolution):
                    yield found
                else:
                    self.failures.append((f"{request.repo_id}@{commit[:12]} {name}", found))

    def _resolution(self, request: KernelRequest, commit: str, trust: str, builds: Builds, variant: str) -> Resolution:
        repo_id = str(request.repo_id)
        listed = builds[variant]
        files = self._index.files(repo_id, commit, variant) if listed is None else listed
        files = checked_files(files, f"{repo_id}@{commit[:12]} {variant}")
        data = read_metadata(self._index, repo_id, commit, variant, files)
        return Resolution(
            request=request,
            name=repo_id,
            commit=commit,
            variant=variant,
            endpoint=self._index.name,
            trust=trust,
            files=files,
            metadata=None if data is None else Metadata.parse(data, f"{repo_id}@{commit[:12]} {variant}"),
            metadata_bytes=data,
        )


def _dependencies(builds: list[Resolution]) -> list[KernelRequest]:
    wanted = {depends: None for found in builds if found.metadata for depends in found.metadata.kernel_depends}
    return [KernelRequest(depends.repo_id, revision=depends.revision) for depends in wanted]
