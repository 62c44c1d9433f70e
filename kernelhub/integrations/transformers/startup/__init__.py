"""Startup: kernelhub switched on in new Python processes, for launchers that start others."""

from __future__ import annotations

import os
from pathlib import Path

from kernelhub import setting
from kernelhub.integrations.transformers.switch import enable

FOLDER = Path(__file__).resolve().parent
VARIABLE = "KERNELHUB_TRANSFORMERS"


def switch_on() -> None:
    """``enable()`` if the environment of this process asks for it.

    Raises:
        InvalidConfig: the variable says neither yes nor no.
    """
    wanted = setting.transformers_switch()
    if wanted is not None:
        enable(shadow=wanted == "shadow")


def variables(*, shadow: bool = False) -> dict[str, str]:
    """The environment variables that let every Python started with them call ``switch_on``."""
    folders = [str(FOLDER), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {VARIABLE: "shadow" if shadow else "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}
