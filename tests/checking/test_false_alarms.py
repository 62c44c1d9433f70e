"""The kernels that are shipped pass the check, whatever the model: no false alarm.

``FALSE_ALARM_RUNS=200 pytest tests/checking/test_false_alarms.py`` checks every layer of 200 models; without it, one
layer of a few.
"""

from __future__ import annotations

import os

import pytest

import kernelhub
from checking.seeded_model import KERNELS, seeded

RUNS = int(os.environ.get("FALSE_ALARM_RUNS", "0"))


@pytest.mark.parametrize("seed", range(RUNS or 20))
def test_the_shipped_kernels_raise_no_alarm(seed: int) -> None:
    model, inputs, layers = seeded(seed)
    chosen = layers if RUNS else (layers[seed // 5 % len(layers)],)
    report = kernelhub.check(model, {layer: KERNELS[layer] for layer in chosen}, inputs)
    assert report.ok, f"seed {seed}\n{report}"
