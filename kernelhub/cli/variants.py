"""``kernelhub variants``: the builds of one version, each with the reason why it fits or not."""

from __future__ import annotations

import json

import typer

from kernelhub.cli import option
from kernelhub.explanation import UNKNOWN
from kernelhub.explanation import explain as explain_request
from kernelhub.request import KernelRequest


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
    found = explain_request(KernelRequest.parse(request), session, backend=backend)
    known = session.detected.torch is not None
    rows = {str(variant): "fits" for variant in found.selection.accepted}
    rows |= {str(rejection.variant): rejection.reason if known else UNKNOWN for rejection in found.selection.rejected}
    rows |= {repr(error.value): "ignored: not a build variant" for error in found.selection.unknown}
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    width = max(map(len, rows), default=0)
    for name, reason in rows.items():
        typer.echo(f"{name:<{width}}  {reason}")
