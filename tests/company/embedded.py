"""Models with the embedded collection bound, and how far their numbers may be from those of plain ones."""

from __future__ import annotations

from typing import Any

import torch
from layers.tiny_model import IDS, tiny
from torch import nn

import kernelhub
from kernelhub.config import KernelConfig

CONFIG = KernelConfig.from_liger(source="builtin")
LABELS = IDS.masked_fill(IDS % 7 == 0, -100)


def kernelized(model: Any = None, config: KernelConfig = CONFIG, **options: Any) -> Any:
    return kernelhub.kernelize(tiny() if model is None else model, config, **options)


def step(model: nn.Module, **inputs: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one batch and the gradients of the weights that have one."""
    model.zero_grad()
    inputs = {"input_ids": IDS, "labels": LABELS, **inputs}
    loss = model(**inputs).loss
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    return loss.detach(), gradients


def assert_same_step(found: Any, expected: Any, **tolerances: float) -> None:
    """Compare what two calls of ``step`` returned, whatever wrappers put before the names of weights."""
    tolerances = tolerances or {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(found[0], expected[0], **tolerances)
    assert len(found[1]) == len(expected[1]) > 0
    for (name, ours), (other, theirs) in zip(found[1].items(), expected[1].items(), strict=True):
        assert name.endswith(other) or other.endswith(name)
        torch.testing.assert_close(ours, theirs, **tolerances)


def bound_symbols(model: nn.Module) -> set[str]:
    return {row.symbol for row in kernelhub.report(model).bound}
