"""The table of what kernels do in company, printed at the end of a run: ``pytest tests/company``."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pytest


class Line(NamedTuple):
    company: str
    what: str
    outcome: str


LINES: list[Line] = []


def show(reporter: pytest.TerminalReporter) -> None:
    reporter.section("kernels in company")
    widths = [max(map(len, column)) for column in zip(*LINES, strict=True)]
    for line in LINES:
        cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        reporter.write_line("  ".join(cells).rstrip())
