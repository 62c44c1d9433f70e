"""Tuning: what was measured for every layer, and which candidate won; for people, scripts and the store."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

from kernelhub.layers.report import one_line, table

_HEADINGS = ("CHOSEN", "MODULE", "MODE", "INPUT", "KERNEL", "PLAIN us", "KERNEL us", "RATIO", "MEMORY", "WHY")
_KIB = 1024


class Trial(NamedTuple):
    """One candidate beside the plain layer: seconds of a call (median), bytes at the peak beyond inputs and weights.

    ``state`` is ``faster`` (clearly), ``same``, ``slower``, ``wrong`` (the check failed) or ``unknown`` (not checked);
    ``ratio`` is the median of the ratios of kernel and plain layer inside the rounds of the measurement.
    """

    kernel: str
    state: str
    plain_seconds: float = 0.0
    seconds: float = 0.0
    ratio: float = 0.0
    plain_bytes: int = 0
    bytes: int = 0
    problem: str = ""


class TuneRow(NamedTuple):
    """One candidate for the layers (``modules`` of them) that are called alike; ``reused``: known from the store."""

    module: str
    layer: str
    mode: str
    input: str
    trial: Trial
    chosen: bool
    modules: int
    reused: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "trial": self.trial._asdict()}


@dataclass(frozen=True)
class Tuning(Sequence[TuneRow]):
    """The rows in the order in which the model met the layers; ``str(tuning)`` is a table."""

    rows: tuple[TuneRow, ...] = ()
    seconds: float = 0.0

    @overload
    def __getitem__(self, index: int) -> TuneRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TuneRow]: ...
    def __getitem__(self, index: int | slice) -> TuneRow | Sequence[TuneRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def chosen(self) -> tuple[TuneRow, ...]:
        return tuple(row for row in self.rows if row.chosen)

    @property
    def summary(self) -> str:
        measured = sum(not row.reused for row in self.rows)
        told = f"{len(self.chosen)} of {len(self.rows)} candidates chosen, {measured} measured"
        return f"{told}; {self.seconds:.1f} s"

    def to_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds, "rows": [row.to_dict() for row in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = table([_HEADINGS, *map(_cells, self.rows)]) if self.rows else []
        return "\n".join([*lines, self.summary])


def _cells(row: TuneRow) -> tuple[str, ...]:
    trial = row.trial
    module = row.module if row.modules == 1 else f"{row.module} (+{row.modules - 1})"
    times = [f"{seconds * 1e6:.1f}" if seconds else "-" for seconds in (trial.plain_seconds, trial.seconds)]
    ratio = f"{trial.ratio:.2f}" if trial.ratio else "-"
    memory = f"{trial.plain_bytes / _KIB:.0f} -> {trial.bytes / _KIB:.0f} KiB" if trial.plain_bytes else "-"
    why = one_line(trial.problem) or trial.state
    return ("yes" if row.chosen else "no", module, row.mode, row.input, trial.kernel, *times, ratio, memory, why)
