"""Time each layer of the embedded collection on this CPU against the plain layer.

Both run in the same process, turn about; the table shows the shortest time of forward and backward
(other work on the machine only ever adds), their ratio (below 1: the kernel is faster), and for the
losses the peak memory of one forward and backward, each in a process of its own. Linux only.
"""

import argparse
import importlib.util
import multiprocessing
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional

COLLECTION = Path(__file__).parents[1] / "kernelhub" / "collection" / "kernelhub" / "layers"
HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 1024, 3072, 16, 8, 128

Pair = tuple[Callable[[], Tensor], Callable[[], Tensor], list[Tensor]]


def load(version: str) -> ModuleType:
    """Import the pure torch build of one version under a private name."""
    sys.dont_write_bytecode = True
    folder = COLLECTION / version / "build" / "torch-universal"
    name = f"_collection_{version}"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def leaf(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return random numbers that require a gradient."""
    return torch.randn(*shape).mul(scale).to(dtype).requires_grad_()


def rms_norm(kernels: ModuleType, tokens: int, dtype: torch.dtype) -> Pair:
    """Llama's norm of the residual stream."""
    x, weight = leaf(tokens, HIDDEN, dtype=dtype), leaf(HIDDEN, dtype=dtype)

    def plain() -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(dtype)

    return plain, lambda: kernels.rms_norm(x, weight, 1e-6), [x, weight]


def torch_rms_norm(kernels: ModuleType, tokens: int, dtype: torch.dtype) -> Pair:
    """torch.nn.RMSNorm."""
    x, weight = leaf(tokens, HIDDEN, dtype=dtype), leaf(HIDDEN, dtype=dtype)
    return (
        lambda: functional.rms_norm(x, (HIDDEN,), weight, 1e-6),
        lambda: kernels.rms_norm(x, weight, 1e-6, cast_last=True),
        [x, weight],
    )


def query_norm(kernels: ModuleType, tokens: int, dtype: torch.dtype) -> Pair:
    """Qwen3's norm of every query head."""
    x, weight = leaf(tokens, HEADS, HEAD_DIM, dtype=dtype), leaf(HEAD_DIM, dtype=dtype)

    def plain() -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return weight * wide.to(dtype)

    return plain, lambda: kernels.rms_norm(x, weight, 1e-6), [x, weight]


def silu_mul(kernels: ModuleType, tokens: int, dtype: torch.dtype) -> Pair:
    """The gate of SwiGLU, without its projections."""
    gate, up = leaf(tokens, INTERMEDIATE, dtype=dtype), leaf(tokens, INTERMEDIATE, dtype=dtype)
    return lambda: functional.silu(gate) * up, lambda: kernels.silu_mul(gate, up), [gate, up]


def gelu_mul(kernels: ModuleType, tokens: int, dtype: torch.dtype) -> Pair:
    """The gate of GeGLU (tanh), without its projections."""
    gate, up = leaf(tokens, INTERMEDIATE, dtype=dtype), leaf(tokens, INTERMEDIATE, dtype=dtype)
    return (
        lambda: functional.gelu(gate, approximate="tanh") * up,
        lambda: kernels.gelu_mul(gate, up, "tanh"),
        [gate, up],
    )


def rotary(kernels: ModuleType, tokens: int, dtype: torch.dtype) -> Pair:
    """Rotation of the transposed queries and keys."""
    q = leaf(1, tokens, HEADS, HEAD_DIM, dtype=dtype)
    k = leaf(1, tokens, KV_HEADS, HEAD_DIM, dtype=dtype)
    angles = torch.randn(1, tokens, HEAD_DIM)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)

    def half(x: Tensor) -> Tensor:
        return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)

    def plain() -> Tensor:
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        a, b = (x.transpose(1, 2) for x in (q, k))
        return torch.cat((a * c + half(a) * s, b * c + half(b) * s), dim=1)

    def kernel() -> Tensor:
        return torch.cat(kernels.rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin), dim=1)

    return plain, kernel, [q, k]


class PlainMLP(nn.Module):
    """The MLP of Llama and Qwen3."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False, dtype=dtype)
        self.up_proj = nn.Linear(HIDDEN, INTERMEDIATE, bias=False, dtype=dtype)
        self.down_proj = nn.Linear(INTERMEDIATE, HIDDEN, bias=False, dtype=dtype)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layer to `x` `(tokens, hidden)`."""
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def mlp(kernels: ModuleType, tokens: int, dtype: torch.dtype) -> Pair:
    """The whole SwiGLU layer."""
    module, x = PlainMLP(dtype), leaf(tokens, HIDDEN, dtype=dtype)
    forward = kernels.layers.SwiGLUMLP.forward
    return lambda: module(x), lambda: forward(module, x), [x, *module.parameters()]


def causal_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of transformers' models."""
    return functional.cross_entropy(logits.float(), labels)


def fused_loss(kernels: ModuleType, tokens: int, dtype: torch.dtype, vocabulary: int) -> Pair:
    """The output projection and the loss."""
    x = leaf(tokens, HIDDEN, dtype=dtype)
    weight = leaf(vocabulary, HIDDEN, dtype=dtype, scale=0.02)
    labels = torch.randint(vocabulary, (tokens,))
    return (
        lambda: causal_loss(functional.linear(x, weight), labels),
        lambda: kernels.fused_linear_cross_entropy(x, weight, labels),
        [x, weight],
    )


def masked_loss(kernels: ModuleType, tokens: int, dtype: torch.dtype, vocabulary: int) -> Pair:
    """As above, three tokens in four not counted, as in instruction tuning."""
    _, _, leaves = fused_loss(kernels, tokens, dtype, vocabulary)
    labels = torch.randint(vocabulary, (tokens,))
    labels[: tokens * 3 // 4] = -100
    x, weight = leaves
    return (
        lambda: causal_loss(functional.linear(x, weight), labels),
        lambda: kernels.fused_linear_cross_entropy(x, weight, labels),
        leaves,
    )


def logits_loss(kernels: ModuleType, tokens: int, dtype: torch.dtype, vocabulary: int) -> Pair:
    """The loss of logits that exist."""
    logits, labels = leaf(tokens, vocabulary, dtype=dtype), torch.randint(vocabulary, (tokens,))
    return (
        lambda: causal_loss(logits, labels),
        lambda: kernels.cross_entropy(logits, labels),
        [logits],
    )


LAYERS = {"rms_norm": rms_norm, "nn.RMSNorm": torch_rms_norm, "query_norm": query_norm}
LAYERS |= {"silu_mul": silu_mul, "gelu_mul": gelu_mul, "rotary": rotary, "mlp": mlp}
LOSSES = {"fused_loss": fused_loss, "fused_loss_masked": masked_loss, "logits_loss": logits_loss}


def step(function: Callable[[], Tensor], leaves: list[Tensor], grad: Tensor) -> float:
    """Return the seconds of one forward and backward."""
    begin = time.perf_counter()
    torch.autograd.grad(function(), leaves, grad)
    return time.perf_counter() - begin


def compare(pair: Pair, repeats: int) -> tuple[float, float]:
    """Return the shortest seconds of the plain function and of the kernel, run turn about."""
    plain, kernel, leaves = pair
    with torch.no_grad():
        grad = torch.randn_like(plain())
    times = [(step(plain, leaves, grad), step(kernel, leaves, grad)) for _ in range(repeats + 1)]
    first, second = zip(*times[1:], strict=True)
    return min(first), min(second)


def make_loss(name: str, version: str, tokens: int, dtype: torch.dtype, vocabulary: int) -> Pair:
    """Build one of the losses, from the newest build for those that version 1 lacks."""
    torch.manual_seed(0)
    return LOSSES[name](load(version), tokens, dtype, vocabulary)


def peak_of(queue: "multiprocessing.Queue[float]", which: int, arguments: tuple) -> None:
    """Put the growth of the peak resident memory during one step, in MiB, into the queue."""
    pair = make_loss(*arguments)
    before = memory_status("VmRSS")
    torch.autograd.grad(pair[which](), pair[2])
    queue.put((memory_status("VmHWM") - before) / 1024)


def memory_status(key: str) -> int:
    """Return a figure of this process in KiB; rusage would include the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{key}:")[2].split()[0])


def peak(which: int, *arguments: object) -> float:
    """Run `peak_of` in a new process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=peak_of, args=(queue, which, arguments))
    process.start()
    result = queue.get()
    process.join()
    return result


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens of the layers (default 2048)")
    parser.add_argument("--loss-tokens", type=int, default=1024, help="tokens of the losses (default 1024)")
    parser.add_argument("--vocabulary", type=int, default=32768, help="rows of the head (default 32768)")
    parser.add_argument("--repeats", type=int, default=15, help="timed turns (default 15)")
    parser.add_argument("--version", default="v2", choices=("v1", "v2"))
    parser.add_argument("--only", nargs="*", default=[*LAYERS, *LOSSES], help="rows to measure")
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    options = parser.parse_args()
    kernels = load(options.version)
    print(f"{'layer':<18} {'dtype':<9} {'plain ms':>9} {'kernel ms':>9} {'ratio':>6}  peak MiB")
    for name in options.only:
        for dtype in (getattr(torch, dtype) for dtype in options.dtype):
            torch.manual_seed(0)
            memory = ""
            if name in LAYERS:
                if not hasattr(kernels, name) and name == "gelu_mul":
                    continue
                pair = LAYERS[name](kernels, options.tokens, dtype)
            else:
                if name == "logits_loss" and not hasattr(kernels, "cross_entropy"):
                    continue
                arguments = (name, options.version, options.loss_tokens, dtype, options.vocabulary)
                pair = make_loss(*arguments)
                first, second = peak(0, *arguments), peak(1, *arguments)
                memory = f"{first:.0f} -> {second:.0f} ({second / first:.2f})"
            plain, kernel = compare(pair, options.repeats)
            ratio = kernel / plain
            print(
                f"{name:<18} {str(dtype)[6:]:<9} {plain * 1e3:9.2f} {kernel * 1e3:9.2f} {ratio:6.2f}  {memory}",
                flush=True,
            )


if __name__ == "__main__":
    main()
