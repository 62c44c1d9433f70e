"""``kernelhub run``: any script or module, with kernelhub as the loader of transformers' kernels."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated

import typer

import kernelhub
from kernelhub.integrations.transformers import startup

Command = Annotated[
    list[str] | None,
    typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments; with -m the module and its."),
]
Module = Annotated[bool, typer.Option("-m", help="The first argument is a module, as for python -m.")]
Shadow = Annotated[
    bool, typer.Option("--shadow", help="Also where the packages kernels or liger-kernel are installed.")
]
PrintEnv = Annotated[
    bool, typer.Option("--print-env", help="Run nothing; print the variables, for eval in the shell of a launcher.")
]


def run(command: Command = None, module: Module = False, shadow: Shadow = False, print_env: PrintEnv = False) -> None:
    """Run a script, unchanged, with its use_kernels, kernel_config and use_liger_kernel served by kernelhub.

    Processes that it starts (torchrun, accelerate launch, workers) are served too: by the variables
    KERNELHUB_TRANSFORMERS=1 and PYTHONPATH, which are set for it. KERNELHUB_TRANSFORMERS=0 switches a process off.
    Options for the script come after its name. The exit code is the script's.
    """
    added = _variables(shadow)
    if print_env:
        typer.echo("\n".join(f"export {name}={shlex.quote(value)}" for name, value in added.items()))
        return
    if not command:
        raise typer.BadParameter("no script to run", param_hint="SCRIPT")
    python = [sys.executable, *(["-m"] if module else []), *command]
    environment = {**os.environ, **added}
    if sys.platform == "win32":  # exec would not wait there
        sys.exit(subprocess.run(python, env=environment, check=False).returncode)
    os.execve(sys.executable, python, environment)


def _variables(shadow: bool) -> dict[str, str]:
    added = startup.variables(shadow=shadow)
    home = str(Path(kernelhub.__file__).parents[1])
    # Run from its folder without being installed: the script's Python would not find it.
    if PathFinder.find_spec("kernelhub", sys.path[1:]) is None:
        added["PYTHONPATH"] += os.pathsep + home
    return added
