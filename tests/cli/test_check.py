"""`kernelhub check`, `capture` and `bench`: tables, JSON, exit codes, a plot."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from layers.tiny_model import SIZES
from typer.testing import CliRunner, Result

from kernelhub.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def kernelhub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Result]]:
    import torch

    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *arguments: CliRunner().invoke(app, [*map(str, arguments)])
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], **SIZES}))
    return path


def rows(result: Result) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(result.stdout)["rows"]
    return found


def test_the_shipped_kernels_are_checked_without_any_option(kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("check")
    assert result.exit_code == 0, result.output
    assert "VERDICT  MODULE" in result.stdout
    assert "6 right; checked in" in result.stdout


def test_kernels_are_checked_on_a_model(kernelhub: Callable[..., Result], model: Path) -> None:
    result = kernelhub("check", "--model", model, "--json")
    assert result.exit_code == 0, result.output
    assert {row["layer"] for row in rows(result)} == {"RMSNorm", "SwiGLUMLP", "rotary_pos_emb", "ForCausalLM"}
    assert {row["verdict"] for row in rows(result)} == {"right"}


def test_a_kernel_for_another_layer_fails(kernelhub: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    kernel = tmp_path / "mine" / "torch-cpu"
    kernel.mkdir(parents=True)
    (kernel / "__init__.py").write_text(
        "from torch import nn\n\nclass Norm(nn.Module):\n    def forward(self, hidden_states):\n"
        "        return hidden_states * self.weight\n"
    )
    result = kernelhub("check", f"{kernel}:Norm", "--layer", "RMSNorm", "--model", model)
    assert result.exit_code == 1
    assert "wrong    model.layers.0.input_layernorm (+4)" in result.stdout
    assert "that is allowed" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["builtin:RMSNorm"], "--layer NAME"),
        (["builtin:RMSNorm", "--layer", "RMSNorm", "--config", "x.toml"], "a kernel beside --config"),
        (["--dtype", "int8"], "not a dtype"),
        (["--device", "mars"], "device 'mars' cannot be used"),
        (["--golden", "absent"], "nothing to check with --golden"),
        (["--golden", "absent", "builtin:RMSNorm"], "cannot be read"),
        (["--model", "absent.json"], "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_told(kernelhub: Callable[..., Result], arguments: list[str], words: str) -> None:
    result = kernelhub("check", *arguments)
    assert result.exit_code == 1
    assert words in str(result.exception)


def test_a_captured_file_is_replayed(kernelhub: Callable[..., Result], model: Path, tmp_path: Path) -> None:
    result = kernelhub("capture", "golden.safetensors", "--layer", "RMSNorm", "--model", model, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("golden.safetensors: 3 kinds of calls, ")
    replayed = kernelhub("check", "--golden", "golden.safetensors", "builtin@v1:RMSNorm", "--json")
    assert replayed.exit_code == 0, replayed.output
    assert next(row["input"] for row in rows(replayed)) == "2x37x32 bfloat16"
    wrong = kernelhub("check", "--golden", "golden.safetensors", "builtin:LayerNorm")
    assert wrong.exit_code == 1
    assert "it raises AttributeError" in wrong.stdout


def test_costs_and_errors_are_shown_and_drawn(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    arguments = ("builtin:LayerNorm", "--layer", "LayerNorm", "--tokens", "16", "--steps", "2")
    result = kernelhub("bench", *arguments, "--plot", "out.svg", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert set(found["step"]) == {"plain", "kernels", "tuned"}
    assert all(cost["seconds"] > 0 and cost["peak_bytes"] > 0 for cost in found["step"].values())
    assert found["check"]["ok"] is True
    assert len(found["tune"]["rows"]) == 2
    drawn = (tmp_path / "out.svg").read_text()
    assert drawn.lstrip().startswith("<?xml")
    assert "</svg>" in drawn


def test_the_table_has_a_line_for_each_step(kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("bench", "builtin:LayerNorm", "--layer", "LayerNorm", "--tokens", "16", "--steps", "1")
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()[-4:]] == ["STEP", "plain", "kernels", "tuned"]


def test_without_matplotlib_the_plot_says_what_to_install(
    kernelhub: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    result = kernelhub("bench", "builtin:LayerNorm", "--layer", "LayerNorm", "--tokens", "4", "--plot", "out.svg")
    assert result.exit_code == 1
    assert "pip install 'kernelhub[plot]'" in str(result.exception)
