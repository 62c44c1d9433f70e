"""Judge: checks decisions before they are bound, and turns those about wrong kernels into reasons."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kernelhub.checking.capture import capture
from kernelhub.checking.check import check_modes
from kernelhub.checking.outcome import CheckReport, CheckRow
from kernelhub.checking.sample import made_up
from kernelhub.errors import NumericsMismatch
from kernelhub.layers.report import Report

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import nn

    from kernelhub.checking.case import Case
    from kernelhub.checking.check import Finding
    from kernelhub.layers.decision import Decision
    from kernelhub.mode import Mode

    Progress = Callable[[str, int, int], object]

NOT_REACHED = "not checked: the inputs of the check never call it"


def quiet(what: str, done: int, total: int) -> None:
    """Progress for those who wait in silence."""


class Judge:
    """Checks the accepted decisions about one model on one run of it.

    ``inputs`` is what to call the model with, made up when None. After ``decide`` or ``check``, ``rows`` holds what was
    found.
    """

    def __init__(self, inputs: Any, progress: Progress = quiet) -> None:
        self._inputs = inputs
        self._progress = progress
        self.rows: list[CheckRow] = []
        self.problems: dict[int, NumericsMismatch | str] = {}

    def decide(self, model: nn.Module, decisions: Sequence[Decision], *, strict: bool) -> list[Decision]:
        """The decisions with those about wrong or unchecked kernels skipped.

        Raises:
            NumericsMismatch: (strict) a kernel is wrong.
        """
        self.check(model, decisions)
        return [self._settled(decision, strict=strict) for decision in decisions]

    def check(self, model: nn.Module, decisions: Sequence[Decision]) -> CheckReport:
        """Check every accepted decision; changes nothing."""
        start = time.perf_counter()
        accepted = [decision for decision in decisions if decision.accepted]
        cases = self._cases(model, accepted) if accepted else []
        for done, case in enumerate(cases):
            self._progress(f"checking {case.title} ({case.sizes})", done, len(cases))
            for mode, finding in check_modes(case):
                self._note(case, mode, finding)
        self._progress("checked", len(cases), len(cases))
        reached = {id(decision.target) for case in cases for decision in case.decisions}
        for decision in accepted:
            if id(decision.target) not in reached:
                self._miss(decision)
        left = Report(tuple(row for decision in decisions if not decision.accepted for row in decision.rows))
        return CheckReport(tuple(self.rows), time.perf_counter() - start, left)

    def _cases(self, model: nn.Module, accepted: Sequence[Decision]) -> list[Case]:
        return capture(model, accepted, made_up(model) if self._inputs is None else self._inputs)

    def refuse(self, decisions: Sequence[Decision]) -> None:
        """Raise NumericsMismatch if one of these kernels turned out to be wrong."""
        for decision in decisions:
            self._settled(decision, strict=True)

    def _settled(self, decision: Decision, *, strict: bool) -> Decision:
        problem = self.problems.get(id(decision.target))
        if problem is None:
            return decision
        if isinstance(problem, NumericsMismatch) and strict:
            raise problem
        return decision.skip(problem.problem if isinstance(problem, NumericsMismatch) else problem)

    def _note(self, case: Case, mode: Mode, finding: Finding) -> None:
        row = case.subject.row(mode)
        kernel = f"{row.kernel}:{row.symbol}"
        verdict = "unknown" if finding.unknown else "wrong" if finding.problems else "right"
        problem = finding.unknown or "; ".join(finding.problems[:3])
        told = CheckRow(case.title, row.layer, kernel, mode.value, case.sizes, verdict, problem)  # type: ignore[arg-type]
        told = told._replace(modules=len(case.decisions), seconds=finding.seconds).with_worst(finding.worst)
        self.rows.append(told)
        if not finding.ok:
            for decision in case.decisions:
                reason: NumericsMismatch | str = f"not checked: {problem}"
                if verdict == "wrong":
                    reason = NumericsMismatch(decision.target.title, kernel, f"{problem} (input {case.sizes})")
                self.problems.setdefault(id(decision.target), reason)

    def _miss(self, decision: Decision) -> None:
        row = decision.rows[0]
        self.problems[id(decision.target)] = NOT_REACHED
        kernel = f"{row.kernel}:{row.symbol}"
        self.rows.append(CheckRow(decision.target.title, row.layer, kernel, row.mode, "-", "unknown", NOT_REACHED))
