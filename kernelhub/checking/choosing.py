"""Choosing: what the check and the measurements make of the decisions, as the judges that ``kernelize`` asks."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kernelhub.checking.capture import capture
from kernelhub.checking.check import check_modes
from kernelhub.checking.decided import Decided, machine_facts
from kernelhub.checking.judge import Judge
from kernelhub.checking.measure import CLEAR, race
from kernelhub.checking.outcome import CheckReport
from kernelhub.checking.sample import made_up
from kernelhub.checking.subject import EAGER
from kernelhub.checking.tuning import Trial, TuneRow, Tuning
from kernelhub.checking.watch import Watch
from kernelhub.checking.workload import Workload
from kernelhub.layers.report import Report
from kernelhub.mode import SERVED, Mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from kernelhub.checking.case import Case
    from kernelhub.checking.when import When
    from kernelhub.layers.decision import Decision, Kernel
    from kernelhub.session import Session

    Rounds = Sequence[Sequence[Decision]]

_NOT_FASTER = "no candidate is right and clearly faster than its own forward for these inputs"
_UNMEASURED = "not measured: the inputs never call it"
TUNED_TOKENS = 256


class Examiner:
    """Checks every candidate and keeps the ``report``; binds nothing."""

    def __init__(self, session: Session, inputs: Any, *, strict: bool) -> None:
        self.session = session
        self.strict = strict
        self.report = CheckReport()
        self._inputs = inputs

    def __call__(self, model: nn.Module, rounds: Rounds) -> Sequence[Decision]:
        for decisions in rounds:
            judge = Judge(self._inputs, self.session.reporter.step)
            found = judge.check(model, decisions)
            left = Report((*self.report.left.rows, *found.left.rows))
            self.report = CheckReport((*self.report.rows, *found.rows), self.report.seconds + found.seconds, left)
            if self.strict:
                judge.refuse(decisions)
        return rounds[0]


class Tuner:
    """Measures every candidate that is right, and keeps the ``tuning``."""

    strict = False

    def __init__(self, session: Session, inputs: Any, *, again: bool = False) -> None:
        self.session = session
        self.tuning = Tuning()
        self._inputs = inputs
        self._again = again
        self._progress = session.reporter.step
        self._decided = Decided(session.store)

    def __call__(self, model: nn.Module, rounds: Rounds) -> list[Decision]:
        """For every layer the decision about its fastest candidate, or that it keeps its own forward."""
        start = time.perf_counter()
        fields = _fields(model, rounds, self._inputs)
        for done, (each, mode) in enumerate(pairs := [(each, mode) for each in fields for mode in EAGER]):
            self._progress(f"measuring {each.title} ({mode.value}, {each.sizes})", done, len(pairs))
            self._measure(each, mode)
        self._progress("measured", len(pairs), len(pairs))
        winners = {id(target): _winners(entered) for target, entered in _entered(fields)}
        rows = tuple(row for each in fields for row in each.rows(winners))
        self.tuning = Tuning(rows, time.perf_counter() - start)
        return _merged(rounds, winners)

    def _measure(self, entered: _Field, mode: Mode) -> None:
        serving = {index: case for index, case in entered.cases.items() if case.subject.serves(mode)}
        if not serving:
            return
        facts = entered.facts(mode, serving)
        known = None if self._again else self._decided.find(facts)
        if known is None or len(known) != len(serving):
            found = _trials(serving, mode)
            self._decided.keep(facts, list(found.values()))
        else:
            found = dict(zip(serving, known, strict=True))
            entered.reused.add(mode)
        entered.trials[mode] = found


class Chooser:
    """What ``kernelize`` asks: measure, check, and watch, each if wanted."""

    def __init__(self, session: Session, when: When, inputs: Any, *, fastest: bool, strict: bool) -> None:
        self._when = when
        self._inputs = inputs
        self._strict = strict
        self._tuner = Tuner(session, inputs) if fastest else None
        self._progress = session.reporter.step
        self._watch = Watch(when.calls, session.reporter.warn) if when.calls else None
        self._bound: Sequence[Decision] = ()

    def __call__(self, model: nn.Module, rounds: Rounds) -> Sequence[Decision]:
        decisions: Sequence[Decision] = rounds[0] if self._tuner is None else self._tuner(model, rounds)
        if self._when.bind:
            decisions = Judge(self._inputs, self._progress).decide(model, decisions, strict=self._strict)
        self._bound = decisions
        return decisions

    def watch(self) -> None:
        """Begin to watch what has been bound by now."""
        if self._watch is not None:
            self._watch.begin(self._bound)


@dataclass
class _Field:
    """The candidates that run for layers which are called alike; ``cases`` by the number of the candidate."""

    cases: dict[int, Case] = field(default_factory=dict)
    trials: dict[Mode, dict[int, Trial]] = field(default_factory=dict)
    reused: set[Mode] = field(default_factory=set)

    @property
    def any_case(self) -> Case:
        return next(iter(self.cases.values()))

    @property
    def title(self) -> str:
        return self.any_case.title

    @property
    def sizes(self) -> str:
        return self.any_case.sizes

    def facts(self, mode: Mode, serving: dict[int, Case]) -> dict[str, Any]:
        """Everything that the measurement depends on, fit for JSON."""
        kernels = [_kernel_name(case, mode) for case in serving.values()]
        layer = repr(_bare(self.any_case.key))
        return {**machine_facts(self.any_case.device), "kernels": kernels, "layer": layer, "mode": mode.value}

    def rows(self, winners: dict[int, dict[Mode, int | None]]) -> list[TuneRow]:
        made = []
        for mode, trials in self.trials.items():
            for index, trial in trials.items():
                decisions = self.cases[index].decisions
                chosen = any(winners[id(each.target)][mode] == index for each in decisions)
                facts = (self.cases[index].title, decisions[0].target.layer, mode.value, self.sizes)
                made.append(TuneRow(*facts, trial, chosen, len(decisions), mode in self.reused))
        return made


def _fields(model: nn.Module, rounds: Rounds, inputs: Any) -> list[_Field]:
    """One run of the model for each candidate: all see the same inputs."""
    found: dict[tuple[object, ...], _Field] = {}
    for index, decisions in enumerate(rounds):
        accepted = [decision for decision in decisions if decision.accepted]
        if accepted and inputs is None:
            inputs = made_up(model, tokens=TUNED_TOKENS)
        for case in capture(model, accepted, inputs) if accepted else ():
            found.setdefault(_bare(case.key), _Field()).cases[index] = case
    return list(found.values())


def _bare(key: tuple[object, ...]) -> tuple[object, ...]:
    """The key of a case without its kernel."""
    return (*key[:2], *key[3:])


def _kernel_name(case: Case, mode: Mode) -> str:
    row = case.subject.row(mode)
    return f"{row.kernel}:{row.symbol}"


def _trials(serving: dict[int, Case], mode: Mode) -> dict[int, Trial]:
    """Check every candidate, then let those that are right race against the plain layer."""
    found = {index: _checked(case, mode) for index, case in serving.items()}
    racing = [index for index, trial in found.items() if not trial.state]
    if not racing:
        return found
    case = serving[racing[0]]
    loads = [Workload(case.subject, case.call, mode, kernel=False)]
    loads += [Workload(serving[index].subject, case.call, mode, kernel=True) for index in racing]
    with contextlib.ExitStack() as stack:
        for load in loads:
            stack.enter_context(load.mode())  # a head that is measured is another object for each of them
        result = race(loads, case.device)
    peaks = [load.peak_bytes(case.device) for load in loads]
    for lane, index in enumerate(racing, 1):
        state = "faster" if result.is_faster(lane, 0) else "slower" if result.is_slower(lane, 0) else "same"
        times = (result.seconds(0), result.seconds(lane), result.ratio(lane, 0))
        found[index] = Trial(found[index].kernel, state, *times, peaks[0], peaks[lane])
    return found


def _checked(case: Case, mode: Mode) -> Trial:
    """A trial without a state for a kernel that is right."""
    finding = dict(check_modes(case))[mode]
    state = "" if finding.ok else "wrong" if finding.problems else "unknown"
    return Trial(_kernel_name(case, mode), state, problem=finding.unknown or "; ".join(finding.problems[:3]))


def _entered(fields: Sequence[_Field]) -> list[tuple[Any, list[_Field]]]:
    """Every layer with the fields that it is in: one for each kind of call that it gets."""
    found: dict[int, tuple[Any, list[_Field]]] = {}
    for each in fields:
        targets = {id(one.target): one.target for case in each.cases.values() for one in case.decisions}
        for key, target in targets.items():
            found.setdefault(key, (target, []))[1].append(each)
    return list(found.values())


def _winners(fields: Sequence[_Field]) -> dict[Mode, int | None]:
    return {mode: _winner([each.trials.get(mode, {}) for each in fields]) for mode in EAGER}


def _winner(trials: Sequence[dict[int, Trial]]) -> int | None:
    """The candidate for a layer with these trials, or None for its own forward.

    It is right for every kind of call, slower for none and clearly faster for some; a later candidate has to be clearly
    faster in sum than an earlier one.
    """
    best: int | None = None
    for index in sorted({index for each in trials for index in each}):
        mine = [each.get(index) for each in trials]
        states = {trial.state if trial is not None else "unknown" for trial in mine}
        if not states <= {"faster", "same"} or "faster" not in states:
            continue
        if best is None or _total(trials, index) < CLEAR * _total(trials, best):
            best = index
    return best


def _total(trials: Sequence[dict[int, Trial]], index: int) -> float:
    return sum(each[index].ratio * each[index].plain_seconds for each in trials)


def _merged(rounds: Rounds, winners: dict[int, dict[Mode, int | None]]) -> list[Decision]:
    """The decisions about the winners, in the order of the first candidates."""
    by_target: dict[int, dict[int, Decision]] = {}
    for index, decisions in enumerate(rounds):
        for decision in decisions:
            by_target.setdefault(id(decision.target), {})[index] = decision
    return [_combined(known, winners.get(key)) for key, known in by_target.items()]


def _combined(known: dict[int, Decision], won: dict[Mode, int | None] | None) -> Decision:
    first = next(iter(known.values()))
    if won is None or not any(decision.accepted for decision in known.values()):
        return first if won is not None or not first.accepted else first.skip(_UNMEASURED)
    chosen = {index for index in won.values() if index is not None}
    if not chosen:
        accepted = next(decision for decision in known.values() if decision.accepted)
        return accepted.skip(_NOT_FASTER)
    if len(chosen) == 1 and None not in won.values():
        return known[chosen.pop()]
    return _mixed(known, won)


def _mixed(known: dict[int, Decision], won: dict[Mode, int | None]) -> Decision:
    """One candidate in training and another, or none, in evaluation."""
    kernels: list[Kernel | None] = []
    served: dict[int, list[str]] = {}
    for position, mode in enumerate(SERVED):
        index = won[Mode.of(training=mode.training)]
        kernel = None if index is None else known[index].kernels[position]
        kernels.append(kernel)
        if index is not None and kernel is not None:
            served.setdefault(index, []).append(mode.value)
    plain = [mode.value for mode, index in won.items() if index is None]
    note = f"own forward in {', '.join(plain)}: {_NOT_FASTER}" if plain else ""
    facts = tuple(known[index].facts[0]._replace(mode=", ".join(modes), note=note) for index, modes in served.items())
    return known[next(iter(served))]._replace(facts=facts, kernels=tuple(kernels))
