"""Distributed: every rank of a job runs the same code, found once (S-03).

Rank 0 resolves and broadcasts the result, a pin of commit, build and file hashes, through the process group that runs
already; every machine downloads what it lacks once, whoever of its processes comes first; before anything is imported
all ranks compare what they hold. What fails on one rank fails on all of them, so that none waits for the others for
ever. Without a process group, or with one process, the same functions do the same for this process alone.

Call each function on all ranks of the group, with the same arguments and in the same order. With NCCL, set the current
CUDA device first, as always before collectives.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch.distributed as dist

from kernelhub import api
from kernelhub.compatibility import select
from kernelhub.errors import KernelHubError, NoCompatibleVariant, PinMismatch, RankFailed, RanksDiffer
from kernelhub.layers.kernelize import reverting
from kernelhub.loader import load, symbol
from kernelhub.request import KernelRequest
from kernelhub.session import Session
from kernelhub.trust import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from torch import nn

    from kernelhub.config import KernelConfig
    from kernelhub.environment import Environment
    from kernelhub.mode import Mode
    from kernelhub.resolution import Resolution
    from kernelhub.session import Trust
    from kernelhub.verify import VerifiedBuild

_Value = TypeVar("_Value")


def resolve_together(
    requests: Iterable[KernelRequest | str],
    session: Session | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    backend: str | None = None,
    trust_remote_code: Trust = False,
) -> list[Resolution]:
    """The builds that serve ``requests`` on all ranks, as rank 0 finds them at this moment.

    Args:
        requests: mapping strings or parsed requests.
        session: this rank's store and settings; rank 0's decides what is found.
        group: the process group; None is the default group if there is one.
        backend, trust_remote_code: as in ``load_kernel``.

    Raises:
        KernelHubError: the error of rank 0, on all ranks.
        RankFailed: a rank cannot use what rank 0 found; names these ranks.
    """
    chosen = session or Session()
    parsed = [KernelRequest.parse(request) if isinstance(request, str) else request for request in requests]
    together = _Ranks(group)
    pins = together.from_first(
        "resolving kernels",
        lambda: [chosen.resolve(request, backend=backend, trust=trust_remote_code) for request in parsed],
    )
    with_trust = TrustPolicy.of(trust_remote_code)
    return together.attempt(
        "using the kernels that rank 0 found", lambda: [_here(pin, chosen, backend, with_trust) for pin in pins]
    )


def load_together(
    request: str,
    *,
    version: int | None = None,
    revision: str | None = None,
    backend: str | None = None,
    trust_remote_code: Trust = False,
    session: Session | None = None,
    group: dist.ProcessGroup | None = None,
) -> Any:
    """``load_kernel`` on all ranks of a group: the same build everywhere, compared before it is imported.

    Raises:
        RanksDiffer: ranks hold different files for the build; nothing was imported.
        RankFailed: it could not be obtained or imported on some ranks; a rank that failed raises its own error.
        KernelHubError: what ``load_kernel`` raises, on all ranks.
    """
    chosen, together = session or Session(), _Ranks(group)
    parsed = KernelRequest.parse(request).at(version=version, revision=revision)
    [pin] = resolve_together([parsed], chosen, group, backend=backend, trust_remote_code=trust_remote_code)
    build = together.attempt("obtaining kernels", lambda: chosen.obtain(pin))
    _compare(together, {build.build: _digest(build)})
    name = parsed.symbol
    return together.attempt("importing kernels", lambda: load(build) if name is None else symbol(build, name))


def kernelize_together(
    model: nn.Module,
    config: KernelConfig | Mapping[str, Any],
    mode: Mode | str | None = None,
    *,
    strict: bool = True,
    trust_remote_code: Trust = False,
    session: Session | None = None,
    group: dist.ProcessGroup | None = None,
) -> nn.Module:
    """``kernelize`` on all ranks of a group; the ranks may hold different layers of the model.

    Each kernel that any rank needs is resolved once, by rank 0. Either all ranks bind, or none does; then every model
    keeps the kernels that it had before.

    Raises:
        RanksDiffer, RankFailed, KernelHubError: as in ``load_together``.
    """
    chosen, together = session or Session(), _Ranks(group)
    needed = together.attempt("planning kernels", lambda: _needed(model, config, mode, trust_remote_code, chosen))
    wanted = list(dict.fromkeys(need for rank in together.gather(needed) for need in rank))
    found = together.from_first("resolving kernels", lambda: [_outcome(need, chosen) for need in wanted])
    pinned = _pinned(chosen, dict(zip(wanted, found, strict=True)))
    digests = together.attempt("obtaining kernels", lambda: pinned.obtain_all(needed))
    _compare(together, digests)
    with reverting(model):
        return together.attempt(
            "binding kernels",
            lambda: api.kernelize(
                model, config, mode, strict=strict, trust_remote_code=trust_remote_code, session=pinned
            ),
        )


class _Need(NamedTuple):
    """One kernel that a rank's layers ask for; hashable and the same on every rank that asks."""

    request: KernelRequest
    backend: str | None
    requested: bool
    repositories: frozenset[str]

    @property
    def trust(self) -> TrustPolicy:
        return TrustPolicy(self.requested, self.repositories)


class _Noted(KernelHubError):
    """Tells a plan that nothing is resolved yet."""


@dataclass
class _NotingSession(Session):
    """Notes what it is asked for, and answers nothing."""

    needs: dict[_Need, None] = field(default_factory=dict)

    def resolve(self, request: KernelRequest, **options: Any) -> Resolution:
        self.needs[_need(request, options)] = None
        raise _Noted


@dataclass
class _PinnedSession(Session):
    """Answers with what rank 0 found."""

    pins: Mapping[_Need, Resolution | KernelHubError] = field(default_factory=dict)
    builds: dict[str, VerifiedBuild] = field(default_factory=dict)

    def resolve(self, request: KernelRequest, **options: Any) -> Resolution:
        need = _need(request, options)
        pin = self.pins[need]
        if isinstance(pin, KernelHubError):
            raise pin
        return _here(pin, self, need.backend, need.trust)

    def obtain(self, resolution: Resolution) -> VerifiedBuild:
        if resolution.build not in self.builds:
            self.builds[resolution.build] = super().obtain(resolution)
        return self.builds[resolution.build]

    def obtain_all(self, needed: Sequence[_Need]) -> dict[str, str]:
        """Obtain what this rank needs of what was found; the digest of each build."""
        for need in needed:
            if not isinstance(self.pins[need], KernelHubError):
                self.obtain(self.resolve(need.request, backend=need.backend, trust=need.trust))
        return {name: _digest(build) for name, build in self.builds.items()}


def _needed(
    model: nn.Module,
    config: KernelConfig | Mapping[str, Any],
    mode: Mode | str | None,
    trust: Trust,
    session: Session,
) -> list[_Need]:
    noting = _NotingSession(**_settings(session))
    api.plan(model, config, mode, trust_remote_code=trust, session=noting)
    return list(noting.needs)


def _pinned(session: Session, pins: Mapping[_Need, Resolution | KernelHubError]) -> _PinnedSession:
    return _PinnedSession(**_settings(session), pins=pins)


def _settings(session: Session) -> dict[str, Any]:
    """The fields of a session, for another one that works in the same place."""
    return {name: getattr(session, name) for name in Session.__dataclass_fields__}


def _need(request: KernelRequest, options: Mapping[str, Any]) -> _Need:
    given = options.get("trust", False)
    trust = given if isinstance(given, TrustPolicy) else TrustPolicy.of(given)
    return _Need(request, options.get("backend"), trust.requested, trust.repositories)


def _outcome(need: _Need, session: Session) -> Resolution | KernelHubError:
    """What rank 0 finds, or why it finds nothing: that is for ``kernelize`` to judge, alike on all ranks."""
    try:
        return session.resolve(need.request, backend=need.backend, trust=need.trust)
    except KernelHubError as error:
        return error


def _here(pin: Resolution, session: Session, backend: str | None, trust: TrustPolicy) -> Resolution:
    """The pin as this rank uses it: it has to fit this machine and this user's policy; folders are where they are here.

    Raises:
        NoCompatibleVariant, PinMismatch: it does not.
    """
    if pin.folder is not None:
        local = session.resolve(pin.request, backend=backend, trust=trust)
        return replace(local, dependencies=pin.dependencies)
    environment = session.environment_for(backend)
    for found in pin.tree():
        if found.folder is None:
            _check_fit(found, environment)
            _check_policy(found, session)
    return pin


def _check_fit(pin: Resolution, environment: Environment) -> None:
    selection = select([pin.variant], environment)
    if selection.best is None:
        raise NoCompatibleVariant(pin.name, pin.commit[:12], environment, selection.rejected)


def _check_policy(pin: Resolution, session: Session) -> None:
    expected = session.policy.pins.get(pin.name, pin.commit)
    if expected != pin.commit:
        raise PinMismatch(pin.name, pin.commit, expected, session.policy.origin)


def _digest(build: VerifiedBuild) -> str:
    """One digest for a build and all that it depends on."""
    parts = [build.digest, *(_digest(dependency) for dependency in build.dependencies)]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _compare(together: _Ranks, digests: Mapping[str, str]) -> None:
    """Every build has to be the same on all ranks that hold it.

    Raises:
        RanksDiffer: with the digest of each rank; on all ranks.
    """
    held = together.gather(dict(digests))
    for build in dict.fromkeys(name for rank in held for name in rank):
        found = {rank: digests[build] for rank, digests in enumerate(held) if build in digests}
        if len(set(found.values())) > 1:
            raise RanksDiffer(build, found)


class _Outcome(NamedTuple):
    """What a step gave on one rank, or its error."""

    value: Any = None
    error: Exception | None = None


class _Ranks:
    """The ranks of a process group, or this process alone."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        running = dist.is_available() and dist.is_initialized()
        self._group = group
        self.size = dist.get_world_size(group) if running else 1
        self.rank = dist.get_rank(group) if running else 0

    def from_first(self, step: str, work: Callable[[], _Value]) -> _Value:
        """The result, or the error, of ``work`` on rank 0."""
        outcome = _attempt(work) if self.rank == 0 else _Outcome()
        if self.size > 1:
            error = outcome.error
            if error is not None and not isinstance(error, KernelHubError):  # need not survive the way
                outcome = _Outcome(error=RankFailed(step, {0: f"{type(error).__name__}: {error}"}))
            box = [outcome]
            source = 0 if self._group is None else dist.get_global_rank(self._group, 0)
            dist.broadcast_object_list(box, src=source, group=self._group)
            outcome = _Outcome(error=error) if error is not None else box[0]
        if outcome.error is not None:
            raise outcome.error
        return cast("_Value", outcome.value)

    def attempt(self, step: str, work: Callable[[], _Value]) -> _Value:
        """The result of ``work`` on this rank, if it succeeds on all of them.

        Raises:
            RankFailed: on ranks where it succeeded, naming those where it did not; these raise their own error.
        """
        outcome = _attempt(work)
        error = outcome.error
        problems = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        failures = {rank: problem for rank, problem in enumerate(problems) if problem is not None}
        if failures:
            raise RankFailed(step, failures)
        return cast("_Value", outcome.value)

    def gather(self, value: _Value) -> list[_Value]:
        """The values of all ranks, in the order of the ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values


def _attempt(work: Callable[[], Any]) -> _Outcome:
    try:
        return _Outcome(work())
    except Exception as error:  # any failure has to reach the other ranks, which wait
        return _Outcome(error=error)
