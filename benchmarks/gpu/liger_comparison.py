"""Train a Qwen3-0.6B-shaped model on one GPU: plain, with kernelhub's collection, and with liger-kernel's functions.

Every kernel of kernelhub comes by mapping strings: those of the shipped collection, and Liger's from a repository that
wraps them (`liger_repository.py`), served by a Hub on this machine. liger-kernel's own patching runs beside them. Speed
and memory are measured for whole training steps (forward, backward, AdamW) on random bfloat16 weights; the loss curve
over 50 steps is compared with the plain model in float32. liger-kernel is left out where it cannot be imported; it
patches its classes for the whole process, so it runs last.
"""

import argparse
import gc
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import liger_repository
import torch
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

import kernelhub

DEVICE = "cuda"
VOCABULARY = 151936
SWITCHES = {"rope": True, "rms_norm": True, "swiglu": True, "fused_linear_cross_entropy": True}


def make_model(layers: int, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    """Return a model of the shape of Qwen3-0.6B with random weights, in training mode."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        return Qwen3ForCausalLM(config).to(torch.bfloat16).to(dtype).train()


def plain(model: nn.Module) -> nn.Module:
    """Leave the model as it is."""
    return model


def with_kernelhub(model: nn.Module) -> nn.Module:
    """Bind the layers that Liger's switches name."""
    return kernelhub.kernelize(model, kernelhub.KernelConfig.from_liger(**SWITCHES, source="builtin"))


def with_liger_repository(model: nn.Module) -> nn.Module:
    """Bind Liger's functions as a kernel repository from a Hub."""
    from kernelhub.serve import LocalHub  # noqa: PLC0415  # needs packages that may be missing

    with tempfile.TemporaryDirectory() as folder:
        liger_repository.write(Path(folder) / "hub")
        with LocalHub(Path(folder) / "hub") as hub:
            session = kernelhub.Session(cache_dir=Path(folder) / "store", endpoint=hub.url, token=False)
            return kernelhub.kernelize(model, liger_repository.MAPPING, session=session)


def with_liger(model: nn.Module) -> nn.Module:
    """Let liger-kernel patch the model and its classes."""
    from liger_kernel.transformers import apply_liger_kernel_to_qwen3  # noqa: PLC0415  # may be missing

    apply_liger_kernel_to_qwen3(**SWITCHES, model=model)
    return model


def compiled(prepare: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Compile the decoder, which leaves the fused loss around it; a plain model as a whole."""

    def apply(model: nn.Module) -> nn.Module:
        model = prepare(model)
        if prepare is plain:
            return torch.compile(model)
        model.model.compile()
        return model

    return apply


def layers_compiled(prepare: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    """Compile every decoder layer by itself: what is around them (masks, embeddings, the loss) stays as it is."""

    def apply(model: nn.Module) -> nn.Module:
        model = prepare(model)
        for layer in model.model.layers:
            layer.compile()
        return model

    return apply


RUNS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": plain,
    "kernelhub": with_kernelhub,
    "kernelhub, compiled": compiled(with_kernelhub),
    "kernelhub, layers compiled": layers_compiled(with_kernelhub),
    "plain, compiled": compiled(plain),
    "plain, layers compiled": layers_compiled(plain),
    "liger-kernel by kernelhub": with_liger_repository,
    "liger-kernel": with_liger,
}


def batches(count: int, distinct: int, batch: int, length: int) -> list[torch.Tensor]:
    """Return `count` batches of random tokens, of which `distinct` differ."""
    torch.manual_seed(1)
    made = [torch.randint(VOCABULARY, (batch, length), device=DEVICE) for _ in range(distinct)]
    return [made[index % distinct] for index in range(count)]


def train(model: nn.Module, data: list[torch.Tensor], learning_rate: float) -> tuple[list[float], list[float]]:
    """Return the loss and the milliseconds of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, fused=True)
    losses, times = [], []
    for ids in data:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        end.record()
        losses.append(loss.detach())
        times.append((begin, end))
    torch.cuda.synchronize()
    return [loss.item() for loss in losses], [begin.elapsed_time(end) for begin, end in times]


def fresh() -> None:
    """Give the memory of the last run back."""
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()


def speed(options: argparse.Namespace, name: str) -> tuple[float, float]:
    """Return tokens per second and peak memory in GiB."""
    fresh()
    model = RUNS[name](make_model(options.layers))
    data = batches(options.warmup + options.steps, 4, options.batch, options.length)
    _, times = train(model, data, 1e-4)
    tokens = options.batch * options.length / statistics.median(times[options.warmup :]) * 1e3
    return tokens, torch.cuda.max_memory_allocated() / 2**30


def curve(options: argparse.Namespace, name: str, dtype: torch.dtype = torch.bfloat16) -> list[float]:
    """Return the loss of every step of the curve."""
    fresh()
    data = batches(options.curve, 5, 1, options.curve_length)
    return train(RUNS[name](make_model(options.layers, dtype)), data, 1e-4)[0]


def measure(options: argparse.Namespace) -> None:
    """Print a line for each run, in the order in which they cannot disturb each other."""
    exact = curve(options, "plain", torch.float32) if "curve" in options.what else []
    if exact:
        print(f"loss over {options.curve} steps, plain in float32: {exact[0]:.4f} to {exact[-1]:.4f}")
    base: tuple[float, float] | None = None
    for name in [name for name in RUNS if name in options.runs]:
        try:
            if "speed" in options.what:
                tokens, memory = speed(options, name)
                base = base or (tokens, memory)
                ratios = f"{tokens / base[0]:.2f} x, {memory:.2f} GiB = {memory / base[1]:.2f} x"
                print(f"{name:<26} speed  {tokens:9.0f} tokens/s = {ratios} the first", flush=True)
            if exact:
                losses = curve(options, name)
                distances = [abs(loss - other) for loss, other in zip(losses, exact, strict=True)]
                told = (
                    f"mean {statistics.mean(distances):.5f}, largest {max(distances):.5f}, last loss {losses[-1]:.4f}"
                )
                print(f"{name:<26} curve  distance from float32: {told}", flush=True)
        except (ImportError, RuntimeError, TypeError) as error:
            print(f"{name:<26} left out: {type(error).__name__}: {str(error)[:200]}", flush=True)


def versions() -> str:
    """Name the card and what runs on it."""
    found: list[Any] = [torch.cuda.get_device_name(), f"torch {torch.__version__}"]
    for package in ("transformers", "triton", "liger_kernel"):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"no {package}")
    return ", ".join(found)


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["speed", "curve"], help="speed, curve, or both (default)")
    parser.add_argument("--runs", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default 4)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence (default 4096)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default 28)")
    parser.add_argument("--warmup", type=int, default=4, help="steps not timed (default 4)")
    parser.add_argument("--steps", type=int, default=8, help="steps timed (default 8)")
    parser.add_argument("--curve", type=int, default=50, help="steps of the loss curve (default 50)")
    parser.add_argument("--curve-length", type=int, default=2048, help="tokens of a step of the curve")
    options = parser.parse_args()
    sys.dont_write_bytecode = True
    print(versions(), flush=True)
    measure(options)


if __name__ == "__main__":
    main()
