"""Check and tune kernels for a Qwen3-0.6B-shaped model on one GPU, and train it untuned and tuned in the same run.

Candidates are the collection that comes with kernelhub and, where liger-kernel can be imported, its layers, wrapped as
local builds. Prints Markdown tables: what was checked and how close to the tolerance it came, what was measured and
chosen, and the training step plain, with the first candidates, and tuned. `--device cpu --tiny` runs the same on a CPU.
"""

import argparse
import copy
import importlib.util
import statistics
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import kernelhub
from kernelhub.checking.outcome import CheckReport
from kernelhub.checking.tuning import Tuning
from kernelhub.layers.memory import peak_memory

VOCABULARY = 151936
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
BUILTIN = {
    "RMSNorm": "builtin:RMSNorm",
    "SwiGLUMLP": "builtin:SwiGLUMLP",
    "rotary_pos_emb": "builtin:rotary_pos_emb",
    "ForCausalLM": "builtin:FusedLinearCrossEntropy",
}
# Stateless layers around liger-kernel's functions, as a repository on the Hub would hold them.
LIGER = """
from liger_kernel.ops.rms_norm import LigerRMSNormFunction
from liger_kernel.ops.rope import LigerRopeFunction
from liger_kernel.ops.swiglu import LigerSiLUMulFunction
from torch import nn


class RMSNorm(nn.Module):
    def forward(self, hidden_states):
        eps = self.variance_epsilon
        return LigerRMSNormFunction.apply(hidden_states, self.weight, eps, 0.0, "llama", False)


class SwiGLUMLP(nn.Module):
    def forward(self, x):
        return self.down_proj(LigerSiLUMulFunction.apply(self.gate_proj(x), self.up_proj(x)))


def rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1):
    return LigerRopeFunction.apply(q, k, cos, sin, None, unsqueeze_dim)
"""


def make_model(options: argparse.Namespace) -> nn.Module:
    """A model of the shape of Qwen3-0.6B, or a tiny one, with random bfloat16 weights."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": options.layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    }
    if options.tiny:
        sizes |= {**TINY, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = Qwen3Config(**sizes, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device(options.device):
        return Qwen3ForCausalLM(config).to(torch.bfloat16).train()


def liger_build(folder: Path) -> Path | None:
    """A local build with liger-kernel's layers, or None where it is not installed."""
    if importlib.util.find_spec("liger_kernel") is None:
        return None
    build = folder / "liger" / "torch-universal"
    build.mkdir(parents=True)
    (build / "__init__.py").write_text(LIGER, encoding="utf-8")
    return build


def mapping(liger: Path | None) -> dict[str, Any]:
    """The candidates of each layer, the collection's first."""
    if liger is None:
        return dict(BUILTIN)
    return {
        layer: [kernel, f"{liger}:{layer}"] if layer != "ForCausalLM" else kernel for layer, kernel in BUILTIN.items()
    }


def batch(model: nn.Module, sequences: int, tokens: int) -> dict[str, torch.Tensor]:
    """Random tokens that are their own labels."""
    device = next(model.parameters()).device
    ids = torch.randint(model.config.vocab_size, (sequences, tokens), device=device)
    return {"input_ids": ids, "labels": ids}


def checked_table(report: CheckReport) -> None:
    """Print what was checked."""
    print("| kernel | mode | input | layers | verdict | error | allowed | plain layer's own | worst at |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in report:
        numbers = f"{row.error:.2g} | {row.allowed:.2g} | {row.own:.2g}"
        told = row.problem or row.where
        print(f"| {row.kernel} | {row.mode} | {row.input} | {row.modules} | {row.verdict} | {numbers} | {told} |")
    print(f"\n{report.summary}\n", flush=True)


def tuned_table(tuning: Tuning) -> None:
    """Print what was measured and chosen."""
    print("| layer | mode | input | candidate | plain us | candidate us | ratio | peak MiB | chosen |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for row in tuning:
        trial = row.trial
        times = f"{trial.plain_seconds * 1e6:.1f} | {trial.seconds * 1e6:.1f} | {trial.ratio:.2f}"
        memory = f"{trial.plain_bytes / 2**20:.1f} -> {trial.bytes / 2**20:.1f}"
        chosen = "yes" if row.chosen else trial.state
        print(f"| {row.layer} | {row.mode} | {row.input} | {trial.kernel} | {times} | {memory} | {chosen} |")
    print(f"\n{tuning.summary}\n", flush=True)


class Trainer:
    """A model with its optimizer and its batch."""

    def __init__(self, model: nn.Module, data: dict[str, torch.Tensor]) -> None:
        self.model, self.data = model, data
        self.device = next(model.parameters()).device
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.device.type == "cuda")

    def step(self) -> None:
        """Forward, backward, update."""
        self.model(**self.data, use_cache=False).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def seconds(self) -> float:
        """Take a step and wait for it."""
        start = time.perf_counter()
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - start


def step_table(models: dict[str, nn.Module], data: dict[str, torch.Tensor], steps: int) -> None:
    """Train the models in turns and print what a step costs."""
    trainers = {name: Trainer(model, data) for name, model in models.items()}
    peaks, seconds = {}, {name: [] for name in models}
    for name, trainer in trainers.items():
        trainer.step()
        peaks[name] = peak_memory(trainer.step, trainer.device)
    for _ in range(steps):
        for name, trainer in trainers.items():
            seconds[name].append(trainer.seconds())
    base = statistics.median(seconds["plain"])
    print("| model | step ms | of plain | tokens/s | peak GiB beyond weights |")
    print("| --- | --- | --- | --- | --- |")
    for name in models:
        found = statistics.median(seconds[name])
        tokens = data["input_ids"].numel() / found
        print(f"| {name} | {found * 1e3:.1f} | {found / base:.2f} | {tokens:,.0f} | {peaks[name] / 2**30:.2f} |")


def versions(device: str) -> str:
    """Name the device and what runs on it."""
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    found = [name, f"torch {torch.__version__}"]
    for package in ("transformers", "triton", "liger_kernel"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def run(options: argparse.Namespace, folder: Path) -> None:
    """Check, tune, train."""
    liger = liger_build(folder)
    session = kernelhub.Session(cache_dir=folder / "store", offline=True)
    kernels = mapping(liger)
    settings: dict[str, Any] = {"session": session}
    print(versions(options.device) + "\n", flush=True)
    model = make_model(options)
    small = batch(model, options.check_batch, options.check_length)
    data = batch(model, options.batch, options.length)
    checked_table(kernelhub.check(model, kernels, small, **settings))
    tuned_table(kernelhub.tune(model, kernels, data, **settings))
    models = {"plain": model}
    models["first candidates"] = kernelhub.kernelize(copy.deepcopy(model), BUILTIN, **settings)
    models["tuned"] = kernelhub.kernelize(
        copy.deepcopy(model), kernels, select="fastest", inputs=data, strict=False, **settings
    )
    step_table(models, data, options.steps)


def main() -> None:
    """Read the options and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--tiny", action="store_true", help="a tiny model and few tokens")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default 28)")
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default 4)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence (default 4096)")
    parser.add_argument("--check-batch", type=int, default=2, help="sequences to check with (default 2)")
    parser.add_argument("--check-length", type=int, default=512, help="tokens to check with (default 512)")
    parser.add_argument("--steps", type=int, default=10, help="steps timed (default 10)")
    options = parser.parse_args()
    if options.tiny:
        options.batch, options.length, options.check_batch, options.check_length = 2, 64, 2, 33
    sys.dont_write_bytecode = True
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
