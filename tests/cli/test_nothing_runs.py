"""Commands that tell something about kernels, or fetch them, run nothing of them: no module, no constructor."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from compiled_kernel import marking_library
from kernel_repository import trust, write_build
from typer.testing import CliRunner

from kernelhub.cli import app

if TYPE_CHECKING:
    from kernelhub.serve import LocalHub

MODULE = "import os, pathlib\npathlib.Path(os.environ['KERNELHUB_TEST_MARK']).touch()\nfrom . import _probe\n"
COMMANDS = (
    ("versions", "acme/probe"),
    ("variants", "acme/probe"),
    ("info", "acme/probe"),
    ("explain", "acme/probe"),
    ("lock", "acme/probe"),
    ("prefetch", "acme/probe"),
    ("explain", "acme/probe"),
    ("verify", "acme/probe"),
    ("verify", "--all"),
    ("cache", "ls"),
    ("cache", "verify"),
    ("bundle", "create", "acme/probe", "--output", "probe.tar.gz"),
    ("doctor", "acme/probe"),
)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is looked at")
def test_s_28_nothing_of_a_kernel_runs(
    hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    monkeypatch.setenv("KERNELHUB_TEST_MARK", str(tmp_path / "mark"))
    monkeypatch.chdir(tmp_path)
    trust(hub_root, "acme")
    files: dict[str, str | bytes] = {"__init__.py": MODULE, "_probe.abi3.so": marking_library(tmp_path, "_probe")}
    write_build(hub_root, "acme/probe", "v1", "torch-cpu", files)
    before = set(sys.modules)
    for command in COMMANDS:
        result = CliRunner().invoke(app, list(command))
        assert result.exit_code == 0, f"{command}: {result.output}"
        assert not (tmp_path / "mark").exists(), command
    assert not [name for name in set(sys.modules) - before if name.startswith("kernelhub_k_")]
    assert str(tmp_path / "store") not in Path("/proc/self/maps").read_text()
