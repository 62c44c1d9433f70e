"""DeepSpeed ZeRO-3 in two processes, where it is installed: weights are whole inside the call of their module only."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("zero")
    paths = [str(TESTS), str(TESTS / "company"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), "DS_ACCELERATOR": "cpu"}
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = str(TESTS / "company" / "zero_worker.py")
    result = subprocess.run([*run, worker, str(folder)], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-3000:]
    told: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return told


@pytest.mark.parametrize("order", ["kernelize, then wrap", "wrap, then kernelize"])
def test_zero_3_trains_as_without_kernels(
    found: dict[str, Any], order: str, tell: Callable[[str, str, str], None]
) -> None:
    """REF huggingface/trl#5891, #6372, #4544: outside the call of its module a weight has no elements."""
    assert found[order]["losses"] == pytest.approx(found["plain"]["losses"], rel=1e-4)
    assert {"RMSNorm", "SwiGLUMLP", "rotary_pos_emb"} <= set(found[order]["bound"])
    tell(f"DeepSpeed ZeRO-3; {order}", ", ".join(found[order]["bound"]), "works")
