"""``kernelhub info``: what the chosen build says about itself."""

from __future__ import annotations

import json

import typer

from kernelhub.cli import option
from kernelhub.explanation import explain as explain_request
from kernelhub.request import KernelRequest


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
    found = explain_request(KernelRequest.parse(request), session, backend=backend).to_dict()
    facts = {
        "request": found["request"],
        "trust": found["trust"],
        "verdict": found["verdict"],
        **(found["build"] or {}),
    }
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    for name, value in facts.items():
        typer.echo(f"{name:<14}{json.dumps(value) if isinstance(value, (list, dict)) else value}")
