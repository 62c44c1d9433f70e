"""A kernel that crashes or hangs takes its process along: what is left says which one it was."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

KERNEL = """
import ctypes, time

def crash():
    ctypes.string_at(0)

def hang():
    time.sleep(60)
"""
PROGRAM = """
import faulthandler, resource, sys
from pathlib import Path
from kernelhub import Environment, Session, load_kernel
session = Session(cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2], token=False, strict=sys.argv[3] == "strict",
                  lockfile=False, environment=Environment.parse("torch=2.13"))
kernel = load_kernel("acme/relu", session=session)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
faulthandler.dump_traceback_later(0.2, exit=True)
getattr(kernel, sys.argv[4])()
"""


@pytest.mark.parametrize(
    ("way", "mode", "told"),
    [
        ("crash", "plain", "Fatal Python error: Segmentation fault"),
        ("hang", "strict", "Timeout (0:00:00.200000)!"),
    ],
)
def test_r_44_faulthandler_names_the_kernel_that_crashes_or_hangs(
    way: str, mode: str, told: str, hub_root: Path, hub: LocalHub, session: Session
) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": "from .parts import *\n", "parts.py": KERNEL})
    command = [sys.executable, "-X", "faulthandler", "-c", PROGRAM, str(session.store.root), hub.url, mode, way]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0
    assert told in done.stderr
    [build] = session.store.builds()
    place = f"acme--relu/{build.manifest.commit}/torch-cpu/files/parts.py"
    assert f'{place}", line ' in done.stderr
    assert f" in {way}\n" in done.stderr
