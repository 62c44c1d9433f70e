"""The public functions: load a kernel, bind kernels to a model, restore it, tell what happened or would happen."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kernelhub.checking.when import When, checked_selection
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

    from kernelhub.checking.outcome import CheckReport
    from kernelhub.checking.tuning import Tuning
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
    resolution = chosen.resolve(parsed, backend=backend, trust=trust_remote_code, ahead=True)
    build = chosen.obtain(resolution)
    with chosen.suggesting(resolution, backend=backend):
        return load(build) if parsed.symbol is None else symbol(build, parsed.symbol)


def kernelize(
    model: nn.Module,
    config: KernelConfig | Mapping[Any, Any],
    mode: Mode | str | None = None,
    *,
    strict: bool = True,
    check: str = "off",
    select: str = "first",
    inputs: Any = None,
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
        check: ``"bind"`` compares every kernel with its layer before anything is bound, on one run of the model;
            ``"first:N"`` compares the first N calls of every bound layer and gives the layers of a kernel that fails
            their own forward back, with one warning. ``"off"`` adds nothing to a call.
        select: ``"fastest"`` measures the candidates of every entry on one run of the model and binds the fastest that
            is right and clearly faster than the layer itself, or leaves the layer alone; decisions are kept in the
            store and used again. ``"first"`` takes the first candidate.
        inputs: what to call the model with for ``check="bind"`` and ``select="fastest"``: a dict, a tuple or a tensor;
            made up for language models when None.
        offline, trust_remote_code, session: as in ``load_kernel``.

    Raises:
        UnknownLayer: an entry matches no layer of this model; the message suggests the nearest name.
        ContractMismatch: the kernel does not fit the layer; the message shows both signatures.
        NumericsMismatch: (``check="bind"`` and strict) a kernel computes other numbers than its layer.
        InputsNeeded: there have to be inputs, and none can be made up.
        KernelHubError: anything that ``load_kernel`` raises.

    Example:
        >>> model = kernelize(model, {"RMSNorm": "builtin:RMSNorm"})
        >>> print(report(model))
    """
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415  # torch, which importing the API must not need

    when, fastest = When.parse(check), checked_selection(select) == "fastest"
    chosen = _session(session, offline)
    kernels = _Kernels(chosen, trust_remote_code)
    judge = None
    if when != When() or fastest:
        from kernelhub.checking.choosing import Chooser  # noqa: PLC0415  # as above

        judge = Chooser(chosen, when, inputs, fastest=fastest, strict=strict)
    with kernels.naming_all_that_is_missing():
        binder.kernelize(
            model,
            _as_config(config),
            mode=_as_mode(mode),
            load=kernels.load,
            backend_of=chosen.backend_of,
            strict=strict,
            judge=judge,
        )
    if judge is not None:
        judge.watch()
    return model


def check(
    model: nn.Module,
    config: KernelConfig | Mapping[Any, Any],
    inputs: Any = None,
    mode: Mode | str | None = None,
    *,
    strict: bool = False,
    offline: bool | None = None,
    trust_remote_code: Trust = False,
    session: Session | None = None,
) -> CheckReport:
    """Compare every kernel of ``config`` with the layer that it would replace; binds nothing.

    The model runs once on its own forwards; each kind of call (layer, shapes, dtype) is then repeated with the plain
    layer, the kernel, and the plain layer in float64, on the inputs of the call and on variations of them. A kernel may
    be a few times as far from float64 as the plain layer itself is; ``docs/checking.md`` has the rule.

    Args:
        model: any torch module; what is bound in it stays bound.
        config: a KernelConfig, or the mapping to build one from; all candidates of an entry are checked.
        inputs: what to call the model with: a dict, a tuple or one tensor; made up for language models when None.
        mode: as in ``kernelize``.
        strict: raise at the first kernel that is wrong, or that cannot be loaded or fits no layer.
        offline, trust_remote_code, session: as in ``load_kernel``.

    Returns:
        One row for each kernel, mode and kind of call; printable, exported by ``to_dict`` and ``to_json``; ``.ok``.

    Raises:
        NumericsMismatch: (strict) a kernel is wrong.
        InputsNeeded: there have to be inputs, and none can be made up.
        KernelHubError: (strict) anything that ``kernelize`` raises.

    Example:
        >>> print(check(model, {"RMSNorm": "builtin:RMSNorm"}))
    """
    from kernelhub.checking.choosing import Examiner  # noqa: PLC0415  # as above

    examiner = Examiner(_session(session, offline), inputs, strict=strict)
    _rehearse(examiner, model, config, mode, trust_remote_code)
    return examiner.report


def tune(
    model: nn.Module,
    config: KernelConfig | Mapping[Any, Any],
    inputs: Any = None,
    mode: Mode | str | None = None,
    *,
    again: bool = False,
    offline: bool | None = None,
    trust_remote_code: Trust = False,
    session: Session | None = None,
) -> Tuning:
    """Measure every candidate of ``config`` beside the plain layer, and keep in the store which is the fastest.

    A candidate has to pass ``check`` and be clearly faster than the plain layer for the shapes of ``inputs``; else the
    plain layer wins. Binds nothing: ``kernelize(model, config, select="fastest")`` uses the decisions.

    Args:
        config: entries may have several candidates: ``{"RMSNorm": ["org/a:Norm", "org/b:Norm"]}``.
        inputs: the shapes to measure for; made up for language models when None.
        again: measure even where the store has a decision.
        model, mode, offline, trust_remote_code, session: as in ``check``.

    Returns:
        One row for each layer, mode and candidate: seconds and peak bytes beside the plain layer's, and the choice.

    Raises:
        InputsNeeded: there have to be inputs, and none can be made up.

    Example:
        >>> print(tune(model, {"RMSNorm": ["builtin:RMSNorm", "kernels-community/liger-kernels@v3:LigerRMSNorm"]}))
    """
    from kernelhub.checking.choosing import Tuner  # noqa: PLC0415  # as above

    tuner = Tuner(_session(session, offline), inputs, again=again)
    _rehearse(tuner, model, config, mode, trust_remote_code)
    return tuner.tuning


def _rehearse(
    judge: Any, model: nn.Module, config: KernelConfig | Mapping[Any, Any], mode: Mode | str | None, trust: Trust
) -> None:
    """Let a judge see what ``kernelize`` would decide."""
    from kernelhub.layers import kernelize as binder  # noqa: PLC0415  # as above

    kernels = _Kernels(judge.session, trust)
    with kernels.naming_all_that_is_missing():
        binder.rehearse(
            model,
            _as_config(config),
            mode=_as_mode(mode),
            load=kernels.load,
            backend_of=judge.session.backend_of,
            strict=judge.strict,
            judge=judge,
        )


@contextmanager
def kernelized(
    model: nn.Module,
    config: KernelConfig | Mapping[Any, Any],
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
    config: KernelConfig | Mapping[Any, Any],
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


def load_choice(
    choice: KernelChoice,
    backend: str,
    *,
    trust_remote_code: Trust = False,
    session: Session,
) -> LoadedSymbol:
    """The kernel that a choice of a config means, and where it comes from; errors as in ``load_kernel``."""
    return _Kernels(session, trust_remote_code).load(choice, backend)


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


def _as_config(config: KernelConfig | Mapping[Any, Any]) -> KernelConfig:
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
        with self._session.suggesting(resolution, backend=backend):
            return LoadedSymbol(symbol(build, name), resolution.kernel, resolution.variant, name)

    def plan(self, choice: KernelChoice, backend: str) -> PlannedSymbol:
        """What ``load`` would load."""
        resolution = self._resolution(choice, backend)
        return PlannedSymbol(resolution.kernel, resolution.variant, choice.request.symbol or "")

    @contextmanager
    def naming_all_that_is_missing(self) -> Iterator[None]:
        """What an offline store turned out to lack, of everything that was asked for, becomes one error."""
        try:
            yield
        except NotCached as error:
            failures = (future.exception() for future in self._futures.values() if future.done())
            missing = [failure for failure in failures if isinstance(failure, NotCached)]
            raise NotCached.all_of([*missing, error]) from error

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
