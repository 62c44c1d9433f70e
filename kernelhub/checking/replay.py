"""Replay: run a kernel on what a golden file holds, on this machine, and judge it as the check does."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kernelhub.checking.archive import Archive
from kernelhub.checking.check import Finding, told
from kernelhub.checking.evaluation import Evaluation, evaluate
from kernelhub.checking.golden import Golden, layers_in, read_golden
from kernelhub.checking.judge import quiet
from kernelhub.checking.outcome import CheckReport, CheckRow
from kernelhub.checking.probe import REAL
from kernelhub.checking.verdict import finite_findings, form_findings, repeat_findings
from kernelhub.errors import InvalidGolden
from kernelhub.mode import Mode

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch

    from kernelhub.checking.call import Call
    from kernelhub.checking.judge import Progress
    from kernelhub.layers.symbol import LoadedSymbol

_PROBE = REAL._replace(name="the recorded inputs")


def replay(
    path: Path, kernel: LoadedSymbol, device: torch.device, layer: str | None = None, progress: Progress = quiet
) -> CheckReport:
    """Check a kernel by the cases of a file.

    Args:
        kernel: a layer class or a function.
        layer: the layer name to take; None for the only one of the file, or the one that is called as the kernel is.

    Raises:
        InvalidGolden: the file is not one, or has no such layer, or several and none was named.
    """
    start = time.perf_counter()
    archive = Archive.open(path)
    names = layers_in(archive)
    wanted = layer or (names[0] if len(names) == 1 else kernel.symbol.rpartition(".")[2])
    if wanted not in names:
        found = f"has no layer {wanted!a}" + ("" if layer else ", and no other was named")
        raise InvalidGolden(str(path), found, f"--layer with one of {', '.join(names) or 'none'}")
    rows = []
    for number, case in enumerate(read_golden(archive, device)):
        if case.layer == wanted:
            progress(f"checking {case.path} ({case.sizes})", number, len(archive.facts["cases"]))
            rows.append(_row(case, kernel, _found(case, kernel.value)))
    return CheckReport(tuple(rows), time.perf_counter() - start)


def _row(case: Golden, kernel: LoadedSymbol, finding: Finding) -> CheckRow:
    verdict = "wrong" if finding.problems else "right"
    mode = Mode.of(training=case.differentiate)
    name = f"{kernel.kernel}:{kernel.symbol}"
    row = CheckRow(case.path, case.layer, name, mode.value, case.sizes, verdict, "; ".join(finding.problems[:3]))  # type: ignore[arg-type]
    return row._replace(modules=case.modules, seconds=finding.seconds).with_worst(finding.worst)


def _found(case: Golden, kernel: Any) -> Finding:
    finding = Finding()
    start = time.perf_counter()
    once, again = (_evaluated(case, kernel, finding) for _ in range(2))
    if once is not None:
        finding.problems += form_findings(case.plain, once, _PROBE, frozenset())
        finding.problems += finite_findings(case.plain, once, _PROBE)
    if once is not None and not finding.problems:
        numbers = once.numbers
        for name, noise in case.noise.items():
            if name in numbers:
                exact, plain = case.exact[name], case.plain.numbers[name]
                finding.weigh(noise.judge(name, _PROBE.name, exact, plain, numbers[name]))
        if again is not None:
            finding.problems += repeat_findings(once, again, "at the second call")
    finding.seconds = time.perf_counter() - start
    return finding


def _evaluated(case: Golden, kernel: Any, finding: Finding) -> Evaluation | None:
    forward: Callable[..., Any] = kernel.forward if isinstance(kernel, type) else _stateless(kernel)  # type: ignore[attr-defined]

    def run(call: Call) -> Any:
        return forward(case.module, *call.args, **call.kwargs)

    call = case.call.map(lambda _, tensor: tensor.detach().clone())
    try:
        return evaluate(run, call, case.module, differentiate=case.differentiate, training=True)
    except Exception as error:  # whatever a kernel raises
        if not finding.problems:
            finding.problems.append(f"it raises {told(error)}")
        return None


def _stateless(function: Any) -> Any:
    return lambda _module, *args, **kwargs: function(*args, **kwargs)
