"""Report: what became of each layer that a config means, and why."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, overload

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

State = Literal["bound", "would bind", "postponed", "skipped"]

_STATES: tuple[State, ...] = ("bound", "would bind", "postponed", "skipped")
_HEADINGS = ("STATE", "MODULE", "LAYER", "MODE", "KERNEL", "VARIANT OR REASON")
_INDEX = re.compile(r"(?<![^.])[0-9]+(?![^.])")  # a whole path segment of digits
_LONGEST_TEXT = 300


class Row(NamedTuple):
    """What became of one module; a module with one kernel for training and another for inference has two rows.

    ``layer`` is the key of the config entry, ``kernel`` is ``org/repo@commit`` (as written in the config when it was
    not resolved), ``reason`` says why a layer was skipped or postponed. ``mode`` tells when the kernel runs: values of
    ``Mode``, or ``any``; ``note`` tells when and why the layer's own forward runs instead. ``module`` is the path in
    the model, ``(model)`` for the model itself, and empty when the entry means nothing in it.
    """

    module: str
    layer: str
    kernel: str = ""
    variant: str = ""
    symbol: str = ""
    state: State = "skipped"
    reason: str = ""
    mode: str = ""
    note: str = ""


class Report(Sequence[Row]):
    """The rows of one model, in the order of its config; ``str(report)`` is a table for people."""

    __slots__ = ("_rows",)

    def __init__(self, rows: tuple[Row, ...] | Callable[[], tuple[Row, ...]] = ()) -> None:
        self._rows = rows

    @property
    def rows(self) -> tuple[Row, ...]:
        if not isinstance(self._rows, tuple):
            self._rows = self._rows()  # written when first read: a big model has thousands
        return self._rows

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Report) and self.rows == other.rows

    def __hash__(self) -> int:
        return hash(self.rows)

    def __repr__(self) -> str:
        return f"Report(rows={self.rows!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return Report, (self.rows,)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self.rows[index]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def bound(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.state == "bound")

    @property
    def skipped(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.state == "skipped")

    @property
    def postponed(self) -> tuple[Row, ...]:
        """Layers without weights yet: another ``kernelize`` binds them once they have some."""
        return tuple(row for row in self.rows if row.state == "postponed")

    @property
    def counts(self) -> dict[State, int]:
        """Rows by state; states without rows count 0."""
        counter = Counter(row.state for row in self.rows)
        return {state: counter[state] for state in _STATES}

    @property
    def summary(self) -> str:
        """The counts in words: ``9 bound, 2 skipped``."""
        parts = [f"{number} {state}" for state, number in self.counts.items() if number]
        return ", ".join(parts) or "nothing to bind"

    def to_dict(self) -> dict[str, Any]:
        return {"counts": self.counts, "rows": [row._asdict() for row in self.rows]}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        lines = table([_HEADINGS, *map(_cells, _grouped(self.rows))]) if self.rows else []
        return "\n".join([*lines, self.summary])


def _grouped(rows: Iterable[Row]) -> list[Row]:
    """Rows that differ only in layer numbers become one: ``model.layers.*.mlp (28)``."""
    groups: dict[Row, list[Row]] = {}
    for row in rows:
        groups.setdefault(row._replace(module=_INDEX.sub("*", row.module)), []).append(row)
    return [
        members[0] if len(members) == 1 else group._replace(module=f"{group.module} ({len(members)})")
        for group, members in groups.items()
    ]


def _cells(row: Row) -> tuple[str, ...]:
    kernel = f"{row.kernel}:{row.symbol}" if row.symbol and row.kernel else row.kernel
    told = row.reason or "; ".join(filter(None, (row.variant, row.note)))
    cells = (row.state, row.module, row.layer, row.mode, kernel, told)
    return tuple(one_line(cell) or "-" for cell in cells)


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def one_line(text: str) -> str:
    """Text from a kernel's author as one line without control characters, cut to a length a table can hold."""
    line = " ".join(text.split())
    printable = "".join(char if char.isprintable() else ascii(char)[1:-1] for char in line)
    return printable if len(printable) <= _LONGEST_TEXT else f"{printable[:_LONGEST_TEXT]}..."
