#!/usr/bin/env python3
"""Bring kernels into the store before a job starts: `kernelhub prefetch` for job scripts and Dockerfiles.

Same options, same exit codes: 0 all there, 1 something failed, 2 bad usage. Needs no GPU, and no Torch when the
target is given:

    scripts/prefetch_kernels.py --config kernels.toml --target h100
    scripts/prefetch_kernels.py org/repo@v1 --all-variants --dry-run
"""

from __future__ import annotations

import typer

from kernelhub.cli import run
from kernelhub.cli.prefetch import prefetch


def main() -> None:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(prefetch)
    run(app)


if __name__ == "__main__":
    main()
