"""Watch: checks the first real calls of bound layers, and gives them their own forward back when a kernel fails.

A watched layer runs a forward of its own around the kernel's. After its last watched call it runs the kernel's forward
itself, as if it had never been watched. A kernel is tried on copies of the inputs before it sees them.
"""

from __future__ import annotations

from collections import defaultdict
from threading import local
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary, WeakSet

from torch.compiler import is_compiling

from kernelhub.checking.call import Call
from kernelhub.checking.capture import answers_of
from kernelhub.checking.case import Case, case_key
from kernelhub.checking.check import check_case
from kernelhub.checking.subject import Subject, body_name
from kernelhub.layers import binding
from kernelhub.layers.decision import original_of
from kernelhub.layers.discovery import ROOT
from kernelhub.layers.report import Report
from kernelhub.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from kernelhub.layers.decision import Decision

    Forward = Callable[..., Any]

_busy = local()


class Watch:
    """Watches the layers of one model; ``warn`` is told once when a kernel fails."""

    def __init__(self, calls: int, warn: Callable[[str], object]) -> None:
        self._calls = calls
        self._warn = warn
        self._left: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
        self._clean: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()
        self._restored: WeakSet[nn.Module] = WeakSet()
        self._decisions: list[Decision] = []

    def begin(self, decisions: Iterable[Decision]) -> None:
        """Watch the layers that are bound as ``decisions`` say."""
        groups: dict[int, list[Decision]] = defaultdict(list)
        for decision in decisions:
            if decision.accepted and binding.is_bound(decision.target.module):
                groups[id(decision.target.module)].append(decision)
        for group in groups.values():
            if any(decision.is_attention for decision in group):
                continue  # its function is looked up in a table, which is not watched
            self._decisions += group
            self._begin(group[0].target.module, group)

    def _begin(self, module: nn.Module, group: Sequence[Decision]) -> None:
        record = binding.record_of(module)
        assert record is not None
        self._left[module] = self._calls
        self._clean[module] = record.forward
        first, clean = group[0], cast("Any", record.forward)
        if first.is_loss:
            watched = self._watched_function(first, module, clean, clean.original)
            binding.exchange(module, binding.BoundLoss(watched, clean.original, compiles=False))
        elif first.target.function:
            replaced = {each.target.function: self._watched_call(each, module) for each in group}
            own: Any = type(module).forward
            binding.exchange(module, binding.forward_calling(own, replaced))
        else:
            binding.exchange(module, self._watched_forward(first, clean))

    def _watched_forward(self, decision: Decision, clean: Any) -> Any:
        own: Any = type(decision.target.module).forward
        body = body_name(decision.target.module)

        def forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if not self._is_due(module):
                return own(module, *args, **kwargs) if module in self._restored else clean(module, *args, **kwargs)
            if body:
                with answers_of(module, body) as answers:
                    result = clean(module, *args, **kwargs)
                held = answers[-1] if answers else None
                passed = held is None or self._passes(decision, module, Call.of(args, kwargs, held))
                return result if passed else own(module, *args, **kwargs)
            passed = self._passes(decision, module, Call.of(args, kwargs))
            return clean(module, *args, **kwargs) if passed else own(module, *args, **kwargs)

        return forward

    def _watched_call(self, decision: Decision, module: nn.Module) -> Forward:
        """The function that stands where the forward of ``module`` calls ``decision.target.function``."""
        subject = Subject.of(decision)

        def clean(*args: Any, **kwargs: Any) -> Any:
            mode = Mode.of(training=module.training)
            call = Call(args, kwargs)
            return subject.run_kernel(mode, call) if subject.serves(mode) else subject.run_plain(call)

        return self._watched_function(decision, module, clean, original_of(decision.target))

    def _watched_function(self, decision: Decision, module: nn.Module, clean: Forward, own: Forward) -> Forward:
        def function(*args: Any, **kwargs: Any) -> Any:
            if module in self._restored:
                return own(*args, **kwargs)
            due = self._is_due(module)
            passed = not due or self._passes(decision, module, Call.of(args, kwargs))
            return clean(*args, **kwargs) if passed else own(*args, **kwargs)

        return function

    def _is_due(self, module: nn.Module) -> bool:
        if is_compiling() or getattr(_busy, "now", False) or module in self._restored:
            return False
        return self._left.setdefault(module, self._calls) > 0

    def _passes(self, decision: Decision, module: nn.Module, call: Call) -> bool:
        """Check a call before it is made; the last one ends the watch, a failing one gives the own forwards back."""
        mode = Mode.of(training=module.training)
        subject = Subject.of(decision._replace(target=_at(decision, module)))
        if not subject.serves(mode):
            return True
        case = Case(case_key(decision, (call.shapes,)), subject, call, [decision], 1)
        _busy.now = True
        try:
            finding = check_case(case, mode, thorough=False)
        finally:
            _busy.now = False
        if finding.problems:
            self._restore(decision, module, "; ".join(finding.problems[:3]), mode)
            return False
        self._left[module] -= 1
        if not self._left[module] and module in self._clean:
            binding.exchange(module, self._clean[module])
        return True

    def _restore(self, failed: Decision, module: nn.Module, problem: str, mode: Mode) -> None:
        """All layers with the kernel that failed go back to their own forward."""
        alike = [one for each in self._decisions if each.kernels == failed.kernels for one in each.target.modules]
        row = Subject.of(failed).row(mode)
        kernel = f"{row.kernel}:{row.symbol}"
        reason = f"its kernel failed a check while it ran: {problem}"
        for each in {id(each): each for each in [*alike, module]}.values():
            self._restored.add(each)
            _give_back(each, reason)
        self._warn(
            f"{kernel} computes other numbers than {failed.target.title}: {problem}. "
            f"{len(alike)} layers run their own forward again."
        )


def _at(decision: Decision, module: nn.Module) -> Any:
    """The target of a decision at another module: that of a copy of the model."""
    target = decision.target
    if target.module is module:
        return target
    fused = binding.fused_of(module)
    siblings = target.siblings
    if siblings is not None and fused is not None and fused.parent is not None:
        siblings = type(siblings)(fused.parent, siblings.path, fused.names, fused.layers)
    return target._replace(module=module, siblings=siblings)


def _give_back(module: nn.Module, reason: str) -> None:
    """Unbind, and keep the rows of the report as skipped ones."""
    record = binding.record_of(module)
    if record is None:
        return
    known = record.report or ()
    skipped = [row._replace(state="skipped", reason=reason, note="", module=ROOT) for row in record.rows]
    layers = {row.layer for row in skipped}
    binding.unbind(module)
    kept = [row for row in known if not (row.module == ROOT and row.layer in layers)]
    if kept or skipped:
        binding.keep_report(module, Report((*kept, *skipped)))
