"""Train a Qwen3-0.6B-shaped model on one GPU, plain and with the embedded collection.

First every kernel is checked against float64, then timed against the plain layer, then whole
training steps (forward, backward, AdamW) are timed and their peak memory read. Weights are random.
"""

import argparse
import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3 import modeling_qwen3

BUILDS = Path(__file__).parents[2] / "kernelhub" / "collection" / "kernelhub" / "layers"
DEVICE = "cuda"
LAYERS = ("RMSNorm", "SwiGLUMLP", "FusedLinearCrossEntropy")


def load(version: str, variant: str) -> ModuleType:
    """Import one build of the collection under a private name."""
    sys.dont_write_bytecode = True
    folder = BUILDS / version / "build" / variant
    name = f"_collection_{version}_{variant}".replace("-", "_")
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


# Checks


def half_rotated(x: Tensor) -> Tensor:
    """Return the second half of the last dimension negated, then the first."""
    low, high = x.chunk(2, dim=-1)
    return torch.cat((-high, low), dim=-1)


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise as Llama does."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate q and k and return them in one tensor."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([x * cos + half_rotated(x) * sin for x in (q, k)], dim=1)


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the loss of a model's head."""
    return plain_logits_loss(functional.linear(hidden, weight, bias), labels)


def plain_logits_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the loss of logits, in float32 or wider."""
    return functional.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


Case = tuple[str, Callable[..., Tensor], Callable[..., Tensor], list[Tensor], list[Tensor]]


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Return float64 random numbers on the device."""
    return torch.randn(*shape, dtype=torch.float64, device=DEVICE) * scale


def cases(kernels: ModuleType) -> Iterator[Case]:
    """Yield name, plain function, kernel, differentiable inputs and other inputs."""
    for rows, width in ((37, 100), (4096, 128), (513, 1024), (3, 5000), (0, 64)):
        x, weight, bias = random(rows, width), random(width), random(width)
        yield f"rms_norm {rows}x{width}", plain_rms_norm, lambda x, w: kernels.rms_norm(x, w, 1e-6), [x, weight], []
        yield (
            f"layer_norm {rows}x{width}",
            lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, 1e-5),
            lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5),
            [x, weight, bias],
            [],
        )
    strided = random(7, 64, 9).transpose(1, 2)
    yield "rms_norm strided", plain_rms_norm, lambda x, w: kernels.rms_norm(x, w, 1e-6), [strided, random(64)], []
    gate, up = random(5, 7, 333), random(5, 7, 333)
    yield "silu_mul", lambda g, u: functional.silu(g) * u, kernels.silu_mul, [gate, up], []
    for form in ("none", "tanh"):
        yield (
            f"gelu_mul {form}",
            lambda g, u, form=form: functional.gelu(g, approximate=form) * u,
            lambda g, u, form=form: kernels.gelu_mul(g, u, form),
            [gate, up],
            [],
        )
    linear = sys.modules[f"{kernels.__name__}.gated"]._GatedLinear.apply
    yield (
        "silu_mul linear",
        lambda g, u, w, b: functional.linear(functional.silu(g) * u, w, b),
        lambda g, u, w, b: linear(g, u, w, b, "silu"),
        [gate, up, random(65, 333, scale=0.05), random(65)],
        [],
    )
    for heads, dim, batch in ((16, 128, 3), (5, 24, 1)):
        q, k = random(3, 11, heads, dim).transpose(1, 2), random(3, 11, 3, dim).transpose(1, 2)
        angles = random(batch, 11, dim)
        yield (
            f"rotary {heads}x{dim}",
            plain_rotary,
            lambda *a: torch.cat(kernels.rotary_pos_emb(*a), dim=1),
            [q, k],
            [angles.cos(), angles.sin()],
        )
    for tokens, hidden, vocabulary in ((300, 64, 1000), (2500, 96, 5003)):
        x, weight, bias = random(tokens, hidden), random(vocabulary, hidden, scale=0.3), random(vocabulary)
        labels = torch.randint(vocabulary, (tokens,), device=DEVICE)
        labels[::5] = -100
        name = f"{tokens}x{hidden}x{vocabulary}"
        yield f"fused loss {name}", plain_loss, kernels.fused_linear_cross_entropy, [x, weight], [labels]
        yield (
            f"fused loss bias {name}",
            lambda x, w, b, y: plain_loss(x, w, y, b),
            lambda x, w, b, y: kernels.fused_linear_cross_entropy(x, w, y, b),
            [x, weight, bias],
            [labels],
        )
        logits = random(tokens, vocabulary, scale=3)
        yield f"cross_entropy {name}", plain_logits_loss, kernels.cross_entropy, [logits], [labels]


def differentiate(function: Callable[..., Tensor], inputs: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of all inputs for a fixed upstream gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, *others)
    upstream = torch.linspace(0.5, 1.5, max(out.numel(), 1), device=DEVICE, dtype=torch.float64)
    upstream = upstream[: out.numel()].reshape(out.shape).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def distance(got: Tensor, exact: Tensor) -> float:
    """Return the relative error in the Euclidean norm."""
    if got.numel() == 0:
        return 0.0
    return ((got.double() - exact).norm() / exact.norm().clamp_min(1e-30)).item()


def check(kernels: ModuleType) -> None:
    """Compare every kernel with float64; a kernel may err as much as half more than plain torch."""
    worst: dict[torch.dtype, tuple[float, str]] = {}
    failures = []
    torch.manual_seed(0)
    for name, plain, kernel, inputs, others in cases(kernels):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            low = [x.to(dtype) for x in inputs]
            rest = [x.to(dtype) if x.is_floating_point() else x for x in others]
            exact_rest = [x.double() if x.is_floating_point() else x for x in rest]
            exact = differentiate(plain, [x.double() for x in low], exact_rest)
            theirs = differentiate(plain, low, rest)
            try:
                ours = differentiate(kernel, low, rest)
            except Exception as error:  # the other kernels are still to be checked
                failures.append(f"{name} {dtype}: {type(error).__name__}: {str(error)[:500]}")
                continue
            floor = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}[dtype]
            for part, (a, b, c) in enumerate(zip(ours, theirs, exact, strict=True)):
                error, limit = distance(a, c), max(1.5 * distance(b, c), floor)
                same_kind = a.dtype == b.dtype and a.shape == b.shape
                if not (error <= limit and same_kind):
                    failures.append(f"{name} {dtype} part {part}: {error:.2e} > {limit:.2e}, {a.dtype} {b.dtype}")
                worst[dtype] = max(worst.get(dtype, (0.0, "")), (error, name))
    for dtype, (error, name) in worst.items():
        print(f"check {dtype}: largest relative error {error:.2e} ({name})")
    failures += check_empty_mean(kernels)
    print("\n".join(f"FAILED {line}" for line in failures) or "all kernels agree with float64")


def check_empty_mean(kernels: ModuleType) -> list[str]:
    """Check that without a counted token the loss is nan and the gradient zero, as in torch."""
    labels = torch.full((8,), -100, device=DEVICE)
    loss, grad, _ = differentiate(
        kernels.fused_linear_cross_entropy, [random(8, 16).float(), random(50, 16).float()], [labels]
    )
    return [] if loss.isnan() and not grad.any() else ["a mean over no token"]


# Times of single kernels


def milliseconds(function: Callable[[], object], repeats: int = 20) -> float:
    """Return the median time on the device, without waiting for the host."""
    for _ in range(3):
        function()
    times = []
    for _ in range(repeats):
        # The device is kept busy while the host queues the launches to be timed.
        torch.cuda._sleep(5_000_000)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        times.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in times)


def timed_cases(kernels: ModuleType, tokens: int) -> Iterator[Case]:
    """Yield cases in the shapes of the model."""
    torch.manual_seed(0)

    def low(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE) * scale

    norm = lambda x, w: kernels.rms_norm(x, w, 1e-6)  # noqa: E731 - a name for a table row
    yield "rms_norm hidden", plain_rms_norm, norm, [low(tokens, 1024), low(1024)], []
    yield "rms_norm query", plain_rms_norm, norm, [low(tokens, 16, 128), low(128)], []
    yield (
        "layer_norm",
        lambda x, w, b: functional.layer_norm(x, (1024,), w, b),
        lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5),
        [low(tokens, 1024), low(1024), low(1024)],
        [],
    )
    gate, up = low(tokens, 3072), low(tokens, 3072)
    yield "silu_mul", lambda g, u: functional.silu(g) * u, kernels.silu_mul, [gate, up], []
    q, k = low(4, tokens // 4, 16, 128).transpose(1, 2), low(4, tokens // 4, 8, 128).transpose(1, 2)
    angles = torch.randn(1, tokens // 4, 128, device=DEVICE)
    cos_sin = [angles.cos().bfloat16(), angles.sin().bfloat16()]
    yield (
        "rotary",
        lambda *a: plain_rotary(*a),
        lambda *a: torch.cat(kernels.rotary_pos_emb(*a), dim=1),
        [q, k],
        cos_sin,
    )
    labels = torch.randint(151936, (tokens,), device=DEVICE)
    head = [low(tokens, 1024), low(151936, 1024, scale=0.02)]
    yield "fused loss", plain_loss, kernels.fused_linear_cross_entropy, head, [labels]
    logits = [low(tokens // 4, 151936)]
    yield (
        "cross_entropy",
        plain_logits_loss,
        kernels.cross_entropy,
        logits,
        [labels[: tokens // 4]],
    )


def time_kernels(kernels: ModuleType, tokens: int) -> None:
    """Print forward plus backward times of each kernel and the plain layer."""
    print(f"\n{'layer':<18} {'plain ms':>9} {'kernel ms':>9} {'ratio':>6}")
    for name, plain, kernel, inputs, others in timed_cases(kernels, tokens):
        leaves = [x.detach().requires_grad_() for x in inputs]
        upstream = torch.randn_like(plain(*leaves, *others))
        first, second = (
            milliseconds(
                lambda f=f, leaves=leaves, o=others, u=upstream: torch.autograd.grad(f(*leaves, *o), leaves, u)
            )
            for f in (plain, kernel)
        )
        print(f"{name:<18} {first:9.3f} {second:9.3f} {second / first:6.2f}", flush=True)


# Training steps


def make_model(layers: int) -> nn.Module:
    """Return a model of the shape of Qwen3-0.6B with random bfloat16 weights, in training mode."""
    config = Qwen3Config(
        vocab_size=151936,
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
        return Qwen3ForCausalLM(config).to(torch.bfloat16).train()


@contextmanager
def bound(model: nn.Module, kernels: ModuleType | None, only: tuple[str, ...]) -> Iterator[int]:
    """Replace the forwards that fit, and the rotary function; yield how many were replaced."""
    if kernels is None:
        yield 0
        return
    original, count = modeling_qwen3.apply_rotary_pos_emb, 0
    for module in model.modules():
        for name in only:
            layer = getattr(kernels.layers, name, None)
            if layer is not None and layer.kernel_condition(module) is True:
                module.forward = MethodType(layer.forward, module)
                count += 1
    if "rotary_pos_emb" in only:
        modeling_qwen3.apply_rotary_pos_emb = kernels.layers.rotary_pos_emb
        count += 1
    try:
        yield count
    finally:
        modeling_qwen3.apply_rotary_pos_emb = original


def train(options: argparse.Namespace, kernels: ModuleType | None, only: tuple[str, ...]) -> dict[str, float]:
    """Return tokens per second, peak memory in GiB and the loss of each step."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = make_model(options.layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    batches = torch.randint(151936, (options.warmup + options.steps, options.batch, options.length), device=DEVICE)
    losses, times = [], []
    with bound(model, kernels, only) as count:
        for ids in batches:
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
    seconds = statistics.median(b.elapsed_time(e) for b, e in times[options.warmup :]) / 1e3
    return {
        "bound": count,
        "tokens": options.batch * options.length / seconds,
        "memory": torch.cuda.max_memory_allocated() / 2**30,
        "first": losses[0].item(),
        "last": losses[-1].item(),
    }


def main() -> None:
    """Check, time and train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a step (default 4)")
    parser.add_argument("--length", type=int, default=4096, help="tokens of a sequence (default 4096)")
    parser.add_argument("--layers", type=int, default=28, help="layers of the model (default 28)")
    parser.add_argument("--warmup", type=int, default=4, help="steps not timed (default 4)")
    parser.add_argument("--steps", type=int, default=10, help="steps timed (default 10)")
    parser.add_argument("--skip", nargs="*", default=[], choices=("check", "kernels", "training", "ablation"))
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    triton = load("v2", "torch-cuda")
    if "check" not in options.skip:
        check(triton)
    if "kernels" not in options.skip:
        time_kernels(triton, options.batch * options.length)
    if "training" in options.skip:
        return
    everything = (*LAYERS, "rotary_pos_emb")
    runs = {"plain": (None, everything), "v2 torch-cuda": (triton, everything)}
    runs |= {"v2 torch-universal": (load("v2", "torch-universal"), everything)}
    if "ablation" not in options.skip:
        runs |= {f"only {name}": (triton, (name,)) for name in everything}
    print(f"\n{'build':<30} {'bound':>5} {'tokens/s':>9} {'x plain':>7} {'GiB':>6} {'x plain':>7}  loss first, last")
    results: dict[str, dict[str, float]] = {}
    for name, (kernels, only) in runs.items():
        got = results[name] = train(options, kernels, only)
        plain = results["plain"]
        print(
            f"{name:<30} {got['bound']:5} {got['tokens']:9.0f} {got['tokens'] / plain['tokens']:7.2f} "
            f"{got['memory']:6.2f} {got['memory'] / plain['memory']:7.2f}  {got['first']:.4f} {got['last']:.4f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
