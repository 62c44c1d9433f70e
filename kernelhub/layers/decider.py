"""Decider: decides what becomes of each layer of a model.

What has one answer for all layers of a class (which kernel, whether it fits the class, what the report says) is decided
once; what depends on the module (its device, attributes, conditions, layout) is asked for each.
"""

from __future__ import annotations

from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

from kernelhub.errors import ContractMismatch, KernelHubError
from kernelhub.layers.binding import FORWARD, HOOK, occupied
from kernelhub.layers.contract import mode_mismatch
from kernelhub.layers.conversion import NotConvertible
from kernelhub.layers.decision import Decision
from kernelhub.layers.device import NO_WEIGHTS, capability_of, device_of, device_of_leaf, first_device
from kernelhub.layers.fitting import class_misfit, has_layout, is_loss_of, layout_for, module_checks, remark_on
from kernelhub.layers.outcome import NO_ERRORS, Kernel, Outcome, Teller, kernels_of, wanted
from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol
from kernelhub.mode import SERVED, Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    import torch
    from torch import nn

    from kernelhub.config import KernelChoice, LayerEntry
    from kernelhub.layers.conversion import Conversion
    from kernelhub.layers.discovery import Target
    from kernelhub.layers.layout import Layout
    from kernelhub.layers.report import Row

    Found = LoadedSymbol | PlannedSymbol | KernelHubError
    Check = Callable[[nn.Module], str | None]

_PARALLEL = 8
_TRAINING = SERVED.index(Mode.TRAINING), SERVED.index(Mode.TRAINING_COMPILE)
_new = tuple.__new__  # a Decision from its fields in order, in half of the time


class _Place(NamedTuple):
    """Where a layer's kernels are looked up; ``wanted`` holds, for each of ``SERVED``, the choice or the outcome.

    ``verdicts`` are those about layers here: by class, with the function to replace or the classes of a fusion.
    """

    entry: LayerEntry
    backend: str
    wanted: tuple[KernelChoice | Outcome, ...]
    verdicts: dict[object, _Verdict]


class _Blocked(NamedTuple):
    """A layer that cannot be bound whatever the kernel, and why."""

    place: _Place
    reason: str


class _Verdict(NamedTuple):
    """What holds for all layers of a class at one place.

    ``checks`` are what is left to ask each module, ``check`` all of them. ``is_plain``: there is nothing else to do.
    """

    outcomes: tuple[Outcome, ...]
    facts: tuple[Row, ...]
    kernels: tuple[Kernel | None, ...]
    checks: tuple[tuple[Kernel, Check], ...]
    check: Check
    has_errors: bool
    has_layouts: bool
    is_plain: bool

    @property
    def distinct(self) -> tuple[Kernel, ...]:
        return tuple(dict.fromkeys(kernel for kernel in self.kernels if kernel is not None))


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
        self._teller = Teller(mode, mode or current or Mode.of(training=model.training))
        self._backend_of = backend_of
        self._obtain = obtain
        self._forgiven = forgiven
        self._config = getattr(model, "config", None)
        self._device = first_device(model)
        self._places: dict[str, dict[torch.device | None, _Place]] = defaultdict(dict)
        self._obtained: dict[tuple[KernelChoice, str], Found] = {}
        self._conversions: dict[type[nn.Module], Conversion] = {}

    def decide(self, pairs: Sequence[tuple[LayerEntry, Target]]) -> list[Decision]:
        """What becomes of each layer, with the reason when it is skipped."""
        places = [self._place(entry, target) for entry, target in pairs]
        distinct = {id(place): place for place in places if type(place) is _Place}
        self._obtain_all(
            (each, place.backend)
            for place in distinct.values()
            for each in place.wanted
            if not isinstance(each, Outcome)
        )
        decisions = []
        for (entry, target), place in zip(pairs, places, strict=True):
            # Most layers are like one before: this is `_decision` for those, of which there may be thousands.
            verdict = None if type(place) is not _Place or target.function else place.verdicts.get(type(target.module))
            if verdict is None or not verdict.is_plain or verdict.check(target.module):
                decisions.append(self._decision(entry, target, place))
            else:
                decisions.append(_new(Decision, (target, verdict.facts, verdict.kernels, NO_ERRORS, ())))
        return decisions

    def _place(self, entry: LayerEntry, target: Target) -> _Place | _Blocked | str:
        """The place of a layer, or the reason or outcome why it has none."""
        if target.owner:
            return f"served by the entry {target.owner!r}"
        module, siblings = target.module, target.siblings
        places = self._places[entry.layer]
        device = device_of_leaf(module) if siblings is None else None
        place = places.get(device)  # a device that is met for the first time is looked at more closely
        if place is None:
            found = device_of(target.modules, self._device)
            if isinstance(found, str):
                return found
            place = places.get(found)
            if place is None:
                place = places[found] = self._new_place(entry, found)
        state = module.__dict__
        reason = target.misfit or (occupied(module) if FORWARD in state or HOOK in state else None)
        if siblings is not None and not reason:
            reason = next(filter(None, map(occupied, siblings.modules)), None)
        return _Blocked(place, reason) if reason else place

    def _new_place(self, entry: LayerEntry, device: torch.device) -> _Place:
        backend = self._backend_of(device)
        capability = capability_of(device) if entry.has_ranges else None
        found = tuple(wanted(entry, backend, self._mode or mode, capability) for mode in SERVED)
        return _Place(entry, backend, found, {})

    def _obtain_all(self, pairs: Iterable[tuple[KernelChoice, str]]) -> None:
        """Obtain each kernel once, several at a time: each may cost requests."""
        distinct = list(dict.fromkeys(pairs))
        if len(distinct) == 1:
            self._obtained[distinct[0]] = self._attempt(distinct[0])
        elif distinct:
            with ThreadPoolExecutor(min(len(distinct), _PARALLEL), "kernelhub-obtain") as pool:
                self._obtained.update(zip(distinct, pool.map(self._attempt, distinct), strict=True))

    def _attempt(self, pair: tuple[KernelChoice, str]) -> Found:
        try:
            return self._obtain(*pair)
        except KernelHubError as error:
            if not self._forgiven(error):
                raise
            return error

    def _decision(self, entry: LayerEntry, target: Target, place: _Place | _Blocked | str) -> Decision:
        if isinstance(place, str):
            return Decision(target, self._teller.said(entry.layer, place, postponed=place is NO_WEIGHTS))
        if isinstance(place, _Blocked):
            return self._skipped(target, [self._refused(target, each, place.reason) for each in place.place.wanted])
        verdict = self._verdict(target, place)
        if verdict.has_layouts:
            return self._laid_out(target, verdict)
        module = target.module
        for kernel, check in verdict.checks:
            if reason := check(module):
                return self._with_refused(target, verdict, self._also_refused(target, verdict, {kernel: reason}))
        errors = _errors(target, verdict.outcomes) if verdict.has_errors else NO_ERRORS
        return Decision(target, verdict.facts, verdict.kernels, errors)

    def _laid_out(self, target: Target, verdict: _Verdict) -> Decision:
        """The decision about layers that kernels with parameters of their own replace."""
        layouts: dict[Kernel, Layout] = {}
        refused: dict[Kernel, str] = {}
        for kernel in verdict.distinct:
            try:
                layout = layout_for(target, kernel, self._conversions, self._config)
            except NotConvertible as error:
                refused[kernel] = str(error)
                continue
            subject = target.module if layout is None else layout.module
            checks = module_checks(target, kernel, type(subject))
            if reason := next((reason for check in checks if (reason := check(subject))), None):
                refused[kernel] = reason
            elif layout is not None:
                layouts[kernel] = layout
        decision = self._with_refused(target, verdict, refused)
        return decision._replace(layouts=tuple((each, layouts[each]) for each in layouts if each in decision.kernels))

    def _verdict(self, target: Target, place: _Place) -> _Verdict:
        key: object = type(target.module)
        if target.function or target.siblings is not None:
            key = (target.function, *map(type, target.modules))
        verdict = place.verdicts.get(key)
        if verdict is None:
            verdict = place.verdicts[key] = self._new_verdict(target, place)
        return verdict

    def _new_verdict(self, target: Target, place: _Place) -> _Verdict:
        outcomes = [
            each if isinstance(each, Outcome) else self._outcome(target, each, place.backend, mode)
            for each, mode in zip(place.wanted, SERVED, strict=True)
        ]
        found = outcomes[_TRAINING[0]].found
        if isinstance(found, LoadedSymbol) and is_loss_of(target, found.value):
            outcomes = [outcomes[_TRAINING[mode.compile]] for mode in SERVED]  # a loss is there for training
        kernels = kernels_of(outcomes)
        distinct = dict.fromkeys(kernel for kernel in kernels if kernel is not None)
        has_layouts = any(has_layout(target, kernel) for kernel in distinct)
        checks = (
            ()
            if has_layouts
            else tuple(
                (kernel, check) for kernel in distinct for check in module_checks(target, kernel, type(target.module))
            )
        )
        has_errors = any(outcome.error is not None for outcome in outcomes)
        facts = self._teller.facts(place.entry.layer, outcomes)
        if remark := next(filter(None, (remark_on(target, kernel) for kernel in distinct)), ""):
            facts = tuple(fact._replace(note="; ".join(filter(None, (fact.note, remark)))) for fact in facts)
        is_plain = not (has_errors or has_layouts)
        check = _combined([check for _, check in checks])
        return _Verdict(tuple(outcomes), facts, kernels, checks, check, has_errors, has_layouts, is_plain)

    def _outcome(self, target: Target, choice: KernelChoice, backend: str, mode: Mode) -> Outcome:
        found = self._obtained[choice, backend]
        if isinstance(found, KernelHubError):
            return Outcome(choice, None, str(found), type(found).__name__, found)
        if isinstance(found, PlannedSymbol):
            return Outcome(choice, found)
        if reason := class_misfit(target, Kernel(found.value, choice.attributes)):
            return self._refused(target, Outcome(choice, found), reason)
        pinned = self._mode and mode_mismatch(found.value, self._mode)
        if reason := pinned or mode_mismatch(found.value, mode) or "":
            return Outcome(choice, found, reason, reason)
        return Outcome(choice, found)

    def _refused(self, target: Target, each: KernelChoice | Outcome, reason: str) -> Outcome:
        """The outcome when the layer is not one for this kernel; an outcome that has a reason already keeps it."""
        if isinstance(each, Outcome) and not (each.bindable and each.choice is not None):
            return each
        choice, found = (each.choice, each.found) if isinstance(each, Outcome) else (each, None)
        assert choice is not None
        kernel = str(choice) if found is None else f"{found.kernel}:{found.symbol}"
        error = ContractMismatch(target.title, type(target.module).__name__, kernel, reason)
        return Outcome(choice, found, reason, reason, error)

    def _also_refused(self, target: Target, verdict: _Verdict, refused: dict[Kernel, str]) -> dict[Kernel, str]:
        """One kernel of its class does not fit a layer; others may."""
        for kernel, check in verdict.checks:
            if kernel not in refused and (reason := check(target.module)):
                refused[kernel] = reason
        return refused

    def _with_refused(self, target: Target, verdict: _Verdict, refused: dict[Kernel, str]) -> Decision:
        outcomes = [
            self._refused(target, outcome, refused[kernel]) if kernel in refused else outcome
            for outcome, kernel in zip(verdict.outcomes, verdict.kernels, strict=True)
        ]
        if not any(outcome.bindable for outcome in outcomes):
            return self._skipped(target, outcomes)
        facts = self._teller.facts(target.layer, outcomes) if refused else verdict.facts
        kernels = kernels_of(outcomes) if refused else verdict.kernels
        return Decision(target, facts, kernels, _errors(target, outcomes))

    def _skipped(self, target: Target, outcomes: Sequence[Outcome]) -> Decision:
        return Decision(target, self._teller.facts(target.layer, outcomes), errors=_errors(target, outcomes))


def _combined(checks: Sequence[Check]) -> Check:
    if len(checks) == 1:
        return checks[0]
    return lambda module: next((reason for check in checks if (reason := check(module))), None)


def _errors(target: Target, outcomes: Sequence[Outcome]) -> tuple[KernelHubError | None, ...]:
    return tuple([_named(outcome.error, target) for outcome in outcomes])


def _named(error: KernelHubError | None, target: Target) -> KernelHubError | None:
    """A verdict's misfit is about the first layer that was met; the error names the layer at hand."""
    if isinstance(error, ContractMismatch) and error.module_path != target.title:
        return ContractMismatch(target.title, error.layer, error.kernel, error.reason)
    return error
