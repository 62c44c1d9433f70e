"""``kernelhub prefetch``: bring builds into the store now, so that later loads need no network."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kernelhub.cli.progress import ProgressReporter
from kernelhub.errors import InvalidRequest
from kernelhub.request import KernelRequest
from kernelhub.session import Session


def prefetch(
    requests: Annotated[list[str], typer.Argument(help='Mapping strings, e.g. "org/repo@v1:Symbol".')],
    cache_dir: Annotated[Path | None, typer.Option(help="The store's folder (default: KERNELHUB_CACHE).")] = None,
    backend: Annotated[str | None, typer.Option(help="Ask for builds of this backend, e.g. cpu.")] = None,
    trust: Annotated[list[str] | None, typer.Option(help="Allow this repository's code (repeatable).")] = None,
) -> None:
    """Download, verify and store the builds that serve REQUESTS on this machine; imports nothing."""
    parsed = [_checked(KernelRequest.parse(text)) for text in requests]
    with ProgressReporter() as reporter:
        session = Session(cache_dir=cache_dir, reporter=reporter)
        for request in parsed:
            resolution = session.resolve(request, backend=backend, trust=trust or False)
            build = session.obtain(resolution)
            typer.echo(f"{request}: {build.build} ({build.state.value}) in {build.folder}")


def _checked(request: KernelRequest) -> KernelRequest:
    if request.repo_id is None:
        raise InvalidRequest(str(request), "is on this machine already", "a repository on the Hub")
    return request
