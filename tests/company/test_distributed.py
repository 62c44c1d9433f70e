"""Two processes over gloo: each way of sharing a model, kernelized before and after it is wrapped."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import multiprocessing

from company.distributed_worker import CASES, WORLD, work

if TYPE_CHECKING:
    from collections.abc import Callable

ORDERS = ("kernelize, then wrap", "wrap, then kernelize")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process found, in the order of their ranks."""
    if not torch.distributed.is_available():
        pytest.skip("this torch has no torch.distributed")  # torch can be built without
    folder = tmp_path_factory.mktemp("processes")
    multiprocessing.spawn(work, args=(folder,), nprocs=WORLD)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_agree_with_the_plain_model(
    outcomes: list[dict[str, Any]], case: str, order: str, tell: Callable[[str, str, str], None]
) -> None:
    found = [outcome[case][order] for outcome in outcomes]
    assert [each.get("error") for each in found] == [None, None]
    assert all(each["same"] for each in found)
    assert found[0]["ran"] == found[1]["ran"]
    ran = found[0]["ran"]
    names = {"rms_norm": "RMSNorm", "gated": "SwiGLUMLP", "fused_linear_cross_entropy": "FusedLinearCrossEntropy"}
    ran["gated"] = ran.get("gated", 0) + ran.get("gated_linear", 0)
    at_work = [name for function, name in names.items() if ran.get(function)]
    aside = [name for function, name in names.items() if not ran.get(function)]
    tell(f"{case}; {order}", ", ".join(at_work), "works")
    if aside:
        tell(f"{case}; {order}", ", ".join(aside), "own forward: its weight is sharded or not plain")


def test_a_norm_that_takes_dtensors_runs_its_own_forward(
    outcomes: list[dict[str, Any]], tell: Callable[[str, str, str], None]
) -> None:
    """REF linkedin/Liger-Kernel#826, #868, #982."""
    case = "tensor parallel, DTensor"
    for order in ORDERS:
        assert [each[case][order]["ran"]["rms_norm"] for each in outcomes] == [2 * (9 - 2)] * WORLD
    tell(case, "RMSNorm of a DTensor", "own forward at each call")
