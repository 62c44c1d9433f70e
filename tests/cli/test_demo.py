"""`kernelhub demo` as a person runs it: in a process of its own, with nothing but the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from typer.testing import CliRunner

from kernelhub.cli import app
from kernelhub.folder import collection_folder

if TYPE_CHECKING:
    from pathlib import Path


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kernelhub", *arguments]
    return subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> str:
    home = tmp_path_factory.mktemp("home")
    done = run("demo", "--steps", "2", HOME=str(home), HF_HOME=str(home / "hf"), HF_HUB_DISABLE_TELEMETRY="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert not (home / "hf" / "kernelhub").exists()  # its store is a temporary one
    return done.stdout


def test_the_demo_shows_the_environment_and_why_each_build_was_accepted_or_rejected(told: str) -> None:
    assert re.search(r"environment: torch=\d", told)
    assert re.search(r"accepted  torch-(universal|cuda): chosen", told)
    assert "torch-cuda" in told


def test_the_demo_binds_every_kind_of_layer_and_says_where(told: str) -> None:
    for layer in ("RMSNorm", "SwiGLUMLP", "rotary_pos_emb", "FusedLinearCrossEntropy"):
        assert len(re.findall(rf"^bound .*layers@[0-9a-f]{{12}}:{layer} ", told, re.MULTILINE)) >= 2, layer
    assert "skipped" not in told


def test_the_demo_compares_numbers_time_and_memory(told: str) -> None:
    assert told.count("largest difference from float64") == 2
    assert re.search(r"time, ms .* \d", told)
    assert re.search(r"peak memory above weights, MiB .* 0\.\d", told)


def test_the_demo_ends_with_what_it_showed(told: str) -> None:
    assert "The Hub is stopped (it answered " in told
    told, _, advice = told.partition("Next:")
    assert told.rstrip().endswith("nothing fell back")
    assert "kernelhub run train.py" in advice


def test_the_second_half_of_the_demo_makes_no_request(tmp_path: Path) -> None:
    """The same steps as the demo, with the Hub kept running to count what it is asked."""
    import torch

    from kernelhub import api
    from kernelhub.cli.demo import MAPPING, _small_qwen3
    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

    plain, _ = _small_qwen3(torch, torch.device("cpu"))
    with LocalHub(collection_folder()) as hub:
        api.kernelize(plain, MAPPING, session=Session(cache_dir=tmp_path, endpoint=hub.url))
        assert len(hub.requests) > 0
        hub.clear()
        api.kernelize(plain, MAPPING, session=Session(cache_dir=tmp_path, endpoint=hub.url))
        assert hub.requests == []
        assert len(api.report(plain).bound) == 26


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    from kernelhub.serve import LocalHub

    with LocalHub(tmp_path) as hub:
        done = run("serve", str(tmp_path), "--port", str(hub.port))
    assert done.returncode == 1
    assert f"127.0.0.1:{hub.port}" in done.stderr
    assert "Traceback" not in done.stderr


WRONG_NORM = """
class RMSNorm(nn.Module):
    def forward(self, hidden_states):
        return 1.01 * hidden_states


class Right(nn.Module):"""


def test_a_kernel_that_computes_other_numbers_fails_the_demo(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The demo's verdict is no decoration: a norm that neither normalises nor uses its weight is not bound."""
    copied = tmp_path / "collection"
    shutil.copytree(collection_folder(), copied)
    for layers in copied.glob("kernelhub/layers/v2/build/*/layers.py"):
        source = layers.read_text()
        assert "\nclass RMSNorm(nn.Module):" in source
        layers.write_text(source.replace("\nclass RMSNorm(nn.Module):", WRONG_NORM))
        (layers.parent / "metadata.json").unlink()
    monkeypatch.setattr("kernelhub.cli.demo.collection_folder", lambda: copied)
    result = CliRunner().invoke(app, ["demo", "--steps", "1"])
    assert result.exit_code == 1
    assert "FAILED: model.norm (RMSNorm) was left alone: the gradient of weight is missing" in result.output
    assert "output with the real inputs: error " in result.output
    assert "lists no digests" in result.output  # and that it runs unverified code is told too
