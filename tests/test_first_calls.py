"""A kernel that fails at its first calls: raised by default, taken away where the user asked for a check of them."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_repository import trust, write_build
from torch import nn

from kernelhub import kernelize, report

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.session import Session

LAYERS = """
from torch import nn
from torch.nn.functional import rms_norm

class Norm(nn.Module):
    def forward(self, x):
        right = rms_norm(x, self.weight.shape, self.weight, self.eps)
        {end}
"""
WRONG = {
    "NaN": ("return right * float('nan')", "NaN"),
    "infinity": ("return right / 0", "output has inf"),
    "shape": ("return right[:, :1]", "output has shape (3, 1), not (3, 4)"),
    "dtype": ("return right.double()", "output is float64, not float32"),
    "strides": ("return right.t().contiguous().t()", "output has strides (1, 3), not (4, 1)"),
    "own input": ("x.add_(1); return right", "changes its input"),
    "numbers": ("return right * 1.01", "times the"),
}


def norms(value: str, hub_root: Path) -> str:
    """A kernel on the Hub whose layer ends with this statement."""
    trust(hub_root, "acme")
    files = {"__init__.py": "", "layers.py": textwrap.dedent(LAYERS).replace("{end}", value)}
    write_build(hub_root, "acme/norm", "v1", "torch-cpu", files)
    return "acme/norm:Norm"


def model() -> nn.Sequential:
    return nn.Sequential(nn.RMSNorm(4), nn.RMSNorm(4)).eval()


def inputs() -> torch.Tensor:
    return torch.arange(12.0).reshape(3, 4) + 1


RAISES = "raise RuntimeError('no kernel image')"


def test_r_42_what_a_kernel_raises_is_raised(hub_root: Path, session: Session) -> None:
    bound = kernelize(model(), {"RMSNorm": norms(RAISES, hub_root)}, session=session)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no kernel image"):
            bound(inputs())


def test_r_42_with_a_check_of_the_first_calls_the_own_forward_comes_back_and_that_is_told_once(
    hub_root: Path, session: Session, reporter: Recorder
) -> None:
    mapping = {"RMSNorm": norms(RAISES, hub_root)}
    checked = kernelize(model(), mapping, session=session, check="first:2")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(checked(inputs()), model()(inputs()))
    assert not any("forward" in vars(layer) for layer in checked.children())
    [told] = reporter.warnings
    assert "acme/norm@" in told
    assert "RuntimeError: no kernel image" in told
    assert [row.state for row in report(checked)] == ["skipped", "skipped"]


@pytest.mark.parametrize("kind", WRONG)
def test_r_43_a_wrong_result_of_the_first_calls_is_compared_told_with_the_layer_and_not_used(
    kind: str, hub_root: Path, session: Session, reporter: Recorder
) -> None:
    end, words = WRONG[kind]
    checked = kernelize(model(), {"RMSNorm": norms(end, hub_root)}, session=session, check="first:2")
    x: Any = inputs()
    with torch.no_grad():
        assert torch.equal(checked(x), model()(inputs()))
    assert torch.equal(x, inputs())
    [told] = reporter.warnings
    assert ":Norm computes other numbers than 0: " in told  # the first layer of the model
    assert words in told
    assert not report(checked).bound
