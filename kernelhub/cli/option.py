"""Options that several commands share, declared once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelhub.cli.progress import ProgressReporter
from kernelhub.environment import Environment
from kernelhub.session import Session

Request = Annotated[str, typer.Argument(help='A mapping string, e.g. "org/repo@v1:Symbol".')]
Target = Annotated[
    str | None,
    typer.Option(help='Another machine, e.g. "torch=2.13,cuda=13.0,sm=90,cpu=x86_64,os=linux"; default: this one.'),
]
Backend = Annotated[str | None, typer.Option(help="Ask for builds of this backend, e.g. cpu.")]
CacheDir = Annotated[Path | None, typer.Option(help="The store's folder (default: KERNELHUB_CACHE).")]
Offline = Annotated[bool, typer.Option("--offline", help="Open no socket; use what the store remembers.")]
Trust = Annotated[list[str] | None, typer.Option(help="Allow this repository's code to run (repeatable).")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def open_session(target: str | None, cache_dir: Path | None, offline: bool) -> Session:
    """A session for this machine or for the one that ``target`` describes."""
    environment = None if target is None else Environment.parse(target)
    # Only a switch that was given overrides HF_HUB_OFFLINE.
    return Session(cache_dir=cache_dir, offline=offline or None, environment=environment, reporter=ProgressReporter())


def show(value: Any, as_json: bool) -> None:
    """Print a value that has ``to_dict`` and ``str``."""
    typer.echo(json.dumps(value.to_dict(), indent=2) if as_json else str(value))
