"""The commands that ask work on a machine without Torch, and say that fitting is unknown there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.serve import LocalHub


def run(hub: LocalHub, store: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command line in a Python that has neither torch nor transformers."""
    code = (
        "import sys\n"
        "sys.modules.update(torch=None, transformers=None)\n"
        "from kernelhub.cli import main\n"
        f"sys.argv = ['kernelhub', *{list(arguments)!r}]\n"
        "main()\n"
    )
    environment = os.environ | {"HF_ENDPOINT": hub.url, "KERNELHUB_CACHE": str(store)}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(autouse=True)
def repository(hub_root: Path) -> None:
    trust(hub_root, "org")
    write_build(hub_root, "org/kernel", "v1", "torch213-cxx11-cpu-x86_64-linux", {"__init__.py": ""})
    write_build(hub_root, "org/kernel", "v2", "torch-cuda", {"__init__.py": ""})


def test_versions_marked_a_build_compatible_although_torch_was_not_installed(hub: LocalHub, tmp_path: Path) -> None:
    """huggingface/kernels#264, #272."""
    done = run(hub, tmp_path, "versions", "org/kernel")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("unknown (torch is not installed)") == 2


@pytest.mark.parametrize("command", ["explain", "variants", "info"])
def test_asking_works_without_torch(hub: LocalHub, tmp_path: Path, command: str) -> None:
    done = run(hub, tmp_path, command, "org/kernel")
    assert done.returncode == 0, done.stderr
    assert "unknown (torch is not installed)" in done.stdout


def test_another_machine_is_answered_for_without_torch(hub: LocalHub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "explain", "org/kernel@v1", "--target", "linux-cpu")
    assert done.returncode == 0, done.stderr
    assert "torch213-cxx11-cpu-x86_64-linux, the best of 1 that fit" in done.stdout


def test_help_works_without_torch(hub: LocalHub, tmp_path: Path) -> None:
    assert "explain" in run(hub, tmp_path, "--help").stdout
