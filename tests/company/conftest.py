"""The table of what kernels do in company, printed at the end of a run: ``pytest tests/company``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable


class Line(NamedTuple):
    company: str
    what: str
    outcome: str


LINES: list[Line] = []


@pytest.fixture
def tell() -> Callable[[str, str, str], None]:
    """Adds a line to the table; called when everything before it in a test has held."""

    def add(company: str, what: str, outcome: str) -> None:
        LINES.append(Line(company, what, outcome))

    return add


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if LINES:
        terminalreporter.section("kernels in company")
        widths = [max(map(len, column)) for column in zip(*LINES, strict=True)]
        for line in LINES:
            cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
            terminalreporter.write_line("  ".join(cells).rstrip())
