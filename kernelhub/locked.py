"""Locked index: answers from a lock file, in front of the index that has the bytes; and how a lock is made."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from kernelhub.buildpath import METADATA
from kernelhub.errors import NotLocked
from kernelhub.index import Builds, ListedFile, Refs
from kernelhub.lockfile import Lock, LockedKernel
from kernelhub.metadata import Metadata
from kernelhub.request import KernelRequest
from kernelhub.resolution import DEFAULT_REVISION, checked_files, find_commit, read_metadata, refuse_endless
from kernelhub.variant import Variant

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from contextlib import AbstractContextManager

    from kernelhub.index import Index
    from kernelhub.trust import TrustPolicy

_PARALLEL = 8


class LockedIndex:
    """An Index that knows what the lock lists and nothing else; it asks nobody for branches or listings.

    Trust is not in a lock: ``trusts`` asks the index behind. Bodies come from there too, and have to match the lock.
    """

    def __init__(self, lock: Lock, inner: Index) -> None:
        self.name = inner.name
        self._lock = lock
        self._inner = inner

    def trusts(self, publisher: str) -> bool | None:
        """See Index.trusts."""
        return self._inner.trusts(publisher)

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs: the locked revisions, each at its locked commit.

        Raises:
            NotLocked: the lock has no entry for this repository.
        """
        kernels = self._lock.of_repository(repo_id)
        if not kernels:
            raise NotLocked(repo_id, self._lock.origin)
        return Refs(pins={str(kernel.request.revision): kernel.commit for kernel in kernels})

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit: a revision that is not in the lock is not asked for.

        Raises:
            NotLocked: always.
        """
        raise NotLocked(f"{repo_id}@{revision}", self._lock.origin)

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds; locks of the peer list no files, there the index behind is asked.

        Raises:
            NotLocked: the commit is not a locked one.
        """
        kernel = next((kernel for kernel in self._lock.of_repository(repo_id) if kernel.commit == commit), None)
        if kernel is None:
            raise NotLocked(f"{repo_id}@{commit}", self._lock.origin)
        return kernel.variants or self._inner.builds(repo_id, commit)

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        return self._inner.files(repo_id, commit, build)

    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> AbstractContextManager[Iterator[bytes]]:
        """See Index.stream."""
        return self._inner.stream(repo_id, commit, path, offset, expected=expected)


def make_lock(requests: Iterable[KernelRequest], index: Index, trust: TrustPolicy) -> Lock:
    """Lock every request and all that its builds depend on, for every variant.

    Raises:
        UntrustedPublisher, ResolutionError, FetchError: as in ``resolve``.
    """
    maker = _LockMaker(index, trust)
    for request in requests:
        maker.add(request, ())
    return Lock(tuple(maker.done.values()))


class _LockMaker:
    """Walks the dependency tree, each repository and revision once."""

    def __init__(self, index: Index, trust: TrustPolicy) -> None:
        self.done: dict[str, LockedKernel] = {}
        self._index = index
        self._trust = trust

    def add(self, request: KernelRequest, parents: tuple[str, ...]) -> str:
        repo_id, revision = str(request.repo_id), request.revision or DEFAULT_REVISION
        plain = KernelRequest(repo_id, revision=revision)
        refuse_endless(str(plain), parents, len(self.done))
        if str(plain) in self.done:
            return str(plain)
        self._trust.check(repo_id, self._index, requested=not parents, foreign=revision.is_pull_request)
        commit = find_commit(repo_id, revision, self._index)
        self._trust.check_commit(repo_id, commit)
        variants = self._variants(repo_id, commit)
        wanted = self._wanted(repo_id, commit, variants)
        dependencies = tuple(self.add(dependency, (*parents, str(plain))) for dependency in wanted)
        self.done[str(plain)] = LockedKernel(plain, commit, dependencies, bool(parents), variants)
        return str(plain)

    def _variants(self, repo_id: str, commit: str) -> dict[str, tuple[ListedFile, ...]]:
        builds = self._index.builds(repo_id, commit)
        names = [name for name in builds if Variant.is_name(name)]
        listed = {name: builds[name] for name in names}
        return {
            name: checked_files(files if files is not None else self._index.files(repo_id, commit, name))
            for name, files in listed.items()
        }

    def _wanted(self, repo_id: str, commit: str, variants: dict[str, tuple[ListedFile, ...]]) -> list[KernelRequest]:
        """The kernels that any of the builds depends on."""

        def metadata_of(name: str) -> Metadata | None:
            data = read_metadata(self._index, repo_id, commit, name, variants[name])
            return None if data is None else Metadata.parse(data, f"{repo_id}@{commit[:12]} {name} {METADATA}")

        with ThreadPoolExecutor(_PARALLEL) as pool:
            found = [metadata for metadata in pool.map(metadata_of, variants) if metadata is not None]
        wanted = {dependency: None for metadata in found for dependency in metadata.kernel_depends}
        return [KernelRequest(dependency.repo_id, revision=dependency.revision) for dependency in wanted]
