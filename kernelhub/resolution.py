"""Resolution: from a request to one build at one commit, with all that was considered and all it depends on.

Trust is asked first, then the commit is pinned once, then the build is chosen; nothing is downloaded but the
``metadata.json`` of the chosen build. What is resolved here is a plain, picklable value: loading it later, or in
another process, makes no further decision (S-02, S-03).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from kernelhub.buildpath import METADATA, check_paths, is_bytecode
from kernelhub.compatibility import Selection, judge_archs, select
from kernelhub.errors import (
    DigestMismatch,
    IncompleteDownload,
    InvalidMetadata,
    InvalidPath,
    KernelDependencyError,
    NoCompatibleVariant,
    NotCached,
    RepositoryNotFound,
    RevisionNotFound,
    UntrustedPublisher,
)
from kernelhub.folder import LocalFolder, open_builtin
from kernelhub.metadata import MAX_BYTES, Metadata
from kernelhub.redirect import MAX_STATUS_BYTES, STATUS_FILE, read_redirect
from kernelhub.request import KernelRequest
from kernelhub.revision import Revision, RevisionKind
from kernelhub.store import open_regular

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kernelhub.environment import Environment
    from kernelhub.index import Builds, Index, ListedFile, Refs
    from kernelhub.trust import TrustPolicy

DEFAULT_REVISION = Revision.version(1)
MAX_DEPTH = 8
MAX_KERNELS = 64

_MOST_SUGGESTED = 5  # versions that are looked at for "version N would fit"


@dataclass(frozen=True)
class Resolution:
    """The one build that serves a request.

    ``folder`` is set for builds read in place (local path, built-in collection); otherwise ``commit`` and ``files``
    say what to fetch. ``metadata_bytes`` are the bytes that ``metadata`` was parsed from, None when there are none.
    """

    request: KernelRequest
    name: str
    commit: str
    variant: str
    endpoint: str
    trust: str
    files: tuple[ListedFile, ...] = ()
    folder: Path | None = None
    metadata: Metadata | None = None
    metadata_bytes: bytes | None = field(default=None, repr=False)
    selection: Selection | None = field(default=None, repr=False, compare=False)
    notes: tuple[str, ...] = ()
    dependencies: tuple[Resolution, ...] = ()

    @property
    def kernel(self) -> str:
        """``org/repo@commit`` (12 digits), as reports show it."""
        return f"{self.name}@{self.commit[:12]}" if self.commit else self.name

    @property
    def build(self) -> str:
        """The kernel and the build variant, for messages."""
        return f"{self.kernel} {self.variant}"

    @property
    def size(self) -> int:
        """Bytes to download when nothing is stored yet."""
        return sum(file.size for file in self.files)

    def tree(self) -> Iterator[Resolution]:
        """The dependencies, deepest first, then this one; each build once."""
        seen: set[str] = set()
        for resolution in self._walk():
            if resolution.build not in seen:
                seen.add(resolution.build)
                yield resolution

    def _walk(self) -> Iterator[Resolution]:
        for dependency in self.dependencies:
            yield from dependency._walk()
        yield self


class Chosen(NamedTuple):
    """A selection after the metadata of its best build was read."""

    variant: str
    files: tuple[ListedFile, ...]
    metadata: Metadata | None
    data: bytes | None
    selection: Selection
    notes: tuple[str, ...]


def resolve(
    request: KernelRequest,
    environment: Environment,
    index: Index,
    trust: TrustPolicy,
    override: Callable[[str], Path | None] = lambda repo_id: None,
) -> Resolution:
    """Find the build of ``request`` for ``environment``, and of every kernel that it depends on.

    ``override`` gives the folder that takes the place of a repository, where there is one.

    Raises:
        UntrustedPublisher: asked first, for each repository on its own.
        RepositoryNotFound, RevisionNotFound, NoCompatibleVariant: what exists instead is in the message.
        KernelDependencyError: a dependency cycle, or too many or too deep dependencies.
        FetchError: the index could not be asked.
    """
    return _Resolver(environment, index, trust, override).resolve(request, ())


class _Resolver:
    """One resolution run: each repository and revision is resolved once (S-09)."""

    def __init__(
        self, environment: Environment, index: Index, trust: TrustPolicy, override: Callable[[str], Path | None]
    ) -> None:
        self._environment = environment
        self._index = index
        self._trust = trust
        self._override = override
        self._done: dict[tuple[str, Revision | None], Resolution] = {}
        self._followed: set[str] = set()

    def resolve(self, request: KernelRequest, parents: tuple[str, ...]) -> Resolution:
        if request.repo_id is None:
            return self._resolve_folder(request)
        folder = self._override(request.repo_id)
        if folder is not None:  # a slash at its end keeps a colon in it from reading as a symbol
            return self._resolve_folder(KernelRequest(path=f"{folder}/", symbol=request.symbol))
        key = (request.repo_id, request.revision)
        if key not in self._done:
            refuse_endless(f"{request.name}@{request.revision}", parents, len(self._done))
            self._done[key] = self._resolve_repository(request, request.repo_id, parents)
        return self._done[key]

    def _resolve_repository(self, request: KernelRequest, repo_id: str, parents: tuple[str, ...]) -> Resolution:
        revision = request.revision or DEFAULT_REVISION
        trust = self._checked_trust(repo_id, revision, requested=not parents)
        moved_to = None if revision.kind is RevisionKind.COMMIT else self._index.refs(repo_id).moved_to
        if moved_to is not None:
            return self._follow(request, repo_id, moved_to, parents)
        commit = find_commit(repo_id, revision, self._index)
        self._trust.check_commit(repo_id, commit)
        chosen = self._choose(repo_id, commit)
        if isinstance(chosen, Selection):
            redirect = None if _considered(chosen) else self._redirect(repo_id, commit)
            if redirect is not None:
                return self._follow(request, repo_id, redirect, parents)
            raise self._no_compatible(repo_id, commit, revision, chosen)
        name = f"{request.name}@{request.revision}"
        return Resolution(
            request=request,
            name=repo_id,
            commit=commit,
            variant=chosen.variant,
            endpoint=self._index.name,
            trust=trust,
            files=chosen.files,
            metadata=chosen.metadata,
            metadata_bytes=chosen.data,
            selection=chosen.selection,
            notes=chosen.notes,
            dependencies=self._dependencies(chosen.metadata, (*parents, name)),
        )

    def _checked_trust(self, repo_id: str, revision: Revision, *, requested: bool) -> str:
        try:
            foreign = revision.is_pull_request
            return self._trust.check(repo_id, self._index, requested=requested, foreign=foreign)
        except UntrustedPublisher:
            if self._index.trusts(repo_id.partition("/")[0]) is None:  # offline, and never asked about online:
                commit = find_commit(repo_id, revision, self._index)  # NotCached is the better answer, if it is one
                self._index.builds(repo_id, commit)
            raise

    def _follow(
        self, request: KernelRequest, repo_id: str, moved_to: str | KernelRequest, parents: tuple[str, ...]
    ) -> Resolution:
        """Resolve a moved repository at its new name, which has to be trusted on its own; one hop only (S-04, S-05)."""
        name = f"{request.name}@{request.revision}"
        destination = replace(request, repo_id=moved_to) if isinstance(moved_to, str) else moved_to
        if repo_id in self._followed or self._index.refs(destination.name).moved_to is not None:
            raise RepositoryNotFound(repo_id, self._index.name, f"it moved to {destination.name}, which moved again")
        self._followed.add(destination.name)
        resolution = self.resolve(replace(destination, symbol=request.symbol), (*parents, name))
        return replace(resolution, notes=(f"{repo_id} has moved to {destination}", *resolution.notes))

    def _redirect(self, repo_id: str, commit: str) -> KernelRequest | None:
        """Where a repository without builds says that its kernel is now (S-05)."""
        data = bytearray()
        try:
            with self._index.stream(repo_id, commit, STATUS_FILE) as chunks:
                for chunk in chunks:
                    data += chunk[: MAX_STATUS_BYTES + 1 - len(data)]
        except (IncompleteDownload, NotCached):  # it has no such file
            return None
        return read_redirect(bytes(data), f"{repo_id}@{commit[:12]}")

    def _dependencies(self, metadata: Metadata | None, parents: tuple[str, ...]) -> tuple[Resolution, ...]:
        wanted = metadata.kernel_depends if metadata else ()
        requests = [KernelRequest(dependency.repo_id, revision=dependency.revision) for dependency in wanted]
        return tuple(self.resolve(request, parents) for request in requests)

    def _choose(self, repo_id: str, commit: str) -> Chosen | Selection:
        """The best build whose metadata does not rule it out, else why each was rejected."""
        builds = self._index.builds(repo_id, commit)
        refuse_backslashes(builds, f"{repo_id}@{commit[:12]}")
        selection = select(builds, self._environment)
        while selection.best is not None:
            variant = str(selection.best)
            listed = builds[variant]
            files = self._index.files(repo_id, commit, variant) if listed is None else listed
            files = checked_files(files, f"{repo_id}@{commit[:12]} {variant}")
            data = read_metadata(self._index, repo_id, commit, variant, files)
            metadata = None if data is None else Metadata.parse(data, f"{repo_id}@{commit[:12]}")
            verdict = judge_archs(metadata.archs if metadata else (), self._environment)
            if verdict.reason is None:
                notes = (*((verdict.note,) if verdict.note else ()), *(metadata.notes if metadata else ()))
                return Chosen(variant, files, metadata, data, selection, notes)
            selection = selection.without_best(verdict.reason)
        return selection

    def _no_compatible(
        self, repo_id: str, commit: str, revision: Revision, selection: Selection
    ) -> NoCompatibleVariant:
        unknown = [str(error.value) for error in selection.unknown]
        fitting = self._fitting_version(repo_id, commit)
        return NoCompatibleVariant(repo_id, str(revision), self._environment, selection.rejected, unknown, fitting)

    def _fitting_version(self, repo_id: str, commit: str) -> int | None:
        """The newest other version that has a build for this environment."""
        others = [pair for pair in self._index.refs(repo_id).versions.items() if pair[1] != commit]
        for version, other in reversed(others[-_MOST_SUGGESTED:]):
            if select(self._index.builds(repo_id, other), self._environment).best is not None:
                return version
        return None

    def _resolve_folder(self, request: KernelRequest) -> Resolution:
        local = open_builtin(request.revision) if request.is_builtin else LocalFolder.open(request.folder)
        folder, selection = self._choose_folder(local, request)
        data = _local_metadata(folder / METADATA)
        metadata = None if data is None else Metadata.parse(data, str(folder / METADATA))
        name, _, commit = local.label.partition("@") if request.is_builtin else (local.label, "", "")
        return Resolution(
            request=request,
            name=name,
            commit=commit,
            variant=folder.name,
            endpoint="",
            trust="shipped with kernelhub" if request.is_builtin else "a folder that the caller named",
            folder=folder,
            metadata=metadata,
            metadata_bytes=data,
            selection=selection,
            notes=metadata.notes if metadata else (),
            dependencies=self._dependencies(metadata, (str(request),)),
        )

    def _choose_folder(self, local: LocalFolder, request: KernelRequest) -> tuple[Path, Selection | None]:
        if local.unnamed is not None:
            return local.unnamed, None
        selection = select(local.builds, self._environment)
        if selection.best is None:
            revision = str(request.revision or "folder")
            raise NoCompatibleVariant(local.label, revision, self._environment, selection.rejected)
        return local.builds[str(selection.best)], selection


def _considered(selection: Selection) -> bool:
    """Was there any build to judge?"""
    return bool(selection.accepted or selection.rejected or selection.unknown)


def find_commit(repo_id: str, revision: Revision, index: Index) -> str:
    """The commit that ``revision`` means now.

    Raises:
        RevisionNotFound: with the versions that exist, in numeric order.
    """
    if revision.kind is RevisionKind.COMMIT:
        return revision.text
    refs = index.refs(repo_id)
    commit = _look_up(revision, refs) or _look_up(revision, refs := index.refs(repo_id, refresh=True))
    if commit is not None:
        return commit
    if revision.may_be_short_commit or revision.is_pull_request or refs.pins:  # a lock refuses by itself
        return index.commit(repo_id, revision.text)
    raise RevisionNotFound(repo_id, str(revision), list(refs.versions), sorted(refs.branches))


def _look_up(revision: Revision, refs: Refs) -> str | None:
    if revision.kind is RevisionKind.NAME or revision.text in refs.pins:
        return refs.find(revision.text)
    fitting = [version for version in refs.versions if revision.admits(version)]
    return refs.versions[fitting[-1]] if fitting else None


def checked_files(files: tuple[ListedFile, ...], origin: str = "") -> tuple[ListedFile, ...]:
    """The files to fetch: bytecode that slipped into a repository is left out, odd names refuse the build."""
    kept = tuple(file for file in files if not is_bytecode(file.path) or file.path.endswith(".pth"))
    try:
        check_paths(file.path for file in kept)
    except InvalidPath as error:
        raise InvalidPath(error.value, error.problem, error.expected, origin) from None
    return kept


def refuse_backslashes(builds: Builds, origin: str) -> None:
    """A backslash anywhere in a listing refuses the whole revision: what it means differs among systems (S-11).

    Raises:
        InvalidPath: the first such path.
    """
    for build, files in builds.items():
        for path in (build, *(f"{build}/{file.path}" for file in files or ())):
            if "\\" in path:
                raise InvalidPath(path, "backslash", "names joined by '/'", origin)


def read_metadata(index: Index, repo_id: str, commit: str, variant: str, files: tuple[ListedFile, ...]) -> bytes | None:
    """The bytes of a build's ``metadata.json``, as the listing promised them; None when it has none.

    Raises:
        InvalidMetadata: larger than a metadata file may be; told before it is fetched.
        DigestMismatch: other bytes than were listed.
    """
    listed = next((file for file in files if file.path == METADATA), None)
    if listed is None:
        return None
    if listed.size > MAX_BYTES:
        raise InvalidMetadata(METADATA, f"{listed.size} bytes", f"at most {MAX_BYTES}", f"{repo_id}@{commit[:12]}")
    data = bytearray()
    with index.stream(repo_id, commit, f"build/{variant}/{METADATA}", expected=listed) as chunks:
        for chunk in chunks:
            data += chunk
            if len(data) > listed.size:
                break
    if not listed.matches(bytes(data)):
        raise DigestMismatch(f"{repo_id}@{commit[:12]} {variant}", METADATA, "differs from the Hub's listing")
    return bytes(data)


def _local_metadata(path: Path) -> bytes | None:
    """The bytes of a ``metadata.json`` read in place, as many as the parser accepts and one more; None without one."""
    try:
        with open_regular(path) as file:
            return file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidMetadata(METADATA, f"cannot be read ({error.strerror})", "a regular file", str(path)) from error


def refuse_endless(name: str, parents: tuple[str, ...], done: int) -> None:
    """Stop a dependency tree that never ends or is absurdly large (S-09).

    Raises:
        KernelDependencyError: a cycle, too deep, or too many kernels.
    """
    path = (*parents, name)
    if name in parents:
        raise KernelDependencyError("a cycle", path)
    if len(parents) > MAX_DEPTH:
        raise KernelDependencyError(f"more than {MAX_DEPTH} levels deep", path)
    if done + len(parents) >= MAX_KERNELS:
        raise KernelDependencyError(f"more than {MAX_KERNELS} kernels in one tree", path)
