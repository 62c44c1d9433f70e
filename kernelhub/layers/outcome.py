"""Outcome: what each mode of a layer gets, a kernel or the reason why none, and how a report tells it."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, NamedTuple

from kernelhub.layers.report import Row
from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol
from kernelhub.mode import SERVED, Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kernelhub.backend import Release
    from kernelhub.config import KernelChoice, LayerEntry
    from kernelhub.errors import KernelHubError

LEFT_ALONE = "left alone by the config"
ANY_MODE = "any"


class Kernel(NamedTuple):
    """A symbol to bind, and how the layers spell attributes that it uses (pairs: its name, theirs)."""

    value: Any
    spelled: tuple[tuple[str, str], ...] = ()


NO_KERNELS: tuple[Kernel | None, ...] = (None,) * len(SERVED)
NO_ERRORS: tuple[KernelHubError | None, ...] = (None,) * len(SERVED)


class Outcome(NamedTuple):
    """What one mode gets: a kernel, or the reason why none. ``shown`` is the reason as a part of a note."""

    choice: KernelChoice | None = None
    found: LoadedSymbol | PlannedSymbol | None = None
    reason: str = ""
    shown: str = ""
    error: KernelHubError | None = None

    @property
    def bindable(self) -> bool:
        return not self.reason

    @property
    def kernel(self) -> Kernel | None:
        """The kernel to bind; None as well where it is only planned."""
        if not self.bindable or self.choice is None or not isinstance(self.found, LoadedSymbol):
            return None
        return Kernel(self.found.value, self.choice.attributes)


def wanted(entry: LayerEntry, backend: str, mode: Mode, capability: Release | None) -> KernelChoice | Outcome:
    """The kernel that an entry has for a mode of layers on a device, or the outcome that it has none."""
    for choice in entry.find(backend, mode, capability):
        return Outcome(reason=LEFT_ALONE, shown=LEFT_ALONE) if choice is None else choice
    shown = "the config has no kernel for it"
    if entry.devices_for(backend, capability):
        return Outcome(reason=f"the config has no kernel for {backend} in {mode.value} mode", shown=shown)
    device = f"{backend} {capability}" if capability is not None else backend
    return Outcome(reason=f"the config has no kernel for {device}", shown=shown)


def kernels_of(outcomes: Sequence[Outcome]) -> tuple[Kernel | None, ...]:
    """The kernels to bind; the very ``NO_KERNELS`` where there are none."""
    kernels = tuple([outcome.kernel for outcome in outcomes])
    return NO_KERNELS if kernels == NO_KERNELS else kernels


class Teller:
    """Writes the rows of a report, all but the module's name.

    ``mode`` is the one that is pinned; ``current`` the one that a layer without a kernel is told about.
    """

    def __init__(self, mode: Mode | None, current: Mode) -> None:
        self._mode = mode
        self._current = current

    def facts(self, layer: str, outcomes: Sequence[Outcome]) -> tuple[Row, ...]:
        """A row for each kernel, or one with the reason."""
        modes: dict[int, list[int]] = defaultdict(list)
        for index, outcome in enumerate(outcomes):
            if outcome.bindable:
                modes[id(outcome.found)].append(index)
        if not modes:
            return (self._row(layer, self._telling(outcomes)),)
        note = _note(outcomes)
        rows = []
        for indices in modes.values():
            row = self._row(layer, outcomes[indices[0]])
            rows.append(row._replace(mode=self._served(indices), note=note))
            note = ""
        return tuple(rows)

    def said(self, layer: str, reason: str, *, postponed: bool) -> tuple[Row, ...]:
        """The row of a layer for which no kernel was looked up."""
        state = "postponed" if postponed else "skipped"
        return (Row("", layer, state=state, reason=reason, mode=self._current.value),)  # type: ignore[arg-type]  # one of two states

    def _served(self, indices: Sequence[int]) -> str:
        if self._mode is not None:
            return self._mode.value
        return ANY_MODE if len(indices) == len(SERVED) else ", ".join(SERVED[index].value for index in indices)

    def _telling(self, outcomes: Sequence[Outcome]) -> Outcome:
        """Of outcomes without a kernel the one to report: that of the current mode, unless only another is an error."""
        current = outcomes[SERVED.index(self._current)] if self._current in SERVED else outcomes[0]
        ordered = (current, *outcomes)
        return next((outcome for outcome in ordered if outcome.error is not None), current)

    def _row(self, layer: str, outcome: Outcome) -> Row:
        kernel, variant, symbol = str(outcome.choice or ""), "", ""
        if outcome.choice is not None:
            symbol = outcome.choice.request.symbol or ""
        state = "skipped"
        if outcome.found is not None:
            kernel, variant, symbol = outcome.found.kernel, outcome.found.variant, outcome.found.symbol
            state = "would bind" if isinstance(outcome.found, PlannedSymbol) else "bound"
        if outcome.reason:
            state = "skipped"
        row = Row("", layer, kernel, variant, symbol, reason=outcome.reason, mode=self._current.value)
        return row._replace(state=state)  # type: ignore[arg-type]  # one of the three above


def _note(outcomes: Sequence[Outcome]) -> str:
    """When the layer's own forward runs beside the kernels, and why."""
    modes: dict[str, list[str]] = {}
    for outcome, mode in zip(outcomes, SERVED, strict=True):
        if outcome.reason:
            modes.setdefault(outcome.shown, []).append(mode.value)
    return "; ".join(f"own forward in {', '.join(names)}: {reason}" for reason, names in modes.items())
