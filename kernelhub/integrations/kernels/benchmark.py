"""Benchmark: the base class of the benchmarks that some kernel repositories carry."""

from __future__ import annotations

from typing import Any


class Benchmark:
    """What a benchmark of a kernel inherits. A runner sets ``device`` and ``kernel``; kernelhub has no such runner."""

    seed: int | None = None
    device: str = "cpu"

    def __init__(self) -> None:
        self.kernel: Any = None
        self.out: Any = None

    def setup(self) -> None:
        """Prepares the inputs, as attributes; does nothing unless it is overridden."""
