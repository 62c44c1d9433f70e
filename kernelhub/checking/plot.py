"""Plot: time, memory and error of kernels beside the plain layers, as one picture (extra ``plot``)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernelhub.errors import KernelHubError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kernelhub.checking.outcome import CheckReport
    from kernelhub.checking.tuning import Tuning
    from kernelhub.layers.comparison import Cost

_PLAIN, _KERNEL, _LIMIT = "#9aa4b2", "#2563eb", "#dc2626"
_MIB = 1 << 20


def plot(path: Path, tuning: Tuning, report: CheckReport, costs: Mapping[str, Cost]) -> None:
    """Draw four panels: time and memory of each layer, error against tolerance, and the training step.

    Raises:
        KernelHubError: matplotlib is not installed, or does not write files with this ending.
    """
    try:
        figure_module = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise KernelHubError("a plot needs matplotlib: pip install 'kernelhub[plot]'") from error
    rows = max(len(tuning), len(report), 4)
    figure = figure_module.Figure(figsize=(14, 2.5 + 0.55 * rows), layout="constrained")
    (times, memory), (errors, step) = figure.subplots(2, 2)
    labels = [f"{row.layer} {row.mode}\n{row.input}" for row in tuning]
    _pairs(times, "time of a call, us", labels, [(row.trial.plain_seconds, row.trial.seconds) for row in tuning], 1e6)
    _pairs(memory, "peak memory, MiB", labels, [(row.trial.plain_bytes, row.trial.bytes) for row in tuning], 1 / _MIB)
    _errors(errors, report)
    _steps(step, costs)
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise KernelHubError(f"cannot write the plot {path}: {error}") from error


def _pairs(axes: Any, title: str, labels: Sequence[str], pairs: Sequence[tuple[float, float]], unit: float) -> None:
    places = range(len(labels))
    for shift, index, color, name in ((0.2, 0, _PLAIN, "plain"), (-0.2, 1, _KERNEL, "kernel")):
        axes.barh(
            [place + shift for place in places], [pair[index] * unit for pair in pairs], 0.38, color=color, label=name
        )
    axes.set_yticks(list(places), labels, fontsize=7)
    axes.set_title(title)
    axes.invert_yaxis()
    axes.legend(fontsize=8)


def _errors(axes: Any, report: CheckReport) -> None:
    """The error of each kernel as a part of what is allowed: left of the line is right."""
    rows = [row for row in report if row.allowed > 0]
    shares = [row.error / row.allowed for row in rows]
    colors = [_LIMIT if share > 1 else _KERNEL for share in shares]
    axes.barh(range(len(rows)), shares, color=colors)
    axes.axvline(1.0, color=_LIMIT, linestyle="--")
    axes.set_yticks(list(range(len(rows))), [f"{row.layer} {row.mode}\n{row.input}" for row in rows], fontsize=7)
    axes.set_title("error, as a part of the tolerance")
    axes.invert_yaxis()


def _steps(axes: Any, costs: Mapping[str, Cost]) -> None:
    names = list(costs)
    axes.bar(names, [cost.seconds * 1e3 for cost in costs.values()], color=_KERNEL)
    axes.set_title("training step: ms, and peak MiB above the weights")
    axes.margins(y=0.15)
    for index, cost in enumerate(costs.values()):
        axes.annotate(f"{cost.peak_bytes / _MIB:.0f} MiB", (index, cost.seconds * 1e3), ha="center", va="bottom")
