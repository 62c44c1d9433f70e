"""Progress: download events drawn for people: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TransferSpeedColumn,
)

from kernelhub.reporter import Reporter

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


class DrawingReporter(Reporter):
    """Draws while it is used as a context, on a terminal only; elsewhere, and for warnings, it writes lines."""

    def __init__(self, *columns: ProgressColumn, console: Console | None = None, transient: bool = False) -> None:
        self._console = console or Console(stderr=True)
        self._progress = Progress(
            *columns, console=self._console, disable=not self._console.is_terminal, transient=transient
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def warn(self, message: str) -> None:
        self._line(f"warning: {message}")

    def _line(self, text: str) -> None:
        self._console.print(text, **_PLAIN)


class ProgressReporter(DrawingReporter):
    """Draws one bar a build; warnings are printed above the bars."""

    def __init__(self, console: Console | None = None) -> None:
        text = TextColumn("{task.description}")
        super().__init__(text, BarColumn(), DownloadColumn(), TransferSpeedColumn(), console=console)
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}

    def download_started(self, build: str, files: int, size: int) -> None:
        with self._lock:
            self._tasks[build] = self._progress.add_task(build, total=size)
        if not self._console.is_terminal:
            self._line(f"downloading {build}: {files} files, {size} bytes")

    def download_advanced(self, build: str, size: int) -> None:
        with self._lock:
            self._progress.advance(self._tasks[build], size)

    def download_finished(self, build: str) -> None:
        if not self._console.is_terminal:
            self._line(f"stored {build}")
