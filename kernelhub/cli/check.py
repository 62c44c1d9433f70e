"""``kernelhub check``: does a kernel compute what its layer computes, on this machine?"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from kernelhub import api
from kernelhub.cli import option
from kernelhub.cli import subject as subjects
from kernelhub.cli.steps import StepReporter
from kernelhub.config import KernelConfig
from kernelhub.errors import InvalidRequest
from kernelhub.session import Session

Trust = option.Trust


def check(
    request: Annotated[str | None, typer.Argument(help='The kernel, e.g. "org/repo@v1:Symbol".')] = None,
    layer: Annotated[str | None, typer.Option(help="The layer that REQUEST is for, e.g. RMSNorm.")] = None,
    golden: Annotated[Path | None, typer.Option(help="Replay this file of `kernelhub capture`.")] = None,
    config: subjects.Mapping = None,
    model: subjects.Model = None,
    device: subjects.Device = None,
    dtype: subjects.Dtype = "float32",
    batch: subjects.Batch = 2,
    tokens: subjects.Tokens = 37,
    cache_dir: option.CacheDir = None,
    offline: option.Offline = False,
    trust: Trust = None,
    as_json: option.AsJson = False,
) -> None:
    """Compare kernels with the layers they would replace: outputs, gradients, and what they do to their inputs.

    With --golden, REQUEST runs on recorded inputs and is compared with recorded results: no model is needed. Else the
    model runs once, and every kernel is tried on the inputs of its layers and on variations of them. Without REQUEST
    and --config, the collection shipped with kernelhub is checked. Exit code 1 if a kernel is wrong or nothing could be
    checked.
    """
    with StepReporter() as reporter:
        session = Session(cache_dir=cache_dir, offline=offline or None, reporter=reporter)
        if golden is not None:
            report = _replayed(golden, request, layer, device, session, trust)
        else:
            subject = subjects.open_subject(model, device, dtype, batch, tokens)
            chosen = subjects.chosen_config(subject, config, request, layer)
            report = api.check(subject.model, chosen, subject.inputs, trust_remote_code=trust or False, session=session)
    option.show(report, as_json)
    if not report.ok:
        raise typer.Exit(1)


def _replayed(
    golden: Path, request: str | None, layer: str | None, device: str | None, session: Session, trust: Trust
) -> Any:
    if request is None:
        raise InvalidRequest("", "nothing to check with --golden", 'a kernel, e.g. "org/repo@v1:Symbol"')
    torch = subjects.import_torch()
    [choice] = KernelConfig({layer or "layer": request}).choices()
    where = subjects.chosen_device(torch, device)
    kernel = api.load_choice(choice, session.backend_of(where), trust_remote_code=trust or False, session=session)
    replay = importlib.import_module("kernelhub.checking.replay").replay
    return replay(golden, kernel, where, layer, session.reporter.step)
