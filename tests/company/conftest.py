"""What the tests of kernels in company share."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from company.table import LINES, Line

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.fixture
def tell() -> Callable[[str, str, str], None]:
    """Adds a line to the table; called when everything before it in a test has held."""

    def add(company: str, what: str, outcome: str) -> None:
        LINES.append(Line(company, what, outcome))

    return add
