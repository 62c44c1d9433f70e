"""The steps wired once: parse, resolve, fetch, verify, load, bind. Everything public starts here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

from kernelhub import setting
from kernelhub.environment import Environment
from kernelhub.errors import DigestMismatch
from kernelhub.fetch import fetch
from kernelhub.loader import load, symbol
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

    from kernelhub.index import Index

Trust = bool | Iterable[str]


@dataclass
class Session:
    """What the steps share: store, endpoint, environment, offline switch, reporter.

    Args:
        cache_dir: the store's folder; default ``KERNELHUB_CACHE``, ``KERNELS_CACHE`` or ``kernelhub`` under HF_HOME.
        endpoint: the Hub's address; default ``HF_ENDPOINT`` or the public Hub.
        offline: True opens no socket; None follows ``HF_HUB_OFFLINE``.
        token: an access token, None for the one that is logged in, False for none.
        environment: the machine to choose builds for; None detects this one.
    """

    cache_dir: Path | None = None
    endpoint: str | None = None
    offline: bool | None = None
    token: str | bool | None = None
    environment: Environment | None = None
    reporter: Reporter = field(default_factory=Reporter)

    @cached_property
    def store(self) -> Store:
        return Store(self.cache_dir, self.endpoint)

    @cached_property
    def detected(self) -> Environment:
        return self.environment or _this_machine()

    def resolve(self, request: KernelRequest, *, backend: str | None = None, trust: Trust = False) -> Resolution:
        """The build that serves ``request``; downloads nothing but its metadata."""
        environment = self.detected.with_backend(backend)
        return resolve(request, environment, self._index(request), TrustPolicy.of(trust))

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

    def _index(self, request: KernelRequest) -> Index:
        if setting.offline() if self.offline is None else self.offline:
            return RecordedIndex(self.store)
        pinned = request.revision is not None and request.revision.kind is RevisionKind.COMMIT
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
