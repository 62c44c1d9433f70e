"""``kernelhub info``: what the chosen build says about itself."""

from __future__ import annotations

import json

import typer

from kernelhub import api
from kernelhub.cli import option


def info(
    request: option.Request,
    target: option.Target = None,
    backend: option.Backend = None,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    as_json: option.AsJson = False,
) -> None:
    """Show the metadata of the build that serves REQUEST: license, origin, digests, dependencies, size."""
    session = option.open_session(target, cache_dir, offline)
    facts = api.explain(request, backend=backend, session=session).info
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<14}{json.dumps(value) if isinstance(value, (list, dict)) else value}")
