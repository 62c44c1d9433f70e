"""The public functions: load a kernel, bind kernels to a model, restore it, tell what happened or would happen."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernelhub.config import KernelConfig
from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol
from kernelhub.loader import load, symbol
from kernelhub.mode import Mode
from kernelhub.request import KernelRequest
from kernelhub.session import Session
from kernelhub.trust import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Mapping

    from torch import nn

    from kernelhub.config import KernelChoice
    from kernelhub.layers.report import Report
    from kernelhub.resolution import Resolution
    from kernelhub.session import Trust


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
    chosen = _session(session, offline)
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

    chosen = _session(session, offline)
    binder.kernelize(
        model,
        _as_config(config),
        mode=_as_mode(mode),
        load=_Kernels(chosen, trust_remote_code).load,
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

    chosen = _session(session, offline)
    return binder.plan(
        model,
        _as_config(config),
        mode=_as_mode(mode),
        resolve=_Kernels(chosen, trust_remote_code).plan,
        backend_of=chosen.backend_of,
    )


def _session(session: Session | None, offline: bool | None) -> Session:
    """The session to use; ``offline`` given beside one has the last word."""
    if session is None:
        return Session(offline=offline)
    return session if offline is None else replace(session, offline=offline)


def _as_config(config: KernelConfig | Mapping[str, Any]) -> KernelConfig:
    return config if isinstance(config, KernelConfig) else KernelConfig(config)


def _as_mode(mode: Mode | str | None) -> Mode | None:
    return Mode(mode) if isinstance(mode, str) else mode


class _Kernels:
    """The kernels of one ``kernelize`` or ``plan``: each build is resolved and obtained once, whoever asks first."""

    def __init__(self, session: Session, trust: Trust) -> None:
        self._session = session
        self._trust = TrustPolicy.of(trust)
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[Any]] = {}

    def load(self, choice: KernelChoice, backend: str) -> LoadedSymbol:
        """The symbol of a choice, loaded."""
        resolution = self._resolution(choice, backend)
        build = self._once(("build", resolution.build), lambda: self._session.obtain(resolution))
        name = choice.request.symbol or ""
        return LoadedSymbol(symbol(build, name), resolution.kernel, resolution.variant, name)

    def plan(self, choice: KernelChoice, backend: str) -> PlannedSymbol:
        """What ``load`` would load."""
        resolution = self._resolution(choice, backend)
        return PlannedSymbol(resolution.kernel, resolution.variant, choice.request.symbol or "")

    def _resolution(self, choice: KernelChoice, backend: str) -> Resolution:
        request = replace(choice.request, symbol=None)
        policy = self._trust.union(TrustPolicy.of(choice.trust_remote_code))
        resolution: Resolution = self._once(
            (request, backend, policy), lambda: self._session.resolve(request, backend=backend, trust=policy)
        )
        return resolution

    def _once(self, key: Hashable, work: Callable[[], Any]) -> Any:
        """The result of ``work``, which the first thread to ask does and the others wait for."""
        with self._lock:
            first = key not in self._futures
            future = self._futures.setdefault(key, Future())
        if first:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
        return future.result()
