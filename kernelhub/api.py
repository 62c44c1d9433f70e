"""The steps wired once: parse, resolve, fetch, verify, load, bind. Everything public starts here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from kernelhub import setting
from kernelhub.backend import device_backend
from kernelhub.compatibility import select
from kernelhub.config import KernelConfig
from kernelhub.environment import Environment
from kernelhub.errors import DigestMismatch, InvalidRequest
from kernelhub.fetch import fetch
from kernelhub.loader import load, symbol
from kernelhub.locked import LockedIndex, make_lock
from kernelhub.lockfile import Lock
from kernelhub.mode import Mode
from kernelhub.recorded import RecordedIndex, RememberingIndex, fresh_seconds
from kernelhub.reporter import Reporter
from kernelhub.request import KernelRequest
from kernelhub.resolution import Resolution, resolve
from kernelhub.revision import RevisionKind
from kernelhub.store import Store
from kernelhub.trust import TrustPolicy
from kernelhub.verify import VerificationState, VerifiedBuild, verify_folder, verify_stored

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import nn

    from kernelhub.config import KernelChoice
    from kernelhub.index import Index
    from kernelhub.layers.kernelize import LoadedSymbol, PlannedSymbol
    from kernelhub.layers.report import Report

Trust = bool | Iterable[str]


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
        lockfile: a lock that every load has to follow; None uses ``KERNELHUB_LOCK``, else ``kernelhub.lock`` in the
            current folder if there is one; False loads without a lock.
    """

    cache_dir: Path | None = None
    endpoint: str | None = None
    offline: bool | None = None
    token: str | bool | None = None
    environment: Environment | None = None
    lockfile: Path | Literal[False] | None = None
    reporter: Reporter = field(default_factory=Reporter)

    @cached_property
    def store(self) -> Store:
        return Store(self.cache_dir, self.endpoint)

    @cached_property
    def detected(self) -> Environment:
        return self.environment or _this_machine()

    def resolve(
        self, request: KernelRequest, *, backend: str | None = None, trust: Trust | TrustPolicy = False
    ) -> Resolution:
        """The build that serves ``request``; downloads nothing but its metadata."""
        policy = trust if isinstance(trust, TrustPolicy) else TrustPolicy.of(trust)
        return resolve(request, self.detected.with_backend(backend), self._index(request), policy)

    def trust_of(self, repo_id: str, policy: TrustPolicy) -> str:
        """Why a repository's code may run; raises UntrustedPublisher when it may not."""
        return policy.check(repo_id, self._index(KernelRequest(repo_id)), requested=True)

    def backend_of(self, device: torch.device) -> str:
        """The backend that serves a torch device: torch calls ROCm's devices ``cuda`` too."""
        return device_backend(device.type, rocm=self.detected.backend.name == "rocm")

    def versions(self, request: KernelRequest, *, backend: str | None = None) -> list[VersionRow]:
        """The API versions of a repository in numeric order, each with the build that fits best."""
        if request.repo_id is None:
            raise InvalidRequest(str(request), "has no versions on the Hub", "org/name")
        index, environment = self._index(request), self.detected.with_backend(backend)
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
            return self._checked_state(verify_folder(resolution, dependencies))
        index = self._index(resolution.request)
        stored = fetch(resolution, index, self.store, self.reporter)
        try:
            return self._checked_state(verify_stored(stored, resolution, dependencies))
        except DigestMismatch as damage:
            self.store.discard(stored)
            self.reporter.warn(f"{damage} The stored copy was removed; fetching it again.")
            stored = fetch(resolution, index, self.store, self.reporter)
            return self._checked_state(verify_stored(stored, resolution, dependencies))

    def _checked_state(self, build: VerifiedBuild) -> VerifiedBuild:
        if build.state is VerificationState.UNVERIFIED:
            self.reporter.warn(f"kernel build {build.build} lists no digests: its files are loaded unverified")
        return build

    @cached_property
    def lock(self) -> Lock | None:
        """The lock in force, or None."""
        if self.lockfile is False:
            return None
        path = self.lockfile or setting.lock_path()
        return None if path is None else Lock.read(path)

    def make_lock(self, requests: Iterable[KernelRequest], *, trust: Trust = False) -> Lock:
        """Lock requests at what they mean now, for every variant; answers are asked for anew."""
        fresh = RememberingIndex(self.store, self._connect, self.reporter, max_age=0.0)
        return make_lock(requests, fresh, TrustPolicy.of(trust))

    def _index(self, request: KernelRequest) -> Index:
        if self.lock is not None:
            return LockedIndex(self.lock, self._source(pinned=True))
        return self._source(pinned=request.revision is not None and request.revision.kind is RevisionKind.COMMIT)

    def _source(self, *, pinned: bool) -> Index:
        """The store alone when offline, else the store in front of the Hub; what is pinned never grows stale."""
        if setting.offline() if self.offline is None else self.offline:
            return RecordedIndex(self.store)
        max_age = math.inf if pinned else fresh_seconds()
        return RememberingIndex(self.store, self._connect, self.reporter, max_age)

    def _connect(self) -> Index:
        return self._hub

    @cached_property
    def _hub(self) -> Index:
        # Imported when a request is about to be made: a warm or offline load does not pay for the HTTP stack.
        from kernelhub.hub import HubIndex  # noqa: PLC0415

        return HubIndex(self.endpoint, self.token)


_this_machine = cache(Environment.detect)


def load_kernel(
    request: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    offline: bool | None = None,
    trust_remote_code: Trust = False,
    session: Session | None = None,
) -> Any:
    """Load a kernel and return its module, or the symbol that the request names.

    Args:
        request: a mapping string: ``"org/repo"``, ``"org/repo@v2:Symbol"``, ``"builtin:RMSNorm"``, ``"/path:Symbol"``.
            Without a version, version 1 of a Hub repository.
        version: API version, instead of ``@v2`` in the string.
        revision: branch, tag or commit, instead of ``@...`` in the string.
        backend: ``"cpu"`` asks for CPU builds on a machine with an accelerator.
        offline: True opens no socket; None follows ``HF_HUB_OFFLINE``.
        trust_remote_code: True allows this repository's code to run although its publisher is not a trusted one;
            a list names the repositories that may, dependencies included.
        session: store, endpoint and reporter to use; the default follows the environment variables.

    Returns:
        The module, or the layer class or function for a request with a symbol.

    Raises:
        InvalidRequest: the string, version or revision cannot be read.
        UntrustedPublisher: asked before anything is downloaded.
        ResolutionError: no such repository or revision, or no build that fits (one reason per build).
        FetchError: the Hub or the store cannot be used.
        VerificationError: the files are not what they should be; nothing was imported.
        LoadError: the import failed, or the kernel does not define the symbol.

    Example:
        >>> import torch, kernelhub
        >>> norm = kernelhub.load_kernel("builtin:RMSNorm")
        >>> norm.__name__
        'RMSNorm'
    """
    parsed = KernelRequest.parse(request).at(version=version, revision=revision)
    chosen = session or Session(offline=offline)
    build = chosen.obtain(chosen.resolve(parsed, backend=backend, trust=trust_remote_code))
    return load(build) if parsed.symbol is None else symbol(build, parsed.symbol)


def kernelize(
    model: nn.Module,
    config: KernelConfig | Mapping[str, Any],
    mode: Mode | str | None = None,
    *,
    strict: bool = True,
    offline: bool | None = None,
    trust_remote_code: Trust = False,
    session: Session | None = None,
) -> nn.Module:
    """Bind the kernels of ``config`` to the layers of ``model``, in place, and return the model.

    Only ``forward`` is replaced, on each instance: parameters stay the same objects, ``state_dict`` keys and hooks
    stay as they are, and ``unkernelize`` restores everything. Either all that was decided is bound, or, on an
    error, nothing. A model that is bound already is restored first.

    Args:
        model: any torch module.
        config: a KernelConfig, or the mapping to build one from.
        mode: ``Mode.INFERENCE``, ``Mode.TRAINING`` (or their names); None follows each module's ``training`` flag.
        strict: True raises when an entry of the config matches no layer, or none of its layers can be served;
            False reports it instead. Integrity and trust failures raise in either case.
        offline, trust_remote_code, session: as in ``load_kernel``.

    Raises:
        UnknownLayer: an entry matches no layer of this model; the message suggests the nearest name.
        ContractMismatch: the kernel does not fit the layer; the message shows both signatures.
        KernelHubError: anything that ``load_kernel`` raises.

    Example:
        >>> model = kernelize(model, {"RMSNorm": "builtin:RMSNorm"})
        >>> print(report(model))
    """
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415  # torch, which importing the API must not need

    chosen = session or Session(offline=offline)
    binder.kernelize(
        model,
        _as_config(config),
        mode=_as_mode(mode),
        load=lambda choice, backend: _load_choice(chosen, choice, backend, trust_remote_code),
        backend_of=chosen.backend_of,
        strict=strict,
    )
    return model


def unkernelize(model: nn.Module) -> nn.Module:
    """Restore every forward that ``kernelize`` replaced, exactly as it was, and return the model."""
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415  # as above

    return binder.unkernelize(model)


def report(model: nn.Module) -> Report:
    """What is bound where, and what was left alone and why; printable, and exported by ``to_dict`` and ``to_json``."""
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415  # as above

    return binder.report(model)


def plan(
    model: nn.Module,
    config: KernelConfig | Mapping[str, Any],
    mode: Mode | str | None = None,
    *,
    offline: bool | None = None,
    trust_remote_code: Trust = False,
    session: Session | None = None,
) -> Report:
    """What ``kernelize`` would do, without downloading or importing a kernel; arguments as in ``kernelize``."""
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415  # as above

    chosen = session or Session(offline=offline)
    return binder.plan(
        model,
        _as_config(config),
        mode=_as_mode(mode),
        resolve=lambda choice, backend: _plan_choice(chosen, choice, backend, trust_remote_code),
        backend_of=chosen.backend_of,
    )


def _as_config(config: KernelConfig | Mapping[str, Any]) -> KernelConfig:
    return config if isinstance(config, KernelConfig) else KernelConfig(config)


def _as_mode(mode: Mode | str | None) -> Mode | None:
    return Mode(mode) if isinstance(mode, str) else mode


def _resolve_choice(session: Session, choice: KernelChoice, backend: str, trust: Trust) -> Resolution:
    allowed = TrustPolicy.of(trust).union(TrustPolicy.of(choice.trust_remote_code))
    return session.resolve(choice.request, backend=backend, trust=allowed)


def _load_choice(session: Session, choice: KernelChoice, backend: str, trust: Trust) -> LoadedSymbol:
    from kernelhub.layers.kernelize import LoadedSymbol  # noqa: PLC0415  # as above

    resolution = _resolve_choice(session, choice, backend, trust)
    name = choice.request.symbol or ""
    value = symbol(session.obtain(resolution), name)
    return LoadedSymbol(value, resolution.kernel, resolution.variant, name)


def _plan_choice(session: Session, choice: KernelChoice, backend: str, trust: Trust) -> PlannedSymbol:
    from kernelhub.layers.kernelize import PlannedSymbol  # noqa: PLC0415  # as above

    resolution = _resolve_choice(session, choice, backend, trust)
    return PlannedSymbol(resolution.kernel, resolution.variant, choice.request.symbol or "")
