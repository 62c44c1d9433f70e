"""Subject: the model, mapping and batch that ``check``, ``capture`` and ``bench`` work on, from their options."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from kernelhub.blueprint import SHIPPED, build
from kernelhub.config import KernelConfig
from kernelhub.errors import InvalidConfig, KernelHubError

Model = Annotated[
    Path | None,
    typer.Option(help="A model's folder or config.json: built with random weights. Default: a few plain torch layers."),
]
Mapping = Annotated[Path | None, typer.Option("--config", help="A kernel config (.toml or .json) instead of REQUEST.")]
Device = Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16.")]
Batch = Annotated[int, typer.Option(min=1, max=1024, help="Sequences of the made-up inputs.")]
Tokens = Annotated[int, typer.Option(min=1, max=1 << 20, help="Tokens of each sequence of the made-up inputs.")]
_DTYPES = ("float32", "bfloat16", "float16")


class Subject(NamedTuple):
    """A model on its device, what to call it with, and the mapping that fits it by default."""

    model: Any
    inputs: Any
    mapping: dict[str, str]


def open_subject(path: Path | None, device: str | None, dtype: str, batch: int, tokens: int) -> Subject:
    """Build the model that the options mean, with the same random weights each time.

    Raises:
        KernelHubError: no torch, or no such device or dtype; InvalidConfig: no model can be built from ``path``.
    """
    torch = import_torch()
    if dtype not in _DTYPES:
        raise InvalidConfig(dtype, "not a dtype", f"one of {', '.join(_DTYPES)}", "--dtype")
    torch.manual_seed(0)
    specimen = importlib.import_module("kernelhub.checking.specimen")
    model = specimen.Specimen() if path is None else build(path, "cpu")
    model = model.to(chosen_device(torch, device), getattr(torch, dtype)).eval()
    inputs = importlib.import_module("kernelhub.checking.sample").made_up(model, batch, tokens)
    return Subject(model, inputs, specimen.KERNELS if path is None else SHIPPED)


def import_torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ImportError as error:
        raise KernelHubError("this command runs a model, and torch is not installed: pip install torch") from error


def chosen_device(torch: Any, device: str | None) -> Any:
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise KernelHubError(f"device {device!r} cannot be used: {str(error).splitlines()[0]}") from error
    return chosen


def chosen_config(subject: Subject, config: Path | None, request: str | None, layer: str | None) -> KernelConfig:
    """The mapping to use: a file's, one kernel for one layer, or the shipped collection.

    Raises:
        InvalidConfig: a kernel without the layer that it is for, or both a file and a kernel.
    """
    if request is None:
        mapping = {key: (value, {"optional": True}) for key, value in subject.mapping.items()}
        return KernelConfig(mapping) if config is None else KernelConfig.from_file(config)
    if config is not None:
        raise InvalidConfig(request, "a kernel beside --config", "one of the two", "REQUEST")
    if layer is None:
        raise InvalidConfig(request, "no layer that it is for", "--layer NAME, such as --layer RMSNorm", "REQUEST")
    return KernelConfig({layer: request})
