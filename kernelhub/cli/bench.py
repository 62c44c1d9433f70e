"""``kernelhub bench``: time, memory and error of kernels beside the plain layers, by layer and for a training step."""

from __future__ import annotations

import copy
import importlib
import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kernelhub import api
from kernelhub.cli import option
from kernelhub.cli import subject as subjects
from kernelhub.cli.steps import StepReporter
from kernelhub.session import Session

if TYPE_CHECKING:
    from kernelhub.config import KernelConfig
    from kernelhub.layers.comparison import Cost

_MIB = 1 << 20


def bench(
    request: Annotated[str | None, typer.Argument(help='A kernel to measure, e.g. "org/repo@v1:Symbol".')] = None,
    layer: Annotated[str | None, typer.Option(help="The layer that REQUEST is for, e.g. RMSNorm.")] = None,
    config: subjects.Mapping = None,
    model: subjects.Model = None,
    device: subjects.Device = None,
    dtype: subjects.Dtype = "float32",
    batch: subjects.Batch = 2,
    tokens: subjects.Tokens = 256,
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Training steps to time.")] = 8,
    plot: Annotated[
        Path | None, typer.Option(help="Draw it all into this file (.svg, .png, .pdf; extra 'plot').")
    ] = None,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    trust: option.Trust = None,
    as_json: option.AsJson = False,
) -> None:
    """Measure kernels on a model with random weights: by layer, and for a step plain, with all of them, and tuned.

    Kernels that fail the check are not used in the step. A step is a forward and a backward with the model's own loss,
    or the sum of its outputs where it has none, and the optimizer.
    """
    logging.getLogger("kernelhub").addHandler(logging.NullHandler())  # the tables tell what was left alone
    with StepReporter() as reporter:
        session = Session(cache_dir=cache_dir, offline=offline or None, reporter=reporter)
        subject = subjects.open_subject(model, device, dtype, batch, tokens)
        chosen = subjects.chosen_config(subject, config, request, layer)
        options: dict[str, Any] = {"trust_remote_code": trust or False, "session": session}
        report = api.check(subject.model, chosen, subject.inputs, **options)
        tuning = api.tune(subject.model, chosen, subject.inputs, again=True, **options)
        costs = step_costs(subject, chosen, steps, options)
    if plot is not None:
        importlib.import_module("kernelhub.checking.plot").plot(plot, tuning, report, costs)
    if as_json:
        told = {"check": report.to_dict(), "tune": tuning.to_dict()}
        typer.echo(json.dumps({**told, "step": {name: asdict(cost) for name, cost in costs.items()}}, indent=2))
        return
    typer.echo(f"{report}\n\n{tuning}\n\n{step_table(costs)}")


def step_costs(subject: Any, config: KernelConfig, steps: int, options: dict[str, Any]) -> dict[str, Cost]:
    """The cost of a training step without kernels, with all that are right, and with those that are faster too."""
    comparison = importlib.import_module("kernelhub.layers.comparison")
    models = {"plain": subject.model}
    options = {"strict": False, "inputs": subject.inputs, **options}
    models["kernels"] = api.kernelize(copy.deepcopy(subject.model), config, check="bind", **options)
    models["tuned"] = api.kernelize(copy.deepcopy(subject.model), config, select="fastest", **options)
    step = options["session"].reporter.step
    done = iter(range(1, steps * len(models) + 1))
    costs: dict[str, Cost] = comparison.compare_costs(
        models, subject.inputs, steps, lambda: step("timing steps", next(done), steps * len(models))
    )
    return costs


def step_table(costs: dict[str, Cost]) -> str:
    """The costs and their ratios as lines."""
    plain = costs["plain"]
    rows = [("STEP", "ms", "RATIO", "PEAK MiB", "RATIO")]
    for name, cost in costs.items():
        ratios = cost.seconds / plain.seconds, cost.peak_bytes / max(plain.peak_bytes, 1)
        numbers = (cost.seconds * 1e3, ratios[0], cost.peak_bytes / _MIB, ratios[1])
        rows.append((name, *(f"{number:.2f}" for number in numbers)))  # type: ignore[arg-type]  # five cells
    return "\n".join(importlib.import_module("kernelhub.layers.report").table(rows))
