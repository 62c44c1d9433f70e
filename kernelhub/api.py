"""The public functions: load a kernel, bind kernels to a model, restore it, tell what happened or would happen."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernelhub.config import KernelConfig
from kernelhub.environment import Environment
from kernelhub.errors import NotCached
from kernelhub.explanation import Explanation
from kernelhub.explanation import explain as explain_request
from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol
from kernelhub.loader import load, symbol
from kernelhub.mode import Mode
from kernelhub.request import KernelRequest
from kernelhub.session import Session
from kernelhub.trust import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Mapping

    from torch import nn

    from kernelhub.config import KernelChoice
    from kernelhub.layers.report import Report
    from kernelhub.resolution import Resolution
    from kernelhub.session import Trust, VersionRow


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
    build = chosen.obtain(chosen.resolve(parsed, backend=backend, trust=trust_remote_code, ahead=True))
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
        mode: a ``Mode`` or its name pins the kernels of that mode. None lets each call of a layer take the kernel for
            the ``training`` flag that the layer has then, and for torch.compile where that traces it.
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
    kernels = _Kernels(chosen, trust_remote_code)
    try:
        binder.kernelize(
            model,
            _as_config(config),
            mode=_as_mode(mode),
            load=kernels.load,
            backend_of=chosen.backend_of,
            strict=strict,
        )
    except NotCached as error:
        raise NotCached.all_of([*kernels.missing(), error]) from error
    return model


@contextmanager
def kernelized(
    model: nn.Module,
    config: KernelConfig | Mapping[str, Any],
    mode: Mode | str | None = None,
    **options: Any,
) -> Iterator[nn.Module]:
    """``kernelize`` for the time of a ``with`` block; arguments as there.

    Afterwards the model has the kernels that it had before, if any.

    Example:
        >>> with kernelized(model, {"RMSNorm": "builtin:RMSNorm"}):
        ...     model(input_ids)
    """
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415  # as above

    with binder.kernelized(model, lambda each: kernelize(each, config, mode, **options)):
        yield model


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


def explain(
    request: str,
    *,
    target: str | None = None,
    backend: str | None = None,
    offline: bool | None = None,
    trust_remote_code: Trust = False,
    session: Session | None = None,
) -> Explanation:
    """What would be loaded for ``request`` and why, without downloading or importing it.

    Args:
        request: a mapping string.
        target: another machine, e.g. ``"h100,torch=2.12"`` (see ``Environment.parse``); None is this one.
        backend, offline, trust_remote_code, session: as in ``load_kernel``.

    Returns:
        The choice with every build that was considered (``.reasons``), what the build says about itself (``.info``),
        trust, dependencies, size and advice; printable, and exported by ``to_dict``.

    Raises:
        InvalidRequest, RepositoryNotFound, RevisionNotFound, FetchError: there is nothing to explain.
    """
    chosen = _for_target(_session(session, offline), target)
    return explain_request(KernelRequest.parse(request), chosen, backend=backend, trust=trust_remote_code)


def versions(
    request: str,
    *,
    target: str | None = None,
    backend: str | None = None,
    offline: bool | None = None,
    session: Session | None = None,
) -> list[VersionRow]:
    """The API versions of a repository in numeric order, each with the build that fits best; arguments as above."""
    chosen = _for_target(_session(session, offline), target)
    return chosen.versions(KernelRequest.parse(request), backend=backend)


def _for_target(session: Session, target: str | None) -> Session:
    return session if target is None else replace(session, environment=Environment.parse(target))


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
        resolution = self._resolution(choice, backend, ahead=True)
        build = self._once(("build", resolution.build), lambda: self._session.obtain(resolution))
        name = choice.request.symbol or ""
        return LoadedSymbol(symbol(build, name), resolution.kernel, resolution.variant, name)

    def plan(self, choice: KernelChoice, backend: str) -> PlannedSymbol:
        """What ``load`` would load."""
        resolution = self._resolution(choice, backend)
        return PlannedSymbol(resolution.kernel, resolution.variant, choice.request.symbol or "")

    def missing(self) -> list[NotCached]:
        """What an offline store turned out to lack, of everything that was asked for."""
        failures = (future.exception() for future in self._futures.values() if future.done())
        return [failure for failure in failures if isinstance(failure, NotCached)]

    def _resolution(self, choice: KernelChoice, backend: str, *, ahead: bool = False) -> Resolution:
        request = replace(choice.request, symbol=None)
        policy = self._trust.union(TrustPolicy.of(choice.trust_remote_code))
        resolution: Resolution = self._once(
            (request, backend, policy),
            lambda: self._session.resolve(request, backend=backend, trust=policy, ahead=ahead),
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
