"""``kernelhub capture``: write what layers of a model get and give to a file, to check kernels by elsewhere."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

from kernelhub.cli import subject as subjects

_MIB = 1 << 20


def capture(
    output: Annotated[Path, typer.Argument(help="The .safetensors file to write.")],
    layer: Annotated[list[str], typer.Option(help="A layer name or path pattern, e.g. RMSNorm (repeatable).")],
    model: subjects.Model = None,
    device: subjects.Device = None,
    dtype: subjects.Dtype = "float32",
    batch: subjects.Batch = 2,
    tokens: subjects.Tokens = 37,
    most_mib: Annotated[int, typer.Option(min=1, max=1024, help="What the tensors may be together, in MiB.")] = 256,
) -> None:
    """Run a model once and write the inputs, outputs and gradients of chosen layers to one .safetensors file.

    `kernelhub check --golden FILE REQUEST` replays it on any machine, without the model.
    """
    subject = subjects.open_subject(model, device, dtype, batch, tokens)
    golden = importlib.import_module("kernelhub.checking.golden")
    count = golden.write_golden(output, subject.model, layer, subject.inputs, most_bytes=most_mib * _MIB)
    typer.echo(f"{output}: {count} kinds of calls, {output.stat().st_size} bytes")
