"""Decision: what shall become of each layer, in each mode, before anything is changed.

What has one answer for all layers of a class (which kernel, whether it fits the class, what the report says) is decided
once; what depends on the module (its device, attributes, conditions) is asked for each.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from kernelhub.backend import Release
from kernelhub.errors import ContractMismatch, KernelHubError
from kernelhub.layers.binding import occupied
from kernelhub.layers.contract import (
    STANDARD_LOSS,
    class_mismatch,
    function_mismatch,
    instance_checks,
    is_loss,
    loss_mismatch,
    mode_mismatch,
)
from kernelhub.layers.report import Row
from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol
from kernelhub.mode import SERVED, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import nn

    from kernelhub.config import KernelChoice, LayerEntry
    from kernelhub.layers.discovery import Target

_PARALLEL = 8
LEFT_ALONE = "left alone by the config"
ANY_MODE = "any"
_NO_WEIGHTS = "on the meta device: it has no weights yet"
_TRAINING = SERVED.index(Mode.TRAINING), SERVED.index(Mode.TRAINING_COMPILE)


_new = tuple.__new__  # a Row from its cells in order, in a third of the time
NO_ERRORS: tuple[KernelHubError | None, ...] = (None,) * len(SERVED)


class Kernel(NamedTuple):
    """A symbol to bind, and how the layers spell attributes that it uses (pairs: its name, theirs)."""

    value: Any
    spelled: tuple[tuple[str, str], ...] = ()


NO_KERNELS: tuple[Kernel | None, ...] = (None,) * len(SERVED)


class Decision(NamedTuple):
    """What becomes of one layer: the rows of its report, and the kernel for each of ``SERVED`` (None: its own forward).

    ``errors`` is, for each of ``SERVED``, what a strict call raises if the entry binds nothing at all in that mode.
    """

    target: Target
    rows: tuple[Row, ...]
    kernels: tuple[Kernel | None, ...] = NO_KERNELS
    errors: tuple[KernelHubError | None, ...] = NO_ERRORS

    @property
    def accepted(self) -> bool:
        return self.rows[0].state in ("bound", "would bind")

    @property
    def is_loss(self) -> bool:
        """Is it the loss function of the model that is replaced, not a forward?"""
        if self.target.layer != STANDARD_LOSS:
            return False
        return any(kernel is not None and _is_loss(self.target, kernel.value) for kernel in self.kernels)

    def skip(self, reason: str) -> Decision:
        rows = (self.rows[0]._replace(state="skipped", reason=reason, note=""),)
        return Decision(self.target, rows)


class _Outcome(NamedTuple):
    """What one mode gets: a kernel, or the reason why none. ``shown`` is the reason as a part of a note."""

    choice: KernelChoice | None = None
    found: LoadedSymbol | PlannedSymbol | None = None
    reason: str = ""
    shown: str = ""
    error: KernelHubError | None = None

    @property
    def bindable(self) -> bool:
        return not self.reason


class _Place(NamedTuple):
    """Where a layer's kernels are looked up; ``wanted`` holds, for each of ``SERVED``, the choice or the outcome."""

    entry: LayerEntry
    backend: str
    wanted: tuple[KernelChoice | _Outcome, ...]


class _Blocked(NamedTuple):
    """A layer that cannot be bound whatever the kernel, and why."""

    place: _Place
    reason: str


class _Verdict(NamedTuple):
    """What holds for all layers of a class at one place.

    ``facts`` are the rows without their first cell, ``checks`` what is left to ask each module about a kernel.
    """

    outcomes: tuple[_Outcome, ...]
    facts: tuple[tuple[Any, ...], ...]
    kernels: tuple[Kernel | None, ...]
    checks: tuple[tuple[Kernel, Callable[[nn.Module], str | None]], ...]
    has_errors: bool


class Decider:
    """Decides for the layers of one model. ``obtain`` is asked once for each kernel and backend.

    ``mode`` pins one mode; with None each call of a layer finds its own, and ``current`` is only what a report of a
    skipped layer is about. ``forgiven`` is the class of errors that make a layer skipped; others leave ``decide`` as
    they are.
    """

    def __init__(
        self,
        model: nn.Module,
        mode: Mode | None,
        backend_of: Callable[[torch.device], str],
        obtain: Callable[[KernelChoice, str], LoadedSymbol | PlannedSymbol],
        forgiven: Callable[[KernelHubError], bool],
        *,
        current: Mode | None = None,
    ) -> None:
        self._mode = mode
        self._current = mode or current or Mode.of(training=model.training)
        self._backend_of = backend_of
        self._obtain = obtain
        self._forgiven = forgiven
        self._device = next(_devices(model), torch.device("cpu"))
        self._places: dict[str, dict[torch.device, _Place]] = defaultdict(dict)
        self._verdicts: dict[tuple[object, ...], _Verdict] = {}
        self._obtained: dict[tuple[KernelChoice, str], LoadedSymbol | PlannedSymbol | KernelHubError] = {}

    def decide(self, pairs: Sequence[tuple[LayerEntry, Target]]) -> list[Decision]:
        """What becomes of each layer, with the reason when it is skipped."""
        placed = [(entry, target, self._place(entry, target)) for entry, target in pairs]
        places = {id(place): place for _, _, place in placed if isinstance(place, _Place)}
        self._obtain_all(
            (wanted, place.backend)
            for place in places.values()
            for wanted in place.wanted
            if not isinstance(wanted, _Outcome)
        )
        return [self._decision(entry, target, place) for entry, target, place in placed]

    def _place(self, entry: LayerEntry, target: Target) -> _Place | _Blocked | str:
        """The place of a layer, or the reason or outcome why it has none."""
        if target.owner:
            return f"served by the entry {target.owner!r}"
        device = _device_of(target.module, self._device)
        if isinstance(device, str):
            return device
        places = self._places[entry.layer]
        place = places.get(device)
        if place is None:
            place = places[device] = self._new_place(entry, device)
        reason = target.misfit or occupied(target.module)
        return _Blocked(place, reason) if reason else place

    def _new_place(self, entry: LayerEntry, device: torch.device) -> _Place:
        backend = self._backend_of(device)
        capability = _capability(device) if entry.has_ranges else None
        wanted = tuple(_wanted(entry, backend, self._mode or mode, capability) for mode in SERVED)
        return _Place(entry, backend, wanted)

    def _obtain_all(self, wanted: Iterable[tuple[KernelChoice, str]]) -> None:
        """Obtain each kernel once, several at a time: each may cost requests."""
        distinct = list(dict.fromkeys(wanted))
        if len(distinct) == 1:
            self._obtained[distinct[0]] = self._attempt(distinct[0])
        elif distinct:
            with ThreadPoolExecutor(min(len(distinct), _PARALLEL), "kernelhub-obtain") as pool:
                self._obtained.update(zip(distinct, pool.map(self._attempt, distinct), strict=True))

    def _attempt(self, pair: tuple[KernelChoice, str]) -> LoadedSymbol | PlannedSymbol | KernelHubError:
        try:
            return self._obtain(*pair)
        except KernelHubError as error:
            if not self._forgiven(error):
                raise
            return error

    def _decision(self, entry: LayerEntry, target: Target, place: _Place | _Blocked | str) -> Decision:
        if isinstance(place, str):
            state = "postponed" if place is _NO_WEIGHTS else "skipped"
            row = Row(target.title, entry.layer, state=state, reason=place, mode=self._current.value)  # type: ignore[arg-type]
            return Decision(target, (row,))
        if isinstance(place, _Blocked):
            wanted = place.place.wanted
            return self._skipped(target, entry, [self._refused(target, each, place.reason) for each in wanted])
        verdict = self._verdict(target, place)
        module = target.module
        for kernel, check in verdict.checks:
            if reason := check(module):
                return self._with_refused(target, place, verdict, {kernel: reason})
        title = target.path or target.title
        rows = tuple([_new(Row, (title, *facts)) for facts in verdict.facts])
        errors = _errors(target, verdict.outcomes) if verdict.has_errors else NO_ERRORS
        return Decision(target, rows, verdict.kernels, errors)

    def _verdict(self, target: Target, place: _Place) -> _Verdict:
        key = (id(place), type(target.module), target.function)  # a place belongs to one entry
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._new_verdict(target, place)
        return verdict

    def _new_verdict(self, target: Target, place: _Place) -> _Verdict:
        outcomes = [
            wanted if isinstance(wanted, _Outcome) else self._outcome(target, wanted, place.backend, mode)
            for wanted, mode in zip(place.wanted, SERVED, strict=True)
        ]
        found = outcomes[_TRAINING[0]].found
        if isinstance(found, LoadedSymbol) and _is_loss(target, found.value):
            outcomes = [outcomes[_TRAINING[mode.compile]] for mode in SERVED]  # a loss is there for training
        facts = tuple(tuple(row[1:]) for row in self._rows(target, place.entry, outcomes))
        kernels = tuple(_kernel(outcome) for outcome in outcomes)
        kernels = NO_KERNELS if kernels == NO_KERNELS else kernels
        distinct = dict.fromkeys(kernel for kernel in kernels if kernel is not None)
        checks = tuple((kernel, check) for kernel in distinct for check in _instance_checks(target, kernel))
        has_errors = any(outcome.error is not None for outcome in outcomes)
        return _Verdict(tuple(outcomes), facts, kernels, checks, has_errors)

    def _outcome(self, target: Target, choice: KernelChoice, backend: str, mode: Mode) -> _Outcome:
        found = self._obtained[choice, backend]
        if isinstance(found, KernelHubError):
            return _Outcome(choice, None, str(found), type(found).__name__, found)
        if isinstance(found, PlannedSymbol):
            return _Outcome(choice, found)
        if reason := _class_misfit(target, Kernel(found.value, choice.attributes)):
            return self._refused(target, _Outcome(choice, found), reason)
        pinned = self._mode and mode_mismatch(found.value, self._mode)
        if reason := pinned or mode_mismatch(found.value, mode) or "":
            return _Outcome(choice, found, reason, reason)
        return _Outcome(choice, found)

    def _refused(self, target: Target, wanted: KernelChoice | _Outcome, reason: str) -> _Outcome:
        """The outcome when the layer is not one for this kernel; an outcome that has a reason already keeps it."""
        if isinstance(wanted, _Outcome) and not (wanted.bindable and wanted.choice is not None):
            return wanted
        choice, found = (wanted.choice, wanted.found) if isinstance(wanted, _Outcome) else (wanted, None)
        assert choice is not None
        kernel = str(choice) if found is None else f"{found.kernel}:{found.symbol}"
        error = ContractMismatch(target.title, type(target.module).__name__, kernel, reason)
        return _Outcome(choice, found, reason, reason, error)

    def _with_refused(self, target: Target, place: _Place, verdict: _Verdict, refused: dict[Kernel, str]) -> Decision:
        """The decision about a layer that one kernel of its class does not fit; others may."""
        for kernel, check in verdict.checks:
            if kernel not in refused and (reason := check(target.module)):
                refused[kernel] = reason
        outcomes = [
            self._refused(target, outcome, refused[kernel]) if kernel in refused else outcome
            for outcome, kernel in zip(verdict.outcomes, verdict.kernels, strict=True)
        ]
        if not any(outcome.bindable for outcome in outcomes):
            return self._skipped(target, place.entry, outcomes)
        rows = self._rows(target, place.entry, outcomes)
        return Decision(target, rows, tuple(map(_kernel, outcomes)), _errors(target, outcomes))

    def _skipped(self, target: Target, entry: LayerEntry, outcomes: Sequence[_Outcome]) -> Decision:
        return Decision(target, self._rows(target, entry, outcomes), errors=_errors(target, outcomes))

    def _rows(self, target: Target, entry: LayerEntry, outcomes: Sequence[_Outcome]) -> tuple[Row, ...]:
        modes: dict[int, list[int]] = defaultdict(list)
        for index, outcome in enumerate(outcomes):
            if outcome.bindable:
                modes[id(outcome.found)].append(index)
        if not modes:
            return (self._row(target, entry, self._telling(outcomes)),)
        note = _note(outcomes)
        rows = []
        for indices in modes.values():
            row = self._row(target, entry, outcomes[indices[0]])
            rows.append(row._replace(mode=self._served(indices), note=note))
            note = ""
        return tuple(rows)

    def _served(self, indices: Sequence[int]) -> str:
        if self._mode is not None:
            return self._mode.value
        return ANY_MODE if len(indices) == len(SERVED) else ", ".join(SERVED[index].value for index in indices)

    def _telling(self, outcomes: Sequence[_Outcome]) -> _Outcome:
        """Of outcomes without a kernel the one to report: that of the current mode, unless only another is an error."""
        current = outcomes[SERVED.index(self._current)] if self._current in SERVED else outcomes[0]
        ordered = (current, *outcomes)
        return next((outcome for outcome in ordered if outcome.error is not None), current)

    def _row(self, target: Target, entry: LayerEntry, outcome: _Outcome) -> Row:
        kernel, variant, symbol = str(outcome.choice or ""), "", ""
        if outcome.choice is not None:
            symbol = outcome.choice.request.symbol or ""
        state = "skipped"
        if outcome.found is not None:
            kernel, variant, symbol = outcome.found.kernel, outcome.found.variant, outcome.found.symbol
            state = "would bind" if isinstance(outcome.found, PlannedSymbol) else "bound"
        if outcome.reason:
            state = "skipped"
        row = Row(target.title, entry.layer, kernel, variant, symbol, reason=outcome.reason, mode=self._current.value)
        return row._replace(state=state)  # type: ignore[arg-type]  # one of the three above


def settle(decisions: Sequence[Decision]) -> list[Decision]:
    """Skip functions inside a forward that is replaced as a whole: only one of the two can take effect."""
    if not any(each.target.function for each in decisions):
        return list(decisions)
    whole = {
        id(each.target.module): each.rows[0].layer
        for each in decisions
        if each.accepted and not each.target.function and not each.is_loss
    }
    return [
        decision.skip(f"its whole forward is replaced by the entry {whole[id(decision.target.module)]!r}")
        if decision.target.function and decision.accepted and id(decision.target.module) in whole
        else decision
        for decision in decisions
    ]


def original_of(target: Target) -> Any:
    """The function that a function target replaces."""
    return inspect.unwrap(type(target.module).forward).__globals__[target.function]


def _wanted(entry: LayerEntry, backend: str, mode: Mode, capability: Release | None) -> KernelChoice | _Outcome:
    for choice in entry.find(backend, mode, capability):
        return _Outcome(reason=LEFT_ALONE, shown=LEFT_ALONE) if choice is None else choice
    shown = "the config has no kernel for it"
    if entry.devices_for(backend, capability):
        return _Outcome(reason=f"the config has no kernel for {backend} in {mode.value} mode", shown=shown)
    device = f"{backend} {capability}" if capability is not None else backend
    return _Outcome(reason=f"the config has no kernel for {device}", shown=shown)


def _kernel(outcome: _Outcome) -> Kernel | None:
    if not outcome.bindable or outcome.choice is None or not isinstance(outcome.found, LoadedSymbol):
        return None
    return Kernel(outcome.found.value, outcome.choice.attributes)


def _errors(target: Target, outcomes: Sequence[_Outcome]) -> tuple[KernelHubError | None, ...]:
    return tuple([_named(outcome.error, target) for outcome in outcomes])


def _named(error: KernelHubError | None, target: Target) -> KernelHubError | None:
    """A verdict's misfit is about the first layer that was met; the error names the layer at hand."""
    if isinstance(error, ContractMismatch) and error.module_path != target.title:
        return ContractMismatch(target.title, error.layer, error.kernel, error.reason)
    return error


def _note(outcomes: Sequence[_Outcome]) -> str:
    """When the layer's own forward runs beside the kernels, and why."""
    modes: dict[str, list[str]] = {}
    for outcome, mode in zip(outcomes, SERVED, strict=True):
        if outcome.reason:
            modes.setdefault(outcome.shown, []).append(mode.value)
    return "; ".join(f"own forward in {', '.join(names)}: {reason}" for reason, names in modes.items())


def _is_loss(target: Target, value: Any) -> bool:
    return target.layer == STANDARD_LOSS and not target.function and is_loss(value)


def _class_misfit(target: Target, kernel: Kernel) -> str | None:
    if target.function:
        return function_mismatch(kernel.value, original_of(target))
    if _is_loss(target, kernel.value):
        return None
    return class_mismatch(kernel.value, target.module, dict(kernel.spelled))


def _instance_checks(target: Target, kernel: Kernel) -> tuple[Callable[[nn.Module], str | None], ...]:
    if target.function:
        return ()
    if _is_loss(target, kernel.value):
        return (partial(loss_mismatch, kernel.value),)
    return instance_checks(kernel.value, type(target.module), dict(kernel.spelled))


def _capability(device: torch.device) -> Release | None:
    if device.type != "cuda":
        return None
    return Release(*torch.cuda.get_device_capability(device))


def _device_of(module: nn.Module, fallback: torch.device) -> torch.device | str:
    """The device of a module, or the reason why it has none to choose a kernel for."""
    if not module._modules:
        quick = _device_of_leaf(module)
        if quick is not None:
            return _NO_WEIGHTS if quick.type == "meta" else quick
    devices = {device.type: device for device in _devices(module)} or {fallback.type: fallback}
    if "meta" in devices:
        return _NO_WEIGHTS
    if len(devices) > 1:
        return f"its parameters are on several kinds of device ({', '.join(devices)})"
    return next(iter(devices.values()))


def _device_of_leaf(module: nn.Module) -> torch.device | None:
    """The device of a layer without layers inside whose parameters share one; None where it takes a closer look."""
    found = None
    for parameter in module._parameters.values():
        if parameter is None:
            continue
        device = parameter.device
        if found is not None and found.type != device.type:
            return None
        found = found or device
    return found


def _devices(module: nn.Module) -> Iterator[torch.device]:
    parameters = (parameter.device for parameter in module.parameters())
    first = next(parameters, None)
    if first is None:
        yield from (buffer.device for buffer in module.buffers())
    else:
        yield first
        yield from parameters
