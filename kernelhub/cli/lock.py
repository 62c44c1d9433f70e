"""``kernelhub lock``: write, check and upgrade ``kernelhub.lock``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kernelhub.cli import option
from kernelhub.errors import InvalidRequest, NotLocked
from kernelhub.lockfile import LOCK_NAME, Lock
from kernelhub.project import read_requirements
from kernelhub.request import KernelRequest
from kernelhub.resolution import DEFAULT_REVISION

if TYPE_CHECKING:
    from collections.abc import Iterable


def lock(
    requests: Annotated[
        list[str] | None,
        typer.Argument(help="Mapping strings; default: [tool.kernelhub] or [tool.kernels] in pyproject.toml."),
    ] = None,
    lockfile: Annotated[Path, typer.Option(help="The lock file.")] = Path(LOCK_NAME),
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit 1 if the lock is not current.")] = False,
    upgrade: Annotated[
        bool, typer.Option("--upgrade", help="Move REQUESTS, or without any every entry, to what they mean now.")
    ] = False,
    cache_dir: option.CacheDir = None,
    trust: option.Trust = None,
) -> None:
    """Pin REQUESTS to commits and file hashes, dependencies included, for every build variant.

    What is locked already stays at its commit until it is upgraded. --check names what is stale (its revision has
    moved), missing (asked for, not locked) or extra (locked, not asked for).
    """
    asked = [_plain(KernelRequest.parse(text)) for text in requests or ()]
    before = Lock.read(lockfile) if lockfile.exists() else None
    wanted = asked if check and asked else _wanted(asked, before)
    if not wanted:
        raise InvalidRequest("", "nothing to lock", "mapping strings, or [tool.kernelhub] in pyproject.toml")
    session = option.open_session(None, cache_dir, offline=False)
    current = session.make_lock(wanted, trust=trust or False)
    if check:
        problems = list(_problems(before, current, str(lockfile)))
        for problem in problems:
            typer.echo(problem)
        raise typer.Exit(1 if problems else 0)
    kept = _keep(before, current, _to_upgrade(asked, wanted) if upgrade else set())
    kept.write(lockfile)
    typer.echo(f"{lockfile}: {len(kept.kernels)} kernels locked")


def _plain(request: KernelRequest) -> KernelRequest:
    if request.repo_id is None:
        raise InvalidRequest(str(request), "is on this machine and needs no lock", "a repository on the Hub")
    return KernelRequest(request.repo_id, revision=request.revision or DEFAULT_REVISION)


def _wanted(asked: list[KernelRequest], before: Lock | None) -> list[KernelRequest]:
    """What the project asks for, what is asked for now, and what is locked already; the last word on a repository."""
    listed = [_plain(requirement) for requirement in read_requirements(Path.cwd())]
    locked = [kernel.request for kernel in before.kernels if not kernel.dependency] if before else []
    return list({request.repo_id: request for request in [*(() if listed else locked), *listed, *asked]}.values())


def _to_upgrade(asked: list[KernelRequest], wanted: list[KernelRequest]) -> set[str]:
    return {str(request.repo_id) for request in asked or wanted}


def _problems(before: Lock | None, current: Lock, path: str) -> Iterable[str]:
    locked = {kernel.name: kernel for kernel in before.kernels} if before else {}
    for kernel in current.kernels:
        old = locked.pop(kernel.name, None)
        if old is None:
            yield f"missing: {NotLocked(kernel.name, path)}"
        elif old.commit != kernel.commit:
            yield f"stale: {kernel.name} is locked at {old.commit[:12]}, is now {kernel.commit[:12]}"
        elif old.variants != kernel.variants:
            yield f"stale: {kernel.name} lists other files than the Hub has at {kernel.commit[:12]}"
    yield from (f"extra: {name} is locked but not asked for" for name in locked)


def _keep(before: Lock | None, current: Lock, upgrade: set[str]) -> Lock:
    """The new lock: entries that are there already and not to be upgraded stay as they are."""
    old = {kernel.name: kernel for kernel in before.kernels} if before else {}
    frozen = {
        name: kernel for name, kernel in old.items() if kernel.variants and str(kernel.request.repo_id) not in upgrade
    }
    return Lock(tuple(frozen.get(kernel.name, kernel) for kernel in current.kernels), current.origin)
