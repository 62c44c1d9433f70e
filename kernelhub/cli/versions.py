"""``kernelhub versions``: the API versions of a kernel, and the build of each that fits."""

from __future__ import annotations

import json

import typer

from kernelhub import api
from kernelhub.cli import option
from kernelhub.explanation import UNKNOWN


def versions(
    repository: option.Request,
    target: option.Target = None,
    backend: option.Backend = None,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    as_json: option.AsJson = False,
) -> None:
    """List the versions of REPOSITORY in numeric order, with the best build for the machine."""
    session = option.open_session(target, cache_dir, offline)
    known = session.detected.torch is not None
    rows = api.versions(repository, backend=backend, session=session)
    if as_json:
        plain = {f"v{row.version}": {"commit": row.commit, "best": row.best, "builds": row.builds} for row in rows}
        typer.echo(json.dumps(plain, indent=2))
        return
    for row in rows:
        best = (row.best or "no build fits") if known else UNKNOWN
        typer.echo(f"v{row.version}  {row.commit[:12]}  {row.builds} builds  {best}")
    if not rows:
        typer.echo("no versions (branches v1, v2, ...)")
