"""Check: does a kernel compute what its layer computes? Judged on the layer's own inputs and on variations of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.checking import probe as probes
from kernelhub.checking.evaluation import Evaluation, evaluate
from kernelhub.checking.reference import Referee, Reference, wide_dtype
from kernelhub.checking.subject import EAGER
from kernelhub.checking.verdict import coarser, deviations, finite_findings, form_findings, repeat_findings
from kernelhub.layers.report import one_line

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.checking.call import Call
    from kernelhub.checking.case import Case
    from kernelhub.checking.probe import Probe
    from kernelhub.checking.tolerance import Deviation
    from kernelhub.mode import Mode

_AUTOCAST = torch.bfloat16


@dataclass
class Finding:
    """What one check found: the problems, and the deviation that came closest to what is allowed or exceeded it.

    ``unknown`` says why nothing could be told: the plain layer cannot be evaluated by itself.
    """

    problems: list[str] = field(default_factory=list)
    worst: Deviation | None = None
    unknown: str = ""
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return not self.problems and not self.unknown

    def weigh(self, found: Deviation) -> None:
        if self.worst is None or found.ratio > self.worst.ratio:
            self.worst = found
        if not found.ok:
            self.problems.append(str(found))


def check_case(case: Case, mode: Mode, *, thorough: bool = True) -> Finding:
    """Check the kernel that serves ``mode`` on one case.

    Args:
        mode: INFERENCE checks the forward under ``no_grad``, TRAINING the gradients too.
        thorough: try all variations of the inputs; else only the inputs themselves.
    """
    finding = Finding()
    start = time.perf_counter()
    try:
        _Check(case, mode, finding).run(thorough=thorough)
    except _Unknown as error:
        finding.unknown = str(error)
    finding.seconds = time.perf_counter() - start
    return finding


def check_modes(case: Case) -> Iterator[tuple[Mode, Finding]]:
    """The finding for each mode that the case has a kernel for; a kernel that serves both is tried at length once."""
    thorough = True
    for mode in reversed(EAGER):
        if case.subject.serves(mode):
            yield mode, check_case(case, mode, thorough=thorough or not _is_shared(case))
            thorough = False


def _is_shared(case: Case) -> bool:
    inference, training = (case.subject.row(mode) for mode in EAGER)
    return inference == training


class _Unknown(Exception):
    """The plain layer itself cannot be evaluated."""


class _Check:
    """One check: each step adds to the finding, and the first probe that fails ends it."""

    def __init__(self, case: Case, mode: Mode, finding: Finding) -> None:
        self._case = case
        self._mode = mode
        self._finding = finding
        self._subject = case.subject
        is_head = bool(self._subject.body)
        self._sought = frozenset[str]() if is_head and not mode.training else self._subject.sought
        self._options: dict[str, Any] = {
            "training": mode.training,
            "differentiate": mode.training,
            "only": self._sought,
        }
        self._referees: dict[tuple[torch.dtype, torch.dtype], Referee] = {}
        self._references: dict[str, Reference] = {}

    def run(self, *, thorough: bool) -> None:
        first = self._real()
        if not thorough or not self._finding.ok:
            return
        if self._mode.training:
            self._without_gradients()
        small = self._small_call()
        for probe in probes.PROBES:
            if self._finding.ok:
                self._try(probe, small)
        if self._finding.ok and self._case.dtype is torch.float32:
            self._under_autocast(small)
        if self._finding.ok and first is not None:
            again = self._kernel(probes.REAL, self._case.call)
            self._add(repeat_findings(first, again, "after calls with other shapes") if again else ())

    def _real(self) -> Evaluation | None:
        """The call itself, twice."""
        call, probe = self._case.call, probes.REAL
        plain = self._plain(probe, call)
        if isinstance(plain, str):
            raise _Unknown(f"its own forward cannot be run by itself: {plain}")
        kernel = self._kernel(probe, call)
        if kernel is None:
            return None
        self._judge(probe, call, plain, kernel)
        again = self._kernel(probe, call)
        own_again = self._plain(probe, call)
        repeatable = isinstance(own_again, Evaluation) and not any(repeat_findings(plain, own_again, ""))
        if again is not None and repeatable:
            self._add(repeat_findings(kernel, again, "at the second call"))
        return kernel

    def _without_gradients(self) -> None:
        probe = probes.REAL._replace(name="no_grad")
        self._options["differentiate"] = False
        try:
            self._try(probe, self._case.call)
        finally:
            self._options["differentiate"] = True

    def _under_autocast(self, call: Call) -> None:
        probe = probes.REAL._replace(name="autocast to bfloat16", strides=False)
        with torch.autocast(self._case.device.type, _AUTOCAST):
            self._try(probe, call, _AUTOCAST)

    def _small_call(self) -> Call:
        """The call with fewer rows where there are many, if the plain layer takes that."""
        small = probes.cut(self._case.call)
        if small.shapes == self._case.call.shapes or isinstance(self._plain(probes.REAL, small), str):
            return self._case.call
        return small

    def _try(self, probe: Probe, call: Call, autocast: torch.dtype | None = None) -> None:
        plain = self._plain(probe, call)
        if isinstance(plain, str):
            return  # not something that this layer is for
        kernel = self._kernel(probe, call)
        if kernel is not None:
            self._judge(probe, call, plain, kernel, autocast)

    def _judge(
        self, probe: Probe, call: Call, plain: Evaluation, kernel: Evaluation, autocast: torch.dtype | None = None
    ) -> None:
        self._add(form_findings(plain, kernel, probe, self._sought))
        self._add(finite_findings(plain, kernel, probe))
        if not probe.judges:
            return
        exact = self._reference(probe, call, autocast)
        if exact is not None:
            for found in deviations(exact, plain, kernel, probe, autocast, self._case.longest):
                self._finding.weigh(found)

    def _reference(self, probe: Probe, call: Call, autocast: torch.dtype | None) -> Reference | None:
        """The reference for a probe; probes that keep the numbers of a call share one."""
        key = f"{id(call)} {autocast} {self._options['differentiate']}" if probe.same_values else ""
        if key in self._references:
            return self._references[key]
        dtype = self._case.dtype if autocast is None else coarser(self._case.dtype, autocast)
        try:
            made = self._referee(dtype, call).reference(probe.vary(call), self._options)
        except Exception as error:
            if probe is probes.REAL:
                raise _Unknown(f"its own forward cannot be run in a wider dtype: {told(error)}") from error
            return None
        if key:
            self._references[key] = made
        return made

    def _referee(self, dtype: torch.dtype, call: Call) -> Referee:
        key = (dtype, wide_dtype(dtype, self._numbers(call)))
        if key not in self._referees:
            self._referees[key] = Referee(self._subject, key[1], torch.finfo(dtype).eps / 2)
        return self._referees[key]

    def _numbers(self, call: Call) -> int:
        module = self._subject.module
        weights = 0 if module is None else sum(each.numel() for each in module.parameters())
        widest = max((each.numel() // each.shape[-1] for each in call.tensors.values() if each.numel()), default=0)
        rows = 0 if module is None else max((each.shape[0] for each in module.parameters() if each.dim()), default=0)
        return weights + widest * rows

    def _plain(self, probe: Probe, call: Call) -> Evaluation | str:
        try:
            return evaluate(self._subject.run_plain, probe.vary(call), self._subject.module, **self._options)
        except Exception as error:  # whatever a layer raises for inputs that it is not made for
            return told(error)

    def _kernel(self, probe: Probe, call: Call) -> Evaluation | None:
        def run(each: Call) -> Any:
            return self._subject.run_kernel(self._mode, each)

        try:
            return evaluate(run, probe.vary(call), self._subject.kernel_module, **self._options)
        except Exception as error:  # whatever a kernel raises
            self._finding.problems.append(f"it raises {told(error)} (with {probe.name})")
            return None

    def _add(self, found: Any) -> None:
        self._finding.problems.extend(found)


def told(error: Exception) -> str:
    """An exception of somebody else in one line."""
    lines = str(error).strip().splitlines()
    return one_line(f"{type(error).__name__}: {lines[0] if lines else ''}")
