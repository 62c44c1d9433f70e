"""Kernels that replace several layers, or have parameters of their own: checked, tuned and watched as a whole."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from fused_kernel import ATTENTION, FILES, MLP, NORM_MLP
from kernel_repository import write_build
from layers.tiny_model import IDS, logits, tiny

import kernelhub
from kernelhub.errors import NumericsMismatch

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.session import Session

MAPPINGS: dict[str, Any] = {"NormMLP": NORM_MLP, "GateUpMLP": MLP, "TransposedMLP": MLP, "QKVAttention": ATTENTION}
NORM_KEY: Any = NORM_MLP
INPUTS = {"input_ids": IDS}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_build(tmp_path / "local", "acme/fused", "v1", "torch-cpu", FILES)


def write_wrong(tmp_path: Path) -> Path:
    """The same kernels, of which NormMLP is wrong by half."""
    files = {name: str(body) for name, body in FILES.items()}
    right = "gate, up = self.gate_up_proj(rms_norm(hidden_states, self.scale"
    name = next(name for name, body in files.items() if right in body)
    files[name] = files[name].replace(right, right.replace("hidden_states", "hidden_states * 0 + 0.5"), 1)
    return write_build(tmp_path / "local", "acme/wrong", "v1", "torch-cpu", files)


@pytest.mark.parametrize("symbol", list(MAPPINGS))
def test_a_right_one_is_bound(symbol: str, folder: Path, hubless: Session) -> None:
    report = kernelhub.check(tiny(), {MAPPINGS[symbol]: f"{folder}:{symbol}"}, INPUTS, session=hubless)
    assert report.ok, report
    model = tiny()
    kernelhub.kernelize(model, {MAPPINGS[symbol]: f"{folder}:{symbol}"}, check="bind", inputs=INPUTS, session=hubless)
    assert len(kernelhub.report(model).bound) == 2
    torch.testing.assert_close(logits(model), logits(tiny()))


def test_a_wrong_one_is_not(tmp_path: Path, hubless: Session) -> None:
    model = tiny()
    with pytest.raises(NumericsMismatch, match="post_attention_layernorm"):
        kernelhub.kernelize(
            model, {NORM_KEY: f"{write_wrong(tmp_path)}:NormMLP"}, check="bind", inputs=INPUTS, session=hubless
        )
    assert not kernelhub.report(model)


def test_it_is_watched(folder: Path, tmp_path: Path, hubless: Session) -> None:
    for path, symbol, bound in ((folder, "NormMLP", 2), (write_wrong(tmp_path), "NormMLP", 0)):
        model = tiny()
        kernelhub.kernelize(model, {NORM_KEY: f"{path}:{symbol}"}, check="first:1", session=hubless)
        for _ in range(2):
            torch.testing.assert_close(logits(model), logits(tiny()))
        assert len(kernelhub.report(model).bound) == bound
        assert len(kernelhub.report(model).skipped) == 2 - bound


def test_it_is_measured(folder: Path, hubless: Session) -> None:
    found = kernelhub.tune(tiny(), {NORM_KEY: f"{folder}:NormMLP"}, INPUTS, session=hubless)
    assert {row.mode for row in found} == {"inference", "training"}
    assert all(row.trial.seconds > 0 for row in found)
