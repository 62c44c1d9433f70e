"""Outcome: what a check found about every kernel of a config, for people, scripts and ``kernelize``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

from kernelhub.layers.report import Report, one_line, table

if TYPE_CHECKING:
    from kernelhub.checking.tolerance import Deviation

Verdict = Literal["right", "wrong", "unknown"]

_VERDICTS: tuple[Verdict, ...] = ("right", "wrong", "unknown")
_HEADINGS = ("VERDICT", "MODULE", "KERNEL", "MODE", "INPUT", "ERROR", "ALLOWED", "OWN", "WORST AT, OR PROBLEM")


class CheckRow(NamedTuple):
    """One kernel on one kind of call; ``modules`` layers are called like this, ``module`` is the first of them.

    ``error``, ``allowed`` and ``own`` are distances from the wide reference at the place ``where`` that came closest
    to failing: of the kernel, what it may be, and of the plain layer.
    """

    module: str
    layer: str
    kernel: str
    mode: str
    input: str
    verdict: Verdict
    problem: str = ""
    where: str = ""
    error: float = 0.0
    allowed: float = 0.0
    own: float = 0.0
    modules: int = 1
    seconds: float = 0.0

    def with_worst(self, worst: Deviation | None) -> CheckRow:
        if worst is None:
            return self
        where = f"{worst.name}, {worst.probe}"
        return self._replace(where=where, error=worst.kernel, allowed=worst.allowed, own=worst.plain)


@dataclass(frozen=True)
class CheckReport(Sequence[CheckRow]):
    """The rows in the order in which the model met them; ``str(report)`` is a table.

    ``left`` holds the layers for which there was no kernel to check, with the reason.
    """

    rows: tuple[CheckRow, ...] = ()
    seconds: float = 0.0
    left: Report = field(default_factory=Report)

    @overload
    def __getitem__(self, index: int) -> CheckRow: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[CheckRow]: ...
    def __getitem__(self, index: int | slice) -> CheckRow | Sequence[CheckRow]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def ok(self) -> bool:
        """Is every kernel right? False too where nothing could be told, or nothing was there to check."""
        return bool(self.rows) and all(row.verdict == "right" for row in self.rows)

    @property
    def wrong(self) -> tuple[CheckRow, ...]:
        return tuple(row for row in self.rows if row.verdict == "wrong")

    @property
    def summary(self) -> str:
        counts = Counter(row.verdict for row in self.rows)
        told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in _VERDICTS if counts[verdict])
        return f"{told or 'nothing to check'}; checked in {self.seconds:.1f} s"

    def to_dict(self) -> dict[str, Any]:
        rows, left = ([row._asdict() for row in each] for each in (self.rows, self.left.rows))
        return {"ok": self.ok, "seconds": self.seconds, "rows": rows, "left": left}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = table([_HEADINGS, *map(_cells, self.rows)]) if self.rows else []
        left = [f"\nleft alone:\n{self.left}"] if self.left else []
        return "\n".join([*lines, self.summary, *left])


def _cells(row: CheckRow) -> tuple[str, ...]:
    module = row.module if row.modules == 1 else f"{row.module} (+{row.modules - 1})"
    numbers = [f"{number:.2g}" if row.where else "-" for number in (row.error, row.allowed, row.own)]
    told = one_line(row.problem or row.where) or "-"
    return (row.verdict, module, row.kernel, row.mode, row.input, *numbers, told)
