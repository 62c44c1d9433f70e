"""Progress: download events drawn for people: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

from kernelhub.reporter import Reporter

if TYPE_CHECKING:
    from types import TracebackType


_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


class ProgressReporter(Reporter):
    """Draws one bar a build while it is used as a context; warnings are printed above the bars."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )

    def __enter__(self) -> ProgressReporter:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def warn(self, message: str) -> None:
        self._console.print(f"warning: {message}", **_PLAIN)

    def download_started(self, build: str, files: int, size: int) -> None:
        with self._lock:
            self._tasks[build] = self._progress.add_task(build, total=size)
        if not self._console.is_terminal:
            self._console.print(f"downloading {build}: {files} files, {size} bytes", **_PLAIN)

    def download_advanced(self, build: str, size: int) -> None:
        with self._lock:
            self._progress.advance(self._tasks[build], size)

    def download_finished(self, build: str) -> None:
        if not self._console.is_terminal:
            self._console.print(f"stored {build}", **_PLAIN)
