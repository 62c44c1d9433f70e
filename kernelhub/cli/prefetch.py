"""``kernelhub prefetch``: bring builds into the store now, so that later loads need no network."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelhub import blueprint
from kernelhub.cli import option  # noqa: TC001  # typer reads the annotations when it runs
from kernelhub.cli.progress import ProgressReporter
from kernelhub.config import KernelConfig
from kernelhub.environment import Environment
from kernelhub.errors import (
    InvalidConfig,
    InvalidEnvironment,
    InvalidLockfile,
    InvalidRequest,
    PrefetchFailed,
)
from kernelhub.lockfile import Lock
from kernelhub.prefetch import PrefetchPlan, PrefetchReport, plan_prefetch
from kernelhub.request import KernelRequest
from kernelhub.session import Session

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Task, TaskID

Requests = Annotated[list[str] | None, typer.Argument(help='Mapping strings, e.g. "org/repo@v1:Symbol".')]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="A KernelConfig in a .toml or .json file.")]
LockFile = Annotated[
    Path | None, typer.Option("--lock", help="Follow this lock; without other requests, fetch all that it locks.")
]
Model = Annotated[
    Path | None,
    typer.Option(help="Folder or config.json of a transformers model: only entries of the config that its layers use."),
]
Targets = Annotated[
    list[str] | None,
    typer.Option(
        "--target",
        help='Another machine (repeatable): a preset such as h100, or "torch=2.13,cuda=13.0,sm=90,os=linux".',
    ),
]
AllVariants = Annotated[bool, typer.Option("--all-variants", help="Every build instead of the best for a target.")]


def prefetch(
    requests: Requests = None,
    config: ConfigFile = None,
    lock: LockFile = None,
    model: Model = None,
    target: Targets = None,
    all_variants: AllVariants = False,
    backend: option.Backend = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Download nothing; tell what would be, with sizes.")
    ] = False,
    cache_dir: option.CacheDir = None,
    trust: option.Trust = None,
    as_json: option.AsJson = False,
) -> None:
    """Download, verify and store the builds that serve REQUESTS, a config, a lock or a model; imports nothing.

    What is stored already is not fetched again, so the command can be repeated after an interruption. Exit code 0:
    all is there; 1: something failed (the rest was fetched); 2: the command could not be understood.
    """
    wish = Wish(requests or [], config, lock, model, target or [], all_variants, backend, trust or [])
    with PrefetchReporter() as reporter:
        plan = plan_wish(wish, Session(cache_dir=cache_dir, lockfile=lock, reporter=reporter))
        report = plan.report() if dry_run else reporter.run(plan)
    typer.echo(json.dumps(report.to_dict(), indent=2) if as_json else str(report))
    fail_if_failed(report)


def fail_if_failed(report: PrefetchReport) -> None:
    """Raise what ends the command with exit code 1."""
    if report.failures:
        failures = [(row.request, row.error) for row in report.failures]
        raise PrefetchFailed(failures, len(report.rows))


@dataclass(frozen=True)
class Wish:
    """What the options of ``prefetch`` and ``bundle create`` ask for."""

    requests: list[str]
    config: Path | None = None
    lock: Path | None = None
    model: Path | None = None
    targets: list[str] = field(default_factory=list)
    all_variants: bool = False
    backend: str | None = None
    trust: list[str] = field(default_factory=list)


def plan_wish(wish: Wish, session: Session) -> PrefetchPlan:
    """Resolve everything that is asked for; a wish that cannot be understood ends the command with exit code 2."""
    with _usage():
        if wish.all_variants and wish.targets:
            raise InvalidRequest("--all-variants", "given together with --target", "one of them")
        requests = _requests(wish)
        return plan_prefetch(
            requests,
            session,
            config=_config(wish, requests),
            targets=[Environment.parse(text) for text in wish.targets],
            all_variants=wish.all_variants,
            backend=wish.backend,
            trust=wish.trust,
        )


def _requests(wish: Wish) -> list[KernelRequest]:
    requests = [KernelRequest.parse(text) for text in wish.requests]
    if wish.lock is not None:
        locked = Lock.read(wish.lock).kernels
        if not requests and wish.config is None and wish.model is None:
            return [kernel.request for kernel in locked if not kernel.dependency]
    return requests


def _config(wish: Wish, requests: list[KernelRequest]) -> KernelConfig | None:
    if wish.model is None:
        if not requests and wish.config is None:
            raise InvalidRequest("", "nothing to prefetch", "mapping strings, --config, --lock or --model")
        return None if wish.config is None else KernelConfig.from_file(wish.config)
    config = KernelConfig(blueprint.SHIPPED) if wish.config is None else KernelConfig.from_file(wish.config)
    used = blueprint.used_entries(wish.model, config)
    unused = [entry.layer for entry in config.entries if entry.layer not in used.kernel_mapping]
    typer.echo(f"{wish.model}: uses {', '.join(used.kernel_mapping) or 'no entry'} of the config", err=True)
    if unused:
        typer.echo(f"{wish.model}: no layer answers to {', '.join(unused)}", err=True)
    return used


@contextmanager
def _usage() -> Iterator[None]:
    """A request, file or target that cannot be read is bad usage (exit code 2), told with our own message."""
    try:
        yield
    except (InvalidConfig, InvalidEnvironment, InvalidLockfile, InvalidRequest) as error:
        raise typer.BadParameter(str(error)) from error


class PrefetchReporter(ProgressReporter):
    """Progress with a bar for the whole, one a build, and one a file under way; plain lines without a terminal."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__(console)
        self._total: TaskID | None = None
        self._files: dict[tuple[str, str], TaskID] = {}

    def __enter__(self) -> PrefetchReporter:
        super().__enter__()
        return self

    def run(self, plan: PrefetchPlan) -> PrefetchReport:
        """Run a plan whose size is known by now."""
        missing = plan.missing
        if missing:
            size = sum(missing.values())
            self._total = self._progress.add_task(f"total: {len(missing)} builds", total=size)
            if not self._console.is_terminal:
                self._console.print(f"{len(missing)} builds to fetch, {size} bytes", markup=False, highlight=False)
        return plan.run()

    def download_advanced(self, build: str, size: int) -> None:
        super().download_advanced(build, size)
        if self._total is not None:
            self._progress.advance(self._total, size)

    @property
    def tasks(self) -> list[Task]:
        """What is drawn now."""
        return self._progress.tasks

    def file_advanced(self, build: str, path: str, size: int, total: int) -> None:
        with self._lock:
            if (build, path) not in self._files:
                self._files[build, path] = self._progress.add_task(f"  {path}", total=total)
            task = self._files[build, path]
            self._progress.advance(task, size)
            if any(drawn.finished for drawn in self.tasks if drawn.id == task):
                self._progress.remove_task(self._files.pop((build, path)))
