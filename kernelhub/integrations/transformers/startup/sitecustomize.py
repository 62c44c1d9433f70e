"""Runs when a Python starts with this folder on ``PYTHONPATH`` (``kernelhub run`` puts it there): enables kernelhub."""

import importlib
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent


def _run_the_next_one() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    others = [folder for folder in sys.path if Path(folder or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


def _enable() -> None:
    try:
        startup = importlib.import_module("kernelhub.integrations.transformers.startup")
    except ImportError:
        return  # another Python, without kernelhub
    startup.switch_on()


_run_the_next_one()
_enable()
