"""``kernelhub bundle``: builds in one file, for machines without network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kernelhub import bundle
from kernelhub.cli import option, prefetch
from kernelhub.errors import InvalidLockfile
from kernelhub.lockfile import Lock
from kernelhub.session import Session

app = typer.Typer(
    name="bundle",
    help="Pack builds into one file, look into it, and install it where there is no network.",
    no_args_is_help=True,
)

Bundle = Annotated[Path, typer.Argument(help=f"A bundle ({bundle.SUFFIX}).")]


@app.command()
def create(
    output: Annotated[Path, typer.Option("--output", "-o", help=f"The file to write ({bundle.SUFFIX}).")],
    requests: prefetch.Requests = None,
    config: prefetch.ConfigFile = None,
    lock: prefetch.LockFile = None,
    model: prefetch.Model = None,
    target: prefetch.Targets = None,
    all_variants: prefetch.AllVariants = False,
    backend: option.Backend = None,
    cache_dir: option.CacheDir = None,
    trust: option.Trust = None,
    as_json: option.AsJson = False,
) -> None:
    """Prefetch what is asked for, and write all of it, with its manifests and a lock, into one file.

    The same builds give the same bytes. If anything could not be fetched, nothing is written (exit code 1).
    """
    wish = prefetch.Wish(requests or [], config, lock, model, target or [], all_variants, backend, trust or [])
    with prefetch.PrefetchReporter() as reporter:
        session = Session(cache_dir=cache_dir, lockfile=lock, reporter=reporter)
        plan = prefetch.plan_wish(wish, session)
        prefetch.fail_if_failed(reporter.run(plan))
        made = bundle.create(plan.resolutions, session, output, None if lock is None else Lock.read(lock))
    option.show(made, as_json)
    if not as_json:
        typer.echo(f"written   {output}, {output.stat().st_size} bytes")


@app.command()
def inspect(path: Bundle, as_json: option.AsJson = False) -> None:
    """Show what a bundle holds, after comparing every byte with its list; unpacks nothing."""
    option.show(bundle.inspect(path), as_json)


@app.command()
def install(
    path: Bundle,
    digest: Annotated[str | None, typer.Option(help="Refuse any other bundle than the one with this digest.")] = None,
    write_lock: Annotated[
        Path | None, typer.Option("--write-lock", help="Write the bundle's lock to this new file.")
    ] = None,
    cache_dir: option.CacheDir = None,
    trust: option.Trust = None,
    as_json: option.AsJson = False,
) -> None:
    """Verify a bundle as a whole, then bring its builds into the store.

    A bundle grants no trust, whoever its builds say they are from: name each repository with --trust, or list it in
    the policy file (kernelhub.toml). Loading asks for trust as always; on a machine without network the policy file
    is the place to say it once.
    """
    if write_lock is not None and write_lock.exists():
        raise typer.BadParameter(f"{write_lock} exists already", param_hint="--write-lock")
    with prefetch.PrefetchReporter() as reporter:
        session = Session(cache_dir=cache_dir, lockfile=False, reporter=reporter)
        contents, rows = bundle.install(path, session, trust=trust or [], digest=digest)
    if as_json:
        facts = [{**row.build._asdict(), "is_new": row.is_new, "verification": row.verification} for row in rows]
        typer.echo(json.dumps({"digest": contents.digest, "builds": facts}, indent=2))
    else:
        for row in rows:
            typer.echo(f"{row.build.title}: {'installed' if row.is_new else 'stored'} ({row.verification})")
    if write_lock is not None:
        if contents.lock is None:
            raise InvalidLockfile(str(path), "the bundle has no lock (it holds two versions of one kernel)")
        contents.lock.write(write_lock)
