"""Attention functions, which layers look up in a table: checked and measured as what the layer calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from kernel_repository import write_build
from layers.tiny_model import IDS, tiny
from test_attention_kernels import ATTENTION

import kernelhub
from kernelhub.errors import NumericsMismatch

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.session import Session

WRONG = """

def unscaled_twice(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    return attend(module, query, key, value, None, scaling * 0.9, module.is_causal, dropout)


def sees_the_future(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    return attend(module, query, key, value, None, scaling, False, dropout)
"""
MASK = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {"__init__.py": ATTENTION + WRONG}
    return write_build(tmp_path / "local", "acme/attention", "v1", "torch-cpu", files)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("symbol", "implementation"), [("flash", "sdpa"), ("masked", "sdpa"), ("added", "eager")])
def test_right_ones_pass(symbol: str, implementation: str, dtype: torch.dtype, folder: Path, hubless: Session) -> None:
    for mask in (None, MASK):
        model = tiny(attn_implementation=implementation).to(dtype)
        inputs = {"input_ids": IDS} if mask is None else {"input_ids": IDS, "attention_mask": mask}
        report = kernelhub.check(model, {"attention": f"{folder}:{symbol}"}, inputs, session=hubless)
        assert report.ok, report
        kernelhub.kernelize(model, {"attention": f"{folder}:{symbol}"}, check="bind", inputs=inputs, session=hubless)
        assert len(kernelhub.report(model).bound) == 2


@pytest.mark.parametrize("symbol", ["unscaled_twice", "sees_the_future"])
def test_wrong_ones_do_not(symbol: str, folder: Path, hubless: Session) -> None:
    with pytest.raises(NumericsMismatch, match=rf"{symbol} computes other numbers than model.layers.0.self_attn"):
        kernelhub.kernelize(
            tiny(attn_implementation="sdpa"),
            {"attention": f"{folder}:{symbol}"},
            check="bind",
            inputs={"input_ids": IDS},
            session=hubless,
        )


def test_they_are_measured(folder: Path, hubless: Session) -> None:
    found = kernelhub.tune(tiny(), {"attention": f"{folder}:flash"}, {"input_ids": IDS}, session=hubless)
    assert {row.mode for row in found} == {"inference", "training"}
    assert all(row.trial.seconds > 0 for row in found)
