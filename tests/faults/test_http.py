"""A sample of the HTTP faults, the same each time; `http_matrix.py` runs all of them."""

from __future__ import annotations

import logging
import random
from typing import TYPE_CHECKING

import http_matrix
import pytest
from conftest import settle

if TYPE_CHECKING:
    from collections.abc import Iterator

SEED = 7
SAMPLE = 40


@pytest.fixture(scope="module")
def laboratory() -> Iterator[http_matrix.Laboratory]:
    from huggingface_hub import close_session

    with http_matrix.Laboratory.opened() as opened:
        yield opened
        settle()
    close_session()


def test_there_are_125_of_them() -> None:
    assert len(http_matrix.FAULTS) == 25
    assert len({str(case) for case in http_matrix.CASES}) == 125


@pytest.mark.parametrize("case", http_matrix.sample(SEED, SAMPLE), ids=str)
def test_a_fault_has_its_exact_outcome(
    case: http_matrix.Case, laboratory: http_matrix.Laboratory, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG):
        result = laboratory.run(case, random.Random(f"{SEED} {case}"))
    assert result.problem is None
    assert http_matrix.TOKEN not in caplog.text  # S-21
