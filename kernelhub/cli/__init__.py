"""The command line: one small module a command. Results go to stdout, everything else to stderr."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

import kernelhub
from kernelhub.cli import (
    bench,
    bundle,
    cache,
    capture,
    check,
    demo,
    doctor,
    explain,
    info,
    lock,
    prefetch,
    serve,
    trust_root,
    variants,
    verify,
    versions,
)
from kernelhub.cli.run import run as run_script
from kernelhub.errors import KernelHubError

app = typer.Typer(
    name="kernelhub",
    help="Find, verify, load and bind compute kernels from the Hugging Face Hub, and say why for every decision.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("explain")(explain.explain)
app.command("versions")(versions.versions)
app.command("variants")(variants.variants)
app.command("info")(info.info)
app.command("lock")(lock.lock)
app.command("prefetch")(prefetch.prefetch)
app.add_typer(bundle.app)
app.add_typer(cache.app, name="cache")
app.command("serve")(serve.serve)
app.command("run", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(run_script)
app.command("verify")(verify.verify)
app.add_typer(trust_root.app, name="trust-root")
app.command("doctor")(doctor.doctor)
app.command("check")(check.check)
app.command("capture")(capture.capture)
app.command("bench")(bench.bench)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernelhub {kernelhub.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Options of kernelhub itself, before a command."""


def main() -> None:
    """Run the command line."""
    run(app)


def run(command: typer.Typer) -> None:
    """Run a command line; an error of kernelhub is one message on stderr and exit code 1."""
    try:
        command()
    except KernelHubError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)
