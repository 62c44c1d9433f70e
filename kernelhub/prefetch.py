"""Prefetch: bring builds into the store for this machine, for others, or for all; nothing is imported.

Everything is resolved first, so that sizes are known before the first body is asked for; then each build is fetched,
verified and stored on its own: what fails does not stop the rest, and what is stored already is not fetched again.
The answers that led to a build are recorded beside it, so that it loads offline by version, revision, commit, lock
and mapping. Needs neither Torch nor a GPU when the target is given.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from kernelhub.capability import device_range
from kernelhub.errors import InvalidEnvironment, InvalidRequest, KernelHubError
from kernelhub.machine import parse_release
from kernelhub.mode import Mode
from kernelhub.trust import TrustPolicy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from kernelhub.backend import Release
    from kernelhub.config import KernelChoice, KernelConfig, LayerEntry
    from kernelhub.environment import Environment
    from kernelhub.request import KernelRequest
    from kernelhub.resolution import Resolution
    from kernelhub.session import Session, Trust

FETCHED = "fetched"
STORED = "stored"
PLANNED = "would fetch"
LOCAL = "local"
FAILED = "failed"

THIS_MACHINE = "this machine"
ALL_VARIANTS = "all variants"


@dataclass(frozen=True)
class PrefetchRow:
    """What became of one build (or of a request that has none); ``bytes`` is the size of its files.

    ``state`` is ``fetched``, ``stored`` (it was there already), ``would fetch`` (dry run), ``local`` (on this machine,
    nothing to do) or ``failed`` with the ``error``.
    """

    request: str
    target: str
    state: str
    kernel: str = ""
    commit: str = ""
    variant: str = ""
    bytes: int = 0
    error: str = ""
    verification: str = ""
    folder: str = ""

    def __str__(self) -> str:
        target = "" if self.target == THIS_MACHINE else f" [{self.target}]"
        if not self.variant:
            return f"{self.request}{target}: {self.state}{f': {self.error}' if self.error else ''}"
        what = f"{self.request}{target}: {self.kernel}@{self.commit[:12]} {self.variant}"
        if self.state == FAILED:
            return f"{what}: failed: {self.error}"
        proof = f" ({self.verification}) in {self.folder}" if self.folder else ""
        return f"{what}: {self.state}, {self.bytes} bytes{proof}"


@dataclass(frozen=True)
class PrefetchReport:
    """All rows, in the order they were asked for."""

    rows: tuple[PrefetchRow, ...]

    @property
    def failures(self) -> tuple[PrefetchRow, ...]:
        return tuple(row for row in self.rows if row.state == FAILED)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"ok": not self.failures, "rows": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.rows), self.summary])

    @property
    def summary(self) -> str:
        """One line: how many builds and bytes in each state, each build counted once."""
        sizes: dict[str, dict[tuple[str, str, str], int]] = {}
        counted: set[tuple[str, str, str]] = set()
        for row in self.rows:
            build = (row.kernel, row.commit, row.variant)
            if row.variant and build not in counted:
                counted.add(build)
                sizes.setdefault(row.state, {})[build] = row.bytes
        parts = [f"{len(of)} {state} ({sum(of.values())} bytes)" for state, of in sizes.items() if state != FAILED]
        failed = [f"{len(self.failures)} failed"] if self.failures else []
        return f"total: {', '.join([*parts, *failed]) or 'nothing to fetch'}"


@dataclass(frozen=True)
class Wanted:
    """A request without its symbol, for a backend (None: that of the target), and the trust that comes with it."""

    request: KernelRequest
    backend: str | None = None
    trust: TrustPolicy = field(default_factory=TrustPolicy)


@dataclass(frozen=True)
class Job:
    """One build to bring into the store, or the error that came before."""

    wanted: Wanted
    target: str
    session: Session
    resolution: Resolution | None = None
    error: KernelHubError | None = None
    name: str = ""

    @property
    def is_stored(self) -> bool:
        found = self.resolution
        return found is not None and self.session.store.find(found.name, found.commit, found.variant) is not None

    def row(self, state: str, error: str = "") -> PrefetchRow:
        found, request = self.resolution, str(self.wanted.request)
        if found is None:
            return PrefetchRow(self.name or request, self.target, state, error=error)
        return PrefetchRow(
            request, self.target, state, found.name, found.commit, found.variant, found.size, error=error
        )


@dataclass(frozen=True)
class PrefetchPlan:
    """What a prefetch will do, build by build; ``run`` does it."""

    jobs: tuple[Job, ...]

    @property
    def missing(self) -> dict[str, int]:
        """The builds that have to be fetched, with their sizes in bytes."""
        jobs = [job for job in self.jobs if job.resolution is not None and not job.is_stored]
        return {job.resolution.build: job.resolution.size for job in jobs if job.resolution is not None}

    @property
    def resolutions(self) -> tuple[Resolution, ...]:
        return tuple(job.resolution for job in self.jobs if job.resolution is not None)

    def report(self) -> PrefetchReport:
        """What would be done (a dry run)."""
        return PrefetchReport(tuple(map(_planned, self.jobs)))

    def run(self) -> PrefetchReport:
        """Fetch, verify and store; a failed build is a row of the report, not an exception."""
        return PrefetchReport(tuple(map(_done, self.jobs)))


def prefetch(
    requests: Iterable[KernelRequest],
    session: Session,
    *,
    config: KernelConfig | None = None,
    targets: Sequence[Environment] = (),
    all_variants: bool = False,
    backend: str | None = None,
    trust: Trust = False,
) -> PrefetchReport:
    """Plan and run in one step; arguments as in ``plan_prefetch``."""
    return plan_prefetch(
        requests, session, config=config, targets=targets, all_variants=all_variants, backend=backend, trust=trust
    ).run()


def plan_prefetch(
    requests: Iterable[KernelRequest],
    session: Session,
    *,
    config: KernelConfig | None = None,
    targets: Sequence[Environment] = (),
    all_variants: bool = False,
    backend: str | None = None,
    trust: Trust = False,
) -> PrefetchPlan:
    """Find the builds that serve requests and a config, and those that they depend on.

    Args:
        requests: of repositories on the Hub; a symbol is ignored.
        config: every kernel that it may ask for on a target, in any mode; what is on this machine already is skipped.
        targets: machines to choose builds for; none given: this one.
        all_variants: every build of every kernel instead of the best ones for targets.
        backend: builds of another backend that the target can use (``cpu``).
        trust: as ``trust_remote_code`` in ``load_kernel``; what the config says beside a kernel is added.

    Raises:
        InvalidRequest: a request that is not of the Hub.
        InvalidEnvironment: this machine has no Torch, so the target has to be given.
    """
    given = TrustPolicy.of(trust)
    asked = [Wanted(_plain(request), backend, given) for request in requests]
    if all_variants:
        mapped = [_of_choice(choice, None, given) for choice in (config.choices() if config else ())]
        return PrefetchPlan(tuple(job for wanted in _distinct([*asked, *mapped]) for job in _all_jobs(wanted, session)))
    jobs: list[Job] = []
    for place in _sessions(session, targets):
        environment = place.environment_for(backend)
        mapped = [_of_choice(choice, environment.backend.name, given) for choice in choices_for(config, environment)]
        target = str(place.environment) if place.environment else THIS_MACHINE
        jobs += [job for wanted in _distinct([*asked, *mapped]) for job in _jobs(wanted, target, place)]
    return PrefetchPlan(tuple(jobs))


def choices_for(config: KernelConfig | None, environment: Environment) -> list[KernelChoice]:
    """The kernels that a config may ask for on a machine, in any mode and on any of its devices."""
    found = [choice for entry in (config.entries if config else ()) for choice in _entry_choices(entry, environment)]
    return list(dict.fromkeys(found))


def _entry_choices(entry: LayerEntry, environment: Environment) -> Iterator[KernelChoice]:
    backend = environment.backend.name
    capabilities = _capabilities(environment)
    if entry.has_ranges and not capabilities:  # any of the ranges may be the right one
        found = [choice for (key, _), choice in entry.choices if key and device_range(key).backend == backend]
    else:
        found = [entry.choose(backend, mode, capability) for mode in Mode for capability in capabilities or (None,)]
    yield from (choice for choice in found if choice is not None)


def _capabilities(environment: Environment) -> list[Release]:
    """The compute capabilities of a target's GPUs, as far as their names tell."""
    return [parse_release(gpu.arch) for gpu in environment.gpus if gpu.arch[0].isdigit()]


def _sessions(session: Session, targets: Sequence[Environment]) -> list[Session]:
    if targets:
        return [replace(session, environment=target) for target in targets]
    if session.detected.torch is None:
        expected = "--target, e.g. --target h100 or --target 'torch=2.13,cuda=13.0,sm=90', or --all-variants"
        raise InvalidEnvironment(
            THIS_MACHINE, "Torch is not installed here, so nothing tells which build fits", expected
        )
    return [session]


def _plain(request: KernelRequest) -> KernelRequest:
    if request.repo_id is None:
        raise InvalidRequest(str(request), "is on this machine already", "a repository on the Hub")
    return replace(request, symbol=None)


def _of_choice(choice: KernelChoice, backend: str | None, given: TrustPolicy) -> Wanted:
    trust = given.union(TrustPolicy.of(choice.trust_remote_code))
    return Wanted(replace(choice.request, symbol=None), backend, trust)


def _distinct(wanted: Iterable[Wanted]) -> list[Wanted]:
    """Each request once for each backend; what several places say about trust is added up."""
    found: dict[tuple[KernelRequest, str | None], Wanted] = {}
    for each in wanted:
        key = (each.request, each.backend)
        earlier = found.get(key, each)
        found[key] = replace(each, trust=earlier.trust.union(each.trust))
    return list(found.values())


def _jobs(wanted: Wanted, target: str, session: Session) -> Iterator[Job]:
    if wanted.request.repo_id is None:
        yield Job(wanted, target, session)
        return
    try:
        resolution = session.resolve(wanted.request, backend=wanted.backend, trust=wanted.trust)
    except KernelHubError as error:
        yield Job(wanted, target, session, error=error)
        return
    for found in resolution.tree():
        yield Job(wanted, target, session, found)


def _all_jobs(wanted: Wanted, session: Session) -> Iterator[Job]:
    if wanted.request.repo_id is None:
        yield Job(wanted, ALL_VARIANTS, session)
        return
    try:
        found = session.resolve_all(wanted.request, trust=wanted.trust)
    except KernelHubError as error:
        yield Job(wanted, ALL_VARIANTS, session, error=error)
        return
    for resolution in found.builds:
        yield Job(wanted, ALL_VARIANTS, session, resolution)
    for name, failure in found.failures:
        yield Job(wanted, ALL_VARIANTS, session, error=failure, name=name)


def _planned(job: Job) -> PrefetchRow:
    if job.error is not None:
        return job.row(FAILED, str(job.error))
    if job.resolution is None:
        return job.row(LOCAL)
    return job.row(STORED if job.is_stored else PLANNED)


def _done(job: Job) -> PrefetchRow:
    if job.error is not None or job.resolution is None:
        return _planned(job)
    state = STORED if job.is_stored else FETCHED
    try:
        build = job.session.obtain(replace(job.resolution, dependencies=()))  # these are jobs of their own
    except KernelHubError as error:
        return job.row(FAILED, str(error))
    return replace(job.row(state), verification=build.state.value, folder=str(build.folder))
