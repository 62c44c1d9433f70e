"""``kernelhub variants``: the builds of one version, each with the reason why it fits or not."""

from __future__ import annotations

import json

import typer

from kernelhub import api
from kernelhub.cli import option


def variants(
    request: option.Request,
    target: option.Target = None,
    backend: option.Backend = None,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    as_json: option.AsJson = False,
) -> None:
    """List every build of REQUEST, best first, and why the others do not fit."""
    session = option.open_session(target, cache_dir, offline)
    rows = api.explain(request, backend=backend, session=session).reasons
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows), default=0)
    for name, reason in rows.items():
        typer.echo(f"{ascii(name)[1:-1]:<{width}}  {reason}")
