"""Session: what the steps of the path share, and the steps wired to it once."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple

from kernelhub import setting
from kernelhub.acceptance import Acceptance
from kernelhub.assortment import resolve_all
from kernelhub.backend import device_backend
from kernelhub.compatibility import select
from kernelhub.environment import Environment
from kernelhub.errors import (
    CacheError,
    DigestMismatch,
    FetchError,
    IncompatibleLibrary,
    InvalidConfig,
    InvalidRequest,
    NotCached,
)
from kernelhub.fetch import FetchingIndex, fetch
from kernelhub.firstuse import FirstUse
from kernelhub.hfcache import CachedIndex, ReusingIndex
from kernelhub.locked import LockedIndex, make_lock
from kernelhub.lockfile import Lock
from kernelhub.override import VARIABLE, override_of
from kernelhub.policy import NO_POLICY, Policy
from kernelhub.provenance import Provenance
from kernelhub.recorded import BackedIndex, RecordedIndex, RememberingIndex, fresh_seconds
from kernelhub.reporter import Reporter
from kernelhub.request import KernelRequest
from kernelhub.resolution import DEFAULT_REVISION, Resolution, find_commit, resolve
from kernelhub.revision import RevisionKind
from kernelhub.store import Store
from kernelhub.suggestion import suggest
from kernelhub.trust import TrustPolicy
from kernelhub.verify import VerifiedBuild, verify_folder, verify_stored

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import torch

    from kernelhub.assortment import Assortment
    from kernelhub.compatibility import Selection
    from kernelhub.index import Index, Refs
    from kernelhub.store import StoredBuild

_PATIENCE = 5  # times that a build may vanish between fetch and lease
_PAUSE = 0.05
_MOST_ALTERNATIVES = 5

Trust = bool | Iterable[str]

_this_machine = cache(Environment.detect)
_OVERRIDES_TOLD: set[tuple[str, Path]] = set()


class VersionRow(NamedTuple):
    """One API version: its commit, how many builds it has, and the best build for the machine (None: none fits)."""

    version: int
    commit: str
    builds: int
    best: str | None


@dataclass
class Session:
    """What the steps share: store, endpoint, environment, offline switch, reporter.

    Args:
        cache_dir: the store's folder; default ``KERNELHUB_CACHE``, ``KERNELS_CACHE`` or ``kernelhub`` under HF_HOME.
        endpoint: the Hub's address; default ``HF_ENDPOINT`` or the public Hub.
        offline: True opens no socket; None follows ``HF_HUB_OFFLINE``.
        token: an access token, None for the one that is logged in, False for none.
        environment: the machine to choose builds for; None detects this one.
        lockfile: a lock, or the path of one, that every load has to follow; None uses ``KERNELHUB_LOCK``, else
            ``kernelhub.lock`` in the current folder if there is one; False loads without a lock.
        policy_file: the user's decisions about publishers; None uses ``KERNELHUB_POLICY``, else ``kernelhub.toml`` in
            the user's configuration folder if there is one.
        shared_cache: others may write into the store, so each load hashes all files again and runs those very bytes;
            None follows ``KERNELHUB_SHARED_CACHE``.
        strict: run the very bytes that were hashed, taken into memory first, and refuse builds without digests; None
            follows ``KERNELHUB_STRICT``.
        allow_older: signed builds older than those seen before are told, not refused; None follows
            ``KERNELHUB_ALLOW_OLDER``.
    """

    cache_dir: Path | None = None
    endpoint: str | None = None
    offline: bool | None = None
    token: str | bool | None = field(default=None, repr=False)
    environment: Environment | None = None
    lockfile: Path | Lock | Literal[False] | None = None
    policy_file: Path | None = None
    shared_cache: bool | None = None
    strict: bool | None = None
    allow_older: bool | None = None
    reporter: Reporter = field(default_factory=Reporter)

    @cached_property
    def store(self) -> Store:
        return Store(self.cache_dir, self.endpoint, shared=self.shared_cache, reporter=self.reporter)

    @cached_property
    def detected(self) -> Environment:
        return self.environment or _this_machine()

    def environment_for(self, backend: str | None) -> Environment:
        """The machine to choose for, asked for builds of ``backend`` (None: ``KERNELHUB_BACKEND``, else its own)."""
        return self.detected.with_backend(backend or (None if self.environment else setting.backend()))

    def resolve(
        self,
        request: KernelRequest,
        *,
        backend: str | None = None,
        trust: Trust | TrustPolicy = False,
        ahead: bool = False,
    ) -> Resolution:
        """The build that serves ``request``; downloads nothing but its metadata.

        With ``ahead`` the caller wants the build too: a small one is stored at once.
        """
        allowed = self._allowed(trust)
        environment = self.environment_for(backend)
        with self._advising(request, environment, allowed):
            index = self._index(request, ahead=ahead)
            resolution = resolve(request, environment, index, allowed, self.override_of)
        for found in resolution.tree():
            for note in found.notes:
                self.reporter.warn(f"kernel {found.build}: {note}")
            if not self._pins(found):
                self._first_use.tell(found)
        return resolution

    def override_of(self, repo_id: str) -> Path | None:
        """The folder that ``LOCAL_KERNELS`` puts in the place of a repository, or None; told once a process.

        Raises:
            InvalidConfig: it cannot be read, others can write into the folder, or a lock or the strict mode is on.
        """
        folder = override_of(repo_id)
        if folder is None:
            return None
        if self.is_strict or self.lock is not None:
            where = "in the strict mode" if self.is_strict else "under a lock"
            raise InvalidConfig(str(folder), f"would take the place of {repo_id} {where}", "", f"variable {VARIABLE}")
        if (repo_id, folder) not in _OVERRIDES_TOLD:
            _OVERRIDES_TOLD.add((repo_id, folder))
            self.reporter.warn(f"kernel {repo_id} is taken from {folder}, as the variable {VARIABLE} says")
        return folder

    def resolve_all(self, request: KernelRequest, *, trust: Trust | TrustPolicy = False) -> Assortment:
        """Every build of ``request``, whatever machine it is for; downloads nothing but their metadata."""
        return resolve_all(request, self._index(request), self._allowed(trust))

    def refs(self, repo_id: str) -> Refs:
        """The branches and tags of a repository, as far as this session may know them."""
        return self._index(KernelRequest(repo_id)).refs(repo_id)

    def trust_of(self, repo_id: str, trust: TrustPolicy) -> str:
        """Why a repository's code may run; raises UntrustedPublisher when it may not."""
        return trust.under(self.policy).check(repo_id, self._index(KernelRequest(repo_id)), requested=True)

    def backend_of(self, device: torch.device) -> str:
        """The backend that serves a torch device: torch calls ROCm's devices ``cuda`` too."""
        return device_backend(device.type, rocm=self.detected.backend.name == "rocm")

    def selection(self, request: KernelRequest, *, backend: str | None = None) -> Selection:
        """Every build of a Hub repository at one revision, judged by its name; asks for the listing only."""
        if request.repo_id is None:
            raise InvalidRequest(str(request), "has no builds on the Hub", "org/name")
        index = self._index(request)
        commit = find_commit(request.repo_id, request.revision or DEFAULT_REVISION, index)
        return select(index.builds(request.repo_id, commit), self.environment_for(backend))

    def versions(self, request: KernelRequest, *, backend: str | None = None) -> list[VersionRow]:
        """The API versions of a repository in numeric order, each with the build that fits best."""
        if request.repo_id is None:
            raise InvalidRequest(str(request), "has no versions on the Hub", "org/name")
        index, environment = self._index(request), self.environment_for(backend)
        rows = []
        for version, commit in index.refs(request.repo_id).versions.items():
            builds = index.builds(request.repo_id, commit)
            best = select(builds, environment).best
            rows.append(VersionRow(version, commit, len(builds), None if best is None else str(best)))
        return rows

    def obtain(self, resolution: Resolution) -> VerifiedBuild:
        """The verified build of a resolution and of all it depends on, downloaded where needed."""
        dependencies = tuple(self.obtain(dependency) for dependency in resolution.dependencies)
        if resolution.folder is not None:
            return self.accept(verify_folder(resolution, dependencies), resolution)
        index = self._index(resolution.request)
        with self._advising(resolution.request, self.detected):
            stored = self._fetch(resolution, index)
        try:
            build = self.accept(verify_stored(stored, resolution, dependencies), resolution, stored)
        except DigestMismatch as damage:
            stored = self._fetch_again(damage, stored, resolution, index)
            build = self.accept(verify_stored(stored, resolution, dependencies), resolution, stored)
        if not self._pins(resolution):
            self._first_use.check(build, resolution)
        return build

    def suggest(self, resolution: Resolution, *, backend: str | None = None) -> str:
        """What to ask for when the libraries of a build cannot be loaded; empty when nothing else is known."""
        return suggest(resolution, self._index(resolution.request), self.environment_for(backend), self.store)

    @contextlib.contextmanager
    def suggesting(self, resolution: Resolution, *, backend: str | None = None) -> Iterator[None]:
        """Tell of a library of ``resolution``, or of its dependencies, that cannot be loaded what else may do."""
        try:
            yield
        except IncompatibleLibrary as error:
            refused = next((found for found in resolution.tree() if found.build == error.build), None)
            if refused is not None:
                error.hint = f"{error.hint} {self.suggest(refused, backend=backend)}".strip()
            raise

    def _allowed(self, trust: Trust | TrustPolicy) -> TrustPolicy:
        return (trust if isinstance(trust, TrustPolicy) else TrustPolicy.of(trust)).under(self.policy)

    @contextlib.contextmanager
    def _advising(
        self, request: KernelRequest, environment: Environment, trust: TrustPolicy | None = None
    ) -> Iterator[None]:
        """What is missing offline is told with the command that fetches exactly what this machine asks for."""
        try:
            yield
        except NotCached as error:
            command = ["kernelhub", "prefetch", f"'{replace(request, symbol=None)}'"]
            if environment.torch is not None:  # else nothing tells which build it would be
                command.append(f"--target '{environment}'")
            names = sorted({*trust.repositories, *([request.name] if trust.requested else [])} if trust else ())
            command += [f"--trust {name}" for name in names]
            raise NotCached(error.what, error.store, " ".join(command)) from error

    def _fetch(self, resolution: Resolution, index: Index) -> StoredBuild:
        """The stored build, leased; one that is being removed just now is fetched again."""
        for _ in range(_PATIENCE):
            stored = fetch(resolution, index, self.store, self.reporter)
            if self.store.lease(stored):
                return stored
            time.sleep(_PAUSE)
        raise CacheError(self.store.root, f"build {resolution.build} is removed again and again by another process")

    def _fetch_again(
        self, damage: DigestMismatch, stored: StoredBuild, resolution: Resolution, index: Index
    ) -> StoredBuild:
        """Replace a damaged build; where that cannot be done the damage is the error, never a reason to fall back."""
        try:
            self.store.discard(stored)
            self.reporter.warn(f"{damage} The stored copy was removed; fetching it again.")
            return self._fetch(resolution, index)
        except FetchError as error:
            raise damage from error

    def accept(self, build: VerifiedBuild, resolution: Resolution, stored: StoredBuild | None = None) -> VerifiedBuild:
        """``build`` with the state that it proves, if that is enough for the user's policy.

        ``stored`` is the same build in the store, beside which findings are kept; None for one read in place.

        Raises:
            UnsignedKernel: the policy asks for more than the build can prove.
            BadSignature, OlderBuild: its signature is for something else, or a newer one was seen.
        """
        build = self.acceptance.accept(build, resolution, stored)
        accepted = resolution.selection.accepted if resolution.selection else ()
        others = tuple(str(variant) for variant in accepted if str(variant) != build.variant)
        # What others may swap at any moment runs from the bytes that were hashed, whatever the mode.
        strict = self.is_strict or (stored is not None and stored.always_hash)
        return replace(build, strict=strict, alternatives=others[:_MOST_ALTERNATIVES], stored=stored)

    @property
    def is_strict(self) -> bool:
        """Does every byte of code have to be one that was hashed right before it runs?"""
        return setting.flag("KERNELHUB_STRICT") if self.strict is None else self.strict

    @property
    def _first_use(self) -> FirstUse:
        return FirstUse(self.store, self.is_strict, self.reporter)

    def _pins(self, resolution: Resolution) -> bool:
        """Has the user decided which commit it is?"""
        return self.lock is not None or resolution.name in self.policy.pins

    @property
    def acceptance(self) -> Acceptance:
        """Judges what builds prove, under this session's policy and lock."""
        return Acceptance(self.policy, self._provenance, self.lock, self.is_strict, self.reporter)

    @cached_property
    def _provenance(self) -> Provenance:
        older = setting.flag("KERNELHUB_ALLOW_OLDER") if self.allow_older is None else self.allow_older
        return Provenance(self.policy, self.store, self.reporter, allow_older=older)

    @cached_property
    def policy(self) -> Policy:
        """What the user of this machine has decided about publishers; empty without a policy file."""
        path = self.policy_file or setting.policy_path()
        return NO_POLICY if path is None else Policy.read(path)

    @cached_property
    def lock(self) -> Lock | None:
        """The lock in force, or None."""
        if self.lockfile is False:
            return None
        if isinstance(self.lockfile, Lock):
            return self.lockfile
        path = self.lockfile or setting.lock_path()
        return None if path is None else Lock.read(path)

    def make_lock(self, requests: Iterable[KernelRequest], *, trust: Trust = False) -> Lock:
        """Lock requests at what they mean now, for every variant; answers are asked for anew."""
        fresh = RememberingIndex(self.store, self._connect, self.reporter, max_age=0.0, only_fresh=True)
        return make_lock(requests, fresh, TrustPolicy.of(trust).under(self.policy))

    def _index(self, request: KernelRequest, *, ahead: bool = False) -> Index:
        pinned = request.revision is not None and request.revision.kind is RevisionKind.COMMIT
        source = self._source(pinned=pinned or self.lock is not None)
        index = source if self.lock is None else LockedIndex(self.lock, source)
        if not ahead or request.repo_id is None or self._is_offline:
            return index
        return FetchingIndex(request.repo_id, index, self._reusing, self.store, self.reporter)

    @property
    def _is_offline(self) -> bool:
        return setting.offline() if self.offline is None else self.offline

    def _source(self, *, pinned: bool) -> Index:
        """The store alone when offline, else the store in front of the Hub; what is pinned never grows stale."""
        if self._is_offline:
            return BackedIndex(RecordedIndex(self.store), self._cached)
        max_age = math.inf if pinned else fresh_seconds()
        return RememberingIndex(self.store, self._connect, self.reporter, max_age, only_fresh=self.is_strict)

    def _connect(self) -> Index:
        return self._reusing

    @cached_property
    def _cached(self) -> CachedIndex:
        return CachedIndex(self.reporter, shared=self.store.shared)

    @cached_property
    def _reusing(self) -> ReusingIndex:
        return ReusingIndex(self._cached, self.store.endpoint, lambda: self._hub)

    @cached_property
    def _hub(self) -> Index:
        # Imported when a request is about to be made: a warm or offline load does not pay for the HTTP stack.
        from kernelhub.hub import HubIndex  # noqa: PLC0415

        return HubIndex(self.endpoint, self.token)
