"""``kernelhub demo``: the whole path on this machine, over HTTP, from a mapping string to a faster training step."""

from __future__ import annotations

import contextlib
import copy
import importlib
import logging
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from kernelhub import api
from kernelhub.cli.progress import ProgressReporter
from kernelhub.config import KernelConfig
from kernelhub.errors import KernelHubError
from kernelhub.folder import COLLECTION_REPOSITORY, collection_folder
from kernelhub.request import KernelRequest
from kernelhub.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.environment import Environment
    from kernelhub.layers.comparison import Cost, Deviation

MAPPING = {
    "RMSNorm": f"{COLLECTION_REPOSITORY}@v2:RMSNorm",
    "SwiGLUMLP": f"{COLLECTION_REPOSITORY}@v2:SwiGLUMLP",
    "rotary_pos_emb": f"{COLLECTION_REPOSITORY}@v2:rotary_pos_emb",
    "ForCausalLM": f"{COLLECTION_REPOSITORY}@v2:FusedLinearCrossEntropy",
}

_MIB = 1 << 20
_ROOMY = 40 << 30  # bytes of device memory
_NEXT = """Next:
  in your program      kernelhub.kernelize(model, {"RMSNorm": "builtin:RMSNorm"}), then print(kernelhub.report(model))
  a script unchanged   kernelhub run train.py
  which build, and why kernelhub explain org/repo@v1
  this machine         kernelhub doctor"""


def demo(
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Training steps to time, with and without kernels.")] = 8,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the local Hub; 0 picks a free one.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one.")] = None,
) -> None:
    """Train a small Qwen3 with kernels from a local Hub: plan, download, check, bind, compare; again from the store.

    Exit code 1 if any number differed more than rounding explains, or if any layer was left unbound.
    """
    with tempfile.TemporaryDirectory(prefix="kernelhub-demo-") as folder, _quiet():
        failures = _Demo(_console(), Path(folder), steps, port, device).run()
    for failure in failures:
        typer.echo(f"FAILED: {failure}", err=True)
    if failures:
        raise typer.Exit(1)


class _Demo:
    """One run: each method prints one part of the story."""

    def __init__(self, console: Console, folder: Path, steps: int, port: int, device: str | None) -> None:
        # By name, because importing torch and transformers must not be the price of `kernelhub --help`.
        self._torch = importlib.import_module("torch")
        self._comparison = importlib.import_module("kernelhub.layers.comparison")
        self._console = console
        self._folder = folder
        self._steps = steps
        self._port = port
        self._device = self._torch.device(device or ("cuda" if self._torch.cuda.is_available() else "cpu"))
        self._config = KernelConfig(MAPPING)
        self._failures: list[str] = []

    def run(self) -> list[str]:
        """The whole demo; what went wrong is returned, and was printed where it happened."""
        local_hub = importlib.import_module("kernelhub.serve").LocalHub
        plain, batch = _small_qwen3(self._torch, self._device)
        with local_hub(collection_folder(), port=self._port) as hub:
            self._say(f"1. A Hub on this machine, {hub.url}, serves the collection that comes with kernelhub")
            with ProgressReporter(self._console) as reporter:
                session = Session(cache_dir=self._folder / "store", endpoint=hub.url, reporter=reporter)
                self._show_environment(session.detected)
                self._show_choice(session)
                self._say("3. Plan for a small Qwen3 (random weights), before anything is downloaded")
                self._console.print(str(api.plan(plain, self._config, session=session)), **_PLAIN)
                self._say("4. Download, verify, import, check each kernel against its layer, bind")
                bound = self._bind(plain, session, check="bind", inputs=_part_of(batch, 64), strict=False)
            online = len(hub.requests)
        self._compare(plain, bound, batch)
        if self._failures:
            return self._failures
        self._say(f"6. The Hub is stopped (it answered {online} requests); once more, from the store")
        again = self._bind(plain, Session(cache_dir=session.cache_dir, endpoint=session.endpoint))
        self._check("repeated from the store", self._comparison.compare_numbers(plain, again, _part_of(batch)))
        if not self._failures:
            self._say("Result: the same numbers but for rounding, every layer bound, nothing fell back")
            self._console.print(_NEXT, **_PLAIN)
        return self._failures

    def _show_environment(self, environment: Environment) -> None:
        self._console.print(f"environment: {environment}", **_PLAIN)
        self._console.print(
            f"torch {environment.torch_build}, device {_device_name(self._torch, self._device)}", **_PLAIN
        )

    def _show_choice(self, session: Session) -> None:
        request = KernelRequest.parse(f"{COLLECTION_REPOSITORY}@v2")
        resolution = session.resolve(request, backend=session.backend_of(self._device))
        self._say(f"2. Builds of {resolution.name}@v2 (commit {resolution.commit[:12]}); trust: {resolution.trust}")
        assert resolution.selection is not None
        for variant in resolution.selection.accepted:
            chosen = "chosen" if str(variant) == resolution.variant else "fits, but is not the best"
            self._console.print(f"  accepted  {variant}: {chosen}", **_PLAIN)
        for rejection in resolution.selection.rejected:
            self._console.print(f"  rejected  {rejection.variant}: {rejection.reason}", **_PLAIN)

    def _bind(self, plain: Any, session: Session, **options: Any) -> Any:
        bound = api.kernelize(copy.deepcopy(plain), self._config, session=session, **options)
        report = api.report(bound)
        self._console.print(str(report), **_PLAIN)
        self._failures += [f"{row.module} ({row.layer}) was left alone: {row.reason}" for row in report.skipped]
        return bound

    def _compare(self, plain: Any, bound: Any, batch: dict[str, Any]) -> None:
        self._say("5. The same training step without and with kernels")
        self._check("first step", self._comparison.compare_numbers(plain, bound, _part_of(batch)))
        models = {"plain": plain, "kernels": bound}
        self._show_costs(self._comparison.compare_costs(models, batch, self._steps, lambda: None))

    def _check(self, what: str, deviations: list[Deviation]) -> None:
        groups = {"logits": deviations[:1], "loss": deviations[1:2], "gradients": deviations[2:]}
        table = Table("largest difference from float64", "plain", "kernels", "allowed", "kernels from plain", box=None)
        for name, group in groups.items():
            worst = max(group, key=lambda deviation: deviation.kernels / deviation.allowed)
            row = [f"{number:.2e}" for number in (worst.plain, worst.kernels, worst.allowed, worst.between)]
            table.add_row(name if name == worst.name else worst.name, *row)
        self._console.print(table)
        self._failures += [f"{what}: {deviation.name} differs" for deviation in deviations if not deviation.ok]

    def _show_costs(self, costs: dict[str, Cost]) -> None:
        table = Table("training step", "plain", "kernels", "ratio", box=None)
        plain, kernels = costs["plain"], costs["kernels"]
        times = [f"{cost.seconds * 1e3:.1f}" for cost in (plain, kernels)]
        peaks = [f"{cost.peak_bytes / _MIB:.1f}" for cost in (plain, kernels)]
        table.add_row(f"time, ms (median of {self._steps})", *times, f"{kernels.seconds / plain.seconds:.2f}")
        table.add_row("peak memory above weights, MiB", *peaks, f"{kernels.peak_bytes / plain.peak_bytes:.2f}")
        self._console.print(table)

    def _say(self, text: str) -> None:
        self._console.print(f"\n{text}", style="bold", **_PLAIN)


_PLAIN: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}


def _console() -> Console:
    """Standard output; a pipe or file has no width of its own, and tables should not be folded there."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The demo tells its own story; libraries' hints about missing accelerators would only distract."""
    before = os.environ.get("TRANSFORMERS_VERBOSITY")
    os.environ["TRANSFORMERS_VERBOSITY"] = before or "error"
    logging.getLogger("kernelhub").addHandler(logging.NullHandler())
    try:
        yield
    finally:
        if before is None:
            del os.environ["TRANSFORMERS_VERBOSITY"]


def _device_name(torch: Any, device: Any) -> str:
    return (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else f"{device.type}, {torch.get_num_threads()} threads"
    )


def _small_qwen3(torch: Any, device: Any) -> tuple[Any, dict[str, Any]]:
    """A Qwen3 of a size that shows the difference on this device, with random weights and random tokens."""
    try:
        transformers = importlib.import_module("transformers")
    except ImportError as error:
        raise KernelHubError("the demo needs transformers: pip install 'kernelhub[transformers,serve]'") from error
    large = device.type == "cuda"
    config = transformers.Qwen3Config(
        hidden_size=1024 if large else 256,
        intermediate_size=3072 if large else 768,
        num_hidden_layers=8 if large else 4,
        num_attention_heads=16 if large else 4,
        num_key_value_heads=8 if large else 2,
        head_dim=128 if large else 64,
        vocab_size=65536 if large else 16384,
    )
    torch.manual_seed(0)
    # As people train: bfloat16 where the device is made for it.
    model = transformers.Qwen3ForCausalLM(config).to(device, torch.bfloat16 if large else torch.float32)
    tokens = torch.randint(0, config.vocab_size, _batch_shape(torch, device), device=device)
    return model, {"input_ids": tokens, "labels": tokens}


def _batch_shape(torch: Any, device: Any) -> tuple[int, int]:
    """Sequences and tokens of a step: enough to keep the device busy, little enough for its memory."""
    if device.type != "cuda":
        return 2, 256
    roomy = torch.cuda.get_device_properties(device).total_memory > _ROOMY
    return 4, 4096 if roomy else 1024


def _part_of(batch: dict[str, Any], tokens: int = 512) -> dict[str, Any]:
    """The tokens whose numbers are judged: float64 needs several times the memory and time."""
    return {name: ids[:2, :tokens] for name, ids in batch.items()}
