"""Steps: how far a long run is, for people: one bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn

from kernelhub.cli.progress import DrawingReporter

if TYPE_CHECKING:
    from rich.console import Console

_SILENCE = 10.0  # seconds between two lines


class StepReporter(DrawingReporter):
    """Draws one bar; warnings are printed above it."""

    def __init__(self, console: Console | None = None) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, transient=True)
        self._task: TaskID | None = None
        self._told = time.monotonic()

    def step(self, what: str, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, description=what, completed=done, total=total)
        late = time.monotonic() - self._told > _SILENCE
        if late and not self._console.is_terminal:
            self._told = time.monotonic()
            self._line(f"{what}, {done} of {total} done")
