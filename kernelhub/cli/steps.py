"""Steps: how far a long run is, for people: one bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from kernelhub.reporter import Reporter

if TYPE_CHECKING:
    from types import TracebackType

_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
_SILENCE = 10.0  # seconds between two lines


class StepReporter(Reporter):
    """Draws one bar while it is used as a context; warnings are printed above it."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._task: TaskID | None = None
        self._told = time.monotonic()
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal, transient=True
        )

    def __enter__(self) -> StepReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def warn(self, message: str) -> None:
        self._console.print(f"warning: {message}", **_PLAIN)

    def step(self, what: str, done: int, total: int) -> None:
        if self._task is None:
            self._task = self._progress.add_task(what, total=total)
        self._progress.update(self._task, description=what, completed=done, total=total)
        late = time.monotonic() - self._told > _SILENCE
        if late and not self._console.is_terminal:
            self._told = time.monotonic()
            self._console.print(f"{what}, {done} of {total} done", **_PLAIN)
