"""The embedded kernel collection: right in value and gradient, and bound only where it fits."""

import ast
import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

ROOT = Path(__file__).parents[1] / "kernelhub" / "collection" / "kernelhub" / "layers"
PLAIN_BUILDS = ("v1/build/torch-universal", "v2/build/torch-universal")
TRITON_BUILD = "v2/build/torch-cuda"
# What the formulas themselves lose in each dtype; beyond it, half more than plain torch is allowed.
FLOORS = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton kernels need a CUDA device")
dtypes = pytest.mark.parametrize("dtype", FLOORS, ids=lambda dtype: str(dtype)[6:])


def load(build: str) -> ModuleType:
    """Import a build under a private name, as a loader does, leaving no byte code behind."""
    name = "_kernel_" + build.replace("/", "_").replace("-", "_")
    if name not in sys.modules:
        folder = ROOT / build
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
        try:
            spec.loader.exec_module(module)
        finally:
            sys.dont_write_bytecode = writes
    return sys.modules[name]


@pytest.fixture(params=[*PLAIN_BUILDS, pytest.param(TRITON_BUILD, marks=needs_gpu)])
def kernels(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


@pytest.fixture(params=[PLAIN_BUILDS[1], pytest.param(TRITON_BUILD, marks=needs_gpu)])
def kernels_v2(request: pytest.FixtureRequest) -> ModuleType:
    return load(request.param)


def device_of(kernels: ModuleType) -> str:
    return "cuda" if "cuda" in kernels.__name__ else "cpu"


def differentiate(function: Callable[..., Tensor], inputs: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    """Return the output and the gradients of the inputs for a fixed upstream gradient."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves, *others)
    upstream = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64, device=out.device)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream.reshape(out.shape).to(out.dtype))]


def assert_right(
    kernels: ModuleType,
    kernel: Callable[..., Tensor],
    plain: Callable[..., Tensor],
    inputs: list[Tensor],
    others: list[Tensor] = (),
    dtype: torch.dtype = torch.float32,
) -> None:
    """Assert that the kernel errs no more against float64 than plain torch does, or the dtype allows."""
    device = device_of(kernels)
    low = [x.to(device, dtype) for x in inputs]
    rest = [x.to(device, dtype) if x.is_floating_point() else x.to(device) for x in others]
    wide_rest = [x.double() if x.is_floating_point() else x for x in rest]
    exact = differentiate(plain, [x.double() for x in low], wide_rest)
    ours, theirs = differentiate(kernel, low, rest), differentiate(plain, low, rest)
    for got, usual, want in zip(ours, theirs, exact, strict=True):
        assert (got.dtype, got.shape) == (usual.dtype, usual.shape)
        if want.numel():
            assert (got - want).norm() <= max(1.5 * (usual - want).norm(), FLOORS[dtype] * want.norm() + 1e-6)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def plain_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: int = 1) -> Tensor:
    def half(x: Tensor) -> Tensor:
        low, high = x.chunk(2, dim=-1)
        return torch.cat((-high, low), dim=-1)

    cos, sin = cos.unsqueeze(dim), sin.unsqueeze(dim)
    return torch.cat([(x * cos + half(x) * sin).flatten() for x in (q, k)])


def plain_loss(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None = None) -> Tensor:
    return plain_logits_loss(functional.linear(hidden, weight, bias), labels)


def plain_logits_loss(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, labels, reduction=reduction)


# Functions


@dtypes
@pytest.mark.parametrize("shape", [(3, 5, 64), (7, 33), (600, 1024), (0, 16), (2, 1)])
def test_rms_norm_is_right(kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [torch.randn(shape), torch.randn(shape[-1])]
    assert_right(kernels, lambda x, w: kernels.rms_norm(x, w, 1e-6), plain_rms_norm, inputs, dtype=dtype)


@dtypes
def test_rms_norm_that_casts_last_is_right(kernels: ModuleType, dtype: torch.dtype) -> None:
    inputs = [torch.randn(6, 40), torch.randn(40)]
    assert_right(
        kernels,
        lambda x, w: kernels.rms_norm(x, w, 1e-5, cast_last=True),
        lambda x, w: functional.rms_norm(x, (40,), w, 1e-5),
        inputs,
        dtype=dtype,
    )


def test_rms_norm_takes_views_that_are_not_contiguous(kernels: ModuleType) -> None:
    inputs = [torch.randn(4, 16, 6).transpose(1, 2), torch.randn(32)[::2]]
    assert_right(kernels, lambda x, w: kernels.rms_norm(x, w, 1e-6), plain_rms_norm, inputs)


def test_rms_norm_promotes_a_float32_weight_as_llama_does(kernels: ModuleType) -> None:
    device = device_of(kernels)
    x, weight = torch.randn(3, 8, device=device).bfloat16(), torch.randn(8, device=device)
    assert kernels.rms_norm(x, weight, 1e-6).dtype == torch.float32
    assert kernels.rms_norm(x, weight, 1e-6, cast_last=True).dtype == torch.bfloat16


@dtypes
@pytest.mark.parametrize("shape", [(2, 3, 31), (0, 8), (700, 1000)])
def test_silu_mul_is_right(kernels: ModuleType, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    inputs = [torch.randn(shape) * 3, torch.randn(shape)]
    assert_right(kernels, kernels.silu_mul, lambda g, u: functional.silu(g) * u, inputs, dtype=dtype)


@dtypes
@pytest.mark.parametrize("form", ["none", "tanh"])
def test_gelu_mul_is_right(kernels_v2: ModuleType, form: str, dtype: torch.dtype) -> None:
    assert_right(
        kernels_v2,
        lambda g, u: kernels_v2.gelu_mul(g, u, form),
        lambda g, u: functional.gelu(g, approximate=form) * u,
        [torch.randn(5, 77) * 3, torch.randn(5, 77)],
        dtype=dtype,
    )


def test_gates_reject_tensors_that_differ(kernels: ModuleType) -> None:
    with pytest.raises(ValueError, match="differ"):
        kernels.silu_mul(torch.ones(2, 3), torch.ones(3))


def test_gelu_mul_rejects_an_unknown_form(kernels_v2: ModuleType) -> None:
    with pytest.raises(ValueError, match="fast"):
        kernels_v2.gelu_mul(torch.ones(2), torch.ones(2), "fast")


@dtypes
@pytest.mark.parametrize("batch", [1, 3])
def test_rotary_is_right_for_transposed_views(kernels: ModuleType, batch: int, dtype: torch.dtype) -> None:
    q, k = torch.randn(3, 7, 5, 24).transpose(1, 2), torch.randn(3, 7, 2, 24).transpose(1, 2)
    # Cosines and sines need not repeat in the second half.
    tables = [torch.randn(batch, 7, 24), torch.randn(batch, 7, 24)]

    def kernel(*inputs: Tensor) -> Tensor:
        return torch.cat([x.flatten() for x in kernels.rotary_pos_emb(*inputs)])

    assert_right(kernels, kernel, plain_rotary, [q, k], tables, dtype)


def test_rotary_keeps_the_memory_order(kernels: ModuleType) -> None:
    device = device_of(kernels)
    q = torch.randn(2, 7, 4, 8, device=device).transpose(1, 2)
    out, _ = kernels.rotary_pos_emb(q, q, *torch.randn(2, 2, 7, 8, device=device))
    assert out.stride() == q.stride()


@pytest.mark.parametrize("tables_shape", [(1, 7, 8), (2, 7, 8)])
def test_rotary_is_right_with_heads_last(kernels: ModuleType, tables_shape: tuple[int, ...]) -> None:
    inputs = [torch.randn(2, 7, 4, 8), torch.randn(2, 7, 2, 8)]

    def kernel(*tensors: Tensor) -> Tensor:
        return torch.cat([x.flatten() for x in kernels.rotary_pos_emb(*tensors, unsqueeze_dim=2)])

    tables = [torch.randn(tables_shape), torch.randn(tables_shape)]
    assert_right(kernels, kernel, lambda *t: plain_rotary(*t, dim=2), inputs, tables)


def test_rotary_differentiates_its_tables_when_asked(kernels: ModuleType) -> None:
    inputs = [torch.randn(2, 4, 7, 8), torch.randn(2, 2, 7, 8), torch.randn(1, 7, 8), torch.randn(1, 7, 8)]

    def kernel(*tensors: Tensor) -> Tensor:
        return torch.cat([x.flatten() for x in kernels.rotary_pos_emb(*tensors)])

    assert_right(kernels, kernel, plain_rotary, inputs)


def test_rotary_passes_on_what_its_tables_do_not_cover(kernels: ModuleType) -> None:
    device = device_of(kernels)
    q, tables = torch.randn(1, 2, 3, 8, device=device), torch.randn(2, 1, 3, 4, device=device)
    whole, _ = kernels.rotary_pos_emb(q, q, *tables)
    part, _ = kernels.rotary_pos_emb(q[..., :4], q[..., :4], *tables)
    torch.testing.assert_close(whole, torch.cat((part, q[..., 4:]), dim=-1))


def labels_for(tokens: int, vocabulary: int) -> Tensor:
    labels = torch.randint(vocabulary, (tokens,))
    labels[::3] = -100
    return labels


@dtypes
@pytest.mark.parametrize(("tokens", "hidden", "vocabulary"), [(5, 8, 11), (1030, 24, 301)])
def test_fused_loss_is_right(
    kernels: ModuleType, tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype
) -> None:
    inputs = [torch.randn(tokens, hidden), torch.randn(vocabulary, hidden) * 0.3]
    labels = labels_for(tokens, vocabulary)
    assert_right(kernels, kernels.fused_linear_cross_entropy, plain_loss, inputs, [labels], dtype)


@dtypes
def test_fused_loss_with_a_bias_is_right(kernels: ModuleType, dtype: torch.dtype) -> None:
    labels = labels_for(20, 33)
    assert_right(
        kernels,
        lambda x, w, b, y: kernels.fused_linear_cross_entropy(x, w, y, b),
        lambda x, w, b, y: plain_loss(x, w, y, b),
        [torch.randn(20, 16), torch.randn(33, 16), torch.randn(33)],
        [labels],
        dtype,
    )


@pytest.mark.parametrize("frozen", [0, 1])
def test_fused_loss_gives_no_gradient_to_what_is_frozen(kernels: ModuleType, frozen: int) -> None:
    device = device_of(kernels)
    leaves = [torch.randn(6, 8, device=device), torch.randn(9, 8, device=device)]
    leaves[1 - frozen].requires_grad_()
    labels = labels_for(6, 9).to(device)
    kernels.fused_linear_cross_entropy(*leaves, labels).backward()
    got = leaves[1 - frozen].grad.clone()
    leaves[1 - frozen].grad = None
    plain_loss(*leaves, labels).backward()
    torch.testing.assert_close(got, leaves[1 - frozen].grad)
    assert leaves[frozen].grad is None


def test_fused_loss_survives_a_second_backward(kernels: ModuleType) -> None:
    device = device_of(kernels)
    x, weight = torch.randn(6, 8, device=device, requires_grad=True), torch.randn(9, 8, device=device)
    loss = kernels.fused_linear_cross_entropy(x, weight, labels_for(6, 9).to(device))
    first, second = (torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_a_loss_scale_does_not_overflow_half_precision(kernels: ModuleType) -> None:
    device = device_of(kernels)
    x = torch.randn(1, 8, device=device).half().requires_grad_()
    weight = torch.randn(9, 8, device=device).half() * 1e-3
    loss = kernels.fused_linear_cross_entropy(x, weight, torch.tensor([3], device=device))
    (loss * 2.0**17).backward()
    assert x.grad.isfinite().all()
    assert x.grad.any()


def losses(kernels: ModuleType) -> list[tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]]:
    """Return kernel, plain function and inputs of each loss of the build."""
    device = device_of(kernels)
    hidden = [torch.randn(6, 8, device=device), torch.randn(9, 8, device=device)]
    found = [(kernels.fused_linear_cross_entropy, plain_loss, hidden)]
    if hasattr(kernels, "cross_entropy"):
        found.append((kernels.cross_entropy, plain_logits_loss, [torch.randn(6, 9, device=device)]))
    return found


def test_a_mean_over_no_token_is_what_torch_makes_of_it(kernels: ModuleType) -> None:
    labels = torch.full((6,), -100, device=device_of(kernels))
    for kernel, plain, inputs in losses(kernels):
        for got, want in zip(
            differentiate(kernel, inputs, [labels]), differentiate(plain, inputs, [labels]), strict=True
        ):
            torch.testing.assert_close(got, want, equal_nan=True)


def test_no_tokens_at_all_give_what_torch_makes_of_them(kernels: ModuleType) -> None:
    labels = torch.empty(0, dtype=torch.long, device=device_of(kernels))
    for kernel, plain, (first, *others) in losses(kernels):
        got = differentiate(kernel, [first[:0], *others], [labels])
        want = differentiate(plain, [first[:0], *others], [labels])
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("wrong", [9, -1, -101])
def test_labels_out_of_range_are_an_error(wrong: int) -> None:
    for build in PLAIN_BUILDS:
        for kernel, _, inputs in losses(load(build)):
            with pytest.raises(IndexError, match=str(wrong)):
                kernel(*inputs, torch.tensor([0, 1, wrong, 2, 3, 4]))


def test_another_ignored_label_and_a_number_of_items_are_respected(kernels: ModuleType) -> None:
    device = device_of(kernels)
    labels = torch.tensor([0, 8, 2, 8, 4, 5], device=device)
    for kernel, plain, inputs in losses(kernels):
        loss = kernel(*inputs, labels, ignore_index=8, num_items=torch.tensor(7))
        counted = labels.masked_fill(labels == 8, -100)
        torch.testing.assert_close(loss, plain(*inputs, counted) * 4 / 7)


@dtypes
def test_cross_entropy_is_right_and_leaves_the_logits_alone(kernels_v2: ModuleType, dtype: torch.dtype) -> None:
    logits, labels = torch.randn(9, 1003) * 3, labels_for(9, 1003)
    before = logits.clone()
    assert_right(kernels_v2, kernels_v2.cross_entropy, plain_logits_loss, [logits], [labels], dtype)
    assert torch.equal(logits, before)


def test_cross_entropy_ignores_rows_of_infinities(kernels_v2: ModuleType) -> None:
    device = device_of(kernels_v2)
    logits = torch.randn(2, 10, device=device)
    logits[0] = float("-inf")
    logits[1, :5] = float("-inf")
    _, grad = differentiate(kernels_v2.cross_entropy, [logits], [torch.tensor([-100, 7], device=device)])
    assert grad.isfinite().all()
    assert not grad[0].any()


@dtypes
def test_layer_norm_is_right(kernels_v2: ModuleType, dtype: torch.dtype) -> None:
    assert_right(
        kernels_v2,
        lambda x, w, b: kernels_v2.layer_norm(x, w, b, 1e-5),
        lambda x, w, b: functional.layer_norm(x, x.shape[-1:], w, b, 1e-5),
        [torch.randn(9, 100) + 2, torch.randn(100), torch.randn(100)],
        dtype=dtype,
    )


def test_the_fused_loss_never_holds_all_logits() -> None:
    tokens, vocabulary = 2048, 300
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in (out if isinstance(out, tuple) else (out,)) if isinstance(t, Tensor))
            return out

    for build in PLAIN_BUILDS:
        leaves = [torch.randn(tokens, 8, requires_grad=True), torch.randn(vocabulary, 8, requires_grad=True)]
        with Watch():
            load(build).fused_linear_cross_entropy(*leaves, torch.randint(vocabulary, (tokens,))).backward()
    assert max(seen) <= tokens * vocabulary // 4


# Binding


class Llama(nn.Module):
    """A norm with the attributes and forward of Llama's."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size))
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states: Tensor) -> Tensor:
        dtype = hidden_states.dtype
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * wide.to(dtype)


class CastsLast(Llama):
    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * wide).to(hidden_states.dtype)


class OnePlus(Llama):
    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states * torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (1 + self.weight) * wide


class Gated(Llama):
    def forward(self, hidden_states: Tensor, gate: Tensor | None = None) -> Tensor:
        return Llama.forward(self, hidden_states)


class MLP(nn.Module):
    """The MLP of Llama."""

    def __init__(self, act_fn: nn.Module, hidden: int = 8, intermediate: int = 12, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.up_proj = nn.Linear(hidden, intermediate, bias=bias)
        self.down_proj = nn.Linear(intermediate, hidden, bias=bias)
        self.act_fn = act_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Clamping(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).clamp(max=1.0))


class Dropping(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(MLP.forward(self, x), self.dropout)


def test_norms_are_told_apart_by_what_they_compute(kernels: ModuleType) -> None:
    condition = kernels.layers.RMSNorm.kernel_condition
    assert condition(Llama(4)) is True
    assert condition(CastsLast(4)) is True
    assert condition(nn.RMSNorm(4)) is True
    assert "not weight * x / rms(x)" in condition(OnePlus(4))
    assert "also takes gate" in condition(Gated(4))
    assert "no weight" in condition(nn.RMSNorm(4, elementwise_affine=False))
    assert "2 dimensions" in condition(nn.RMSNorm((4, 4)))
    assert "variance_epsilon" in condition(nn.LayerNorm(4))


@pytest.mark.parametrize("make", [Llama, CastsLast, nn.RMSNorm, lambda n: nn.RMSNorm(n, eps=1e-3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_bound_norm_gives_what_the_module_gives(kernels: ModuleType, make: Callable, dtype: torch.dtype) -> None:
    device = device_of(kernels)
    module, x = make(16).to(device), torch.randn(3, 16, device=device, dtype=dtype)
    module = module.to(dtype) if isinstance(module, nn.RMSNorm) else module
    want, got = module(x), kernels.layers.RMSNorm.forward(module, x)
    torch.testing.assert_close(got, want)


def test_mlps_are_told_apart_by_what_they_compute(kernels: ModuleType) -> None:
    condition = kernels.layers.SwiGLUMLP.kernel_condition
    assert condition(MLP(nn.SiLU())) is True
    assert "ReLU" in condition(MLP(nn.ReLU()))
    assert "not down(" in condition(Clamping(nn.SiLU()))
    assert "dropout" in condition(Dropping(nn.SiLU()))
    assert "gate_proj" in condition(nn.Linear(2, 2))


def test_geglu_takes_both_forms_of_gelu_and_no_other(kernels_v2: ModuleType) -> None:
    condition = kernels_v2.layers.GeGLUMLP.kernel_condition
    assert condition(MLP(nn.GELU())) is True
    assert condition(MLP(nn.GELU(approximate="tanh"))) is True
    assert "SiLU" in condition(MLP(nn.SiLU()))


def test_layer_norm_takes_only_torch_norms_of_one_dimension(kernels_v2: ModuleType) -> None:
    condition = kernels_v2.layers.LayerNorm.kernel_condition
    assert condition(nn.LayerNorm(4)) is True
    assert "2 dimensions" in condition(nn.LayerNorm((4, 4)))
    assert "torch.nn.LayerNorm" in condition(Llama(4))
    for module in (nn.LayerNorm(4), nn.LayerNorm(4, elementwise_affine=False)):
        x = torch.randn(3, 4)
        torch.testing.assert_close(kernels_v2.layers.LayerNorm.forward(module, x), module(x))


def module_gradients(module: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    return differentiate(run, [x], []) + list(torch.autograd.grad(run(x).sum(), list(module.parameters())))


@pytest.mark.parametrize("act_fn", [nn.SiLU(), nn.GELU(), nn.GELU(approximate="tanh")])
@pytest.mark.parametrize("hooked", [False, True])
def test_a_bound_mlp_gives_what_the_module_gives(kernels: ModuleType, act_fn: nn.Module, hooked: bool) -> None:
    layers = kernels.layers
    layer = layers.SwiGLUMLP if isinstance(act_fn, nn.SiLU) else getattr(layers, "GeGLUMLP", None)
    if layer is None:
        pytest.skip("this version has no GeGLU")  # v1; later ones have
    device = device_of(kernels)
    module, x = MLP(act_fn, bias=True).to(device), torch.randn(2, 5, 8, device=device)
    if hooked:
        module.down_proj.register_forward_hook(lambda _module, _inputs, out: out * 2)
    got = module_gradients(module, lambda value: layer.forward(module, value), x)
    for a, b in zip(got, module_gradients(module, module, x), strict=True):
        torch.testing.assert_close(a, b)


def test_a_bound_mlp_keeps_no_product(kernels_v2: ModuleType) -> None:
    device = device_of(kernels_v2)
    module, x = MLP(nn.SiLU(), 8, 4096).to(device), torch.randn(4, 8, device=device)
    kept: dict[str, set[int]] = {}
    for name, run in (("plain", module), ("bound", MethodType(kernels_v2.layers.SwiGLUMLP.forward, module))):
        sizes = kept[name] = set()

        def pack(tensor: Tensor, sizes: set[int] = sizes) -> Tensor:
            if tensor.shape == (4, 4096):
                sizes.add(tensor.data_ptr())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            out = run(x)
        del out
    assert len(kept["bound"]) < len(kept["plain"])


def test_a_rotary_function_is_checked_by_what_it_computes(kernels: ModuleType) -> None:
    condition = kernels.layers.rotary_pos_emb.kernel_condition

    def interleaved(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        def turn(x: Tensor) -> Tensor:
            return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)

        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return q * cos + turn(q) * sin, k * cos + turn(k) * sin

    assert condition(kernels.rotary_pos_emb) is True
    assert "halves" in condition(interleaved)
    assert "does not take" in condition(lambda x: x)


@pytest.mark.parametrize("name", ["RMSNorm", "SwiGLUMLP", "GeGLUMLP", "LayerNorm"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.filterwarnings("ignore")
def test_layers_that_say_so_compile_in_one_graph(kernels: ModuleType, name: str, backend: str) -> None:
    layer = getattr(kernels.layers, name, None)
    if layer is None:
        pytest.skip("this version has no such layer")  # v1 has fewer
    assert layer.can_torch_compile
    modules = {
        "RMSNorm": lambda: Llama(8),
        "SwiGLUMLP": lambda: MLP(nn.SiLU()),
        "GeGLUMLP": lambda: MLP(nn.GELU()),
        "LayerNorm": lambda: nn.LayerNorm(8),
    }
    device = device_of(kernels)
    module, x = modules[name]().to(device), torch.randn(3, 8, device=device)
    want = module_gradients(module, module, x)
    module.forward = MethodType(layer.forward, module)
    compiled = torch.compile(module, fullgraph=True, backend=backend)
    for got, expected in zip(module_gradients(module, compiled, x), want, strict=True):
        torch.testing.assert_close(got, expected)


# Whole models


@pytest.fixture(params=["qwen3", "llama"])
def model(request: pytest.FixtureRequest) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": request.param == "qwen3",
    }
    if request.param == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes)).train()
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).train()


@pytest.fixture
def bind(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[nn.Module, ModuleType], list[str]]]:
    def bind_all(model: nn.Module, kernels: ModuleType) -> list[str]:
        names = []
        for module in model.modules():
            for name in ("RMSNorm", "SwiGLUMLP", "FusedLinearCrossEntropy"):
                layer = getattr(kernels.layers, name)
                if layer.kernel_condition(module) is True:
                    module.forward = MethodType(layer.forward, module)
                    names.append(name)
        source = sys.modules[type(model).__module__]
        assert kernels.layers.rotary_pos_emb.kernel_condition(source.apply_rotary_pos_emb) is True
        monkeypatch.setattr(source, "apply_rotary_pos_emb", kernels.layers.rotary_pos_emb)
        return names

    return bind_all


def batch(kernels: ModuleType) -> dict[str, Tensor]:
    ids = torch.randint(97, (2, 11))
    labels = ids.clone()
    labels[0, :4] = -100
    return {key: value.to(device_of(kernels)) for key, value in (("input_ids", ids), ("labels", labels))}


@pytest.mark.parametrize(
    "extra",
    [{}, {"num_items_in_batch": 5}, {"ignore_index": 3}, {"return_dict": False}, {"shift_labels": True}],
    ids=lambda extra: next(iter(extra), "plain"),
)
def test_a_bound_model_trains_as_the_plain_one(
    kernels: ModuleType, model: nn.Module, bind: Callable, extra: dict[str, object]
) -> None:
    model.to(device_of(kernels))
    other, inputs = copy.deepcopy(model), batch(kernels)
    if "ignore_index" in extra:
        inputs["labels"][inputs["labels"] == -100] = 3
    if "shift_labels" in extra:
        extra = {"shift_labels": inputs["labels"].roll(-2, dims=1)}
    want = model(**inputs, **extra)
    names = bind(other, kernels)
    assert names.count("FusedLinearCrossEntropy") == 1
    assert names.count("SwiGLUMLP") == 2
    got = other(**inputs, **extra)
    assert type(got) is type(want)
    if isinstance(got, tuple):
        got, want = got[0], want[0]
    else:
        assert got.logits is None
        got, want = got.loss, want.loss
    torch.testing.assert_close(got, want)
    got.backward()
    want.backward()
    for a, b in zip(other.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("change", ["eval", "no labels", "logits_to_keep", "hook", "head", "loss"])
def test_a_bound_model_still_gives_logits_when_they_may_be_wanted(
    kernels: ModuleType, model: nn.Module, bind: Callable, change: str
) -> None:
    model.to(device_of(kernels))
    bind(model, kernels)
    inputs = batch(kernels)
    if change == "eval":
        model.eval()
    elif change == "no labels":
        del inputs["labels"]
    elif change == "logits_to_keep":
        inputs["logits_to_keep"] = inputs["input_ids"].shape[1]
    elif change == "hook":
        model.lm_head.register_forward_hook(lambda _module, _inputs, out: out)
    elif change == "head":
        model.lm_head = nn.Sequential(model.lm_head)
    else:
        model.loss_function = lambda **_: torch.zeros((), device=device_of(kernels))
    assert model(**inputs).logits is not None


def test_a_head_with_a_bias_trains_as_the_plain_one(kernels: ModuleType, model: nn.Module, bind: Callable) -> None:
    model.lm_head.bias = nn.Parameter(torch.randn(97))
    model.to(device_of(kernels))
    inputs = batch(kernels)
    want = torch.autograd.grad(model(**inputs).loss, model.lm_head.bias)[0]
    bind(model, kernels)
    torch.testing.assert_close(torch.autograd.grad(model(**inputs).loss, model.lm_head.bias)[0], want)


def test_a_bound_model_trains_under_autocast(kernels: ModuleType, model: nn.Module, bind: Callable) -> None:
    device = device_of(kernels)
    model.to(device)
    inputs = batch(kernels)
    with torch.autocast(device, torch.bfloat16):
        want = model(**inputs).loss
        bind(model, kernels)
        got = model(**inputs).loss
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-2, atol=1e-2)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_a_bound_model_trains_with_gradient_checkpoints(kernels: ModuleType, model: nn.Module, bind: Callable) -> None:
    model.to(device_of(kernels))
    inputs = batch(kernels)
    bind(model, kernels)
    model(**inputs).loss.backward()
    want = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model(**inputs, use_cache=False).loss.backward()
    for p, grad in zip(model.parameters(), want, strict=True):
        torch.testing.assert_close(p.grad, grad)


def test_models_that_change_their_logits_are_refused(kernels: ModuleType, model: nn.Module) -> None:
    transformers = pytest.importorskip("transformers")
    condition = kernels.layers.FusedLinearCrossEntropy.kernel_condition
    assert condition(model) is True
    assert condition(model.model) == "it has no base model"
    stray = nn.Sequential()
    stray.base_model_prefix, stray.model = "model", nn.Linear(2, 2)
    assert condition(stray) == "its config has no vocab_size"
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "vocab_size": 32}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    with torch.device("meta"):
        gemma2 = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**sizes, head_dim=8))
        cohere = transformers.CohereForCausalLM(transformers.CohereConfig(**sizes))
        mixtral = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes))
    assert "changes the logits" in condition(gemma2)
    assert "logit_scale" in condition(cohere)
    assert "MoeCausalLMOutputWithPast" in condition(mixtral)
    model.lm_head.register_forward_hook(lambda *_: None)
    assert "lm_head" in condition(model)


def test_the_loss_function_is_that_of_transformers(kernels_v2: ModuleType) -> None:
    source = pytest.importorskip("transformers.loss.loss_utils").ForCausalLMLoss
    device = device_of(kernels_v2)
    logits, labels = torch.randn(2, 5, 11, device=device), torch.randint(11, (2, 5), device=device)
    for extra in ({}, {"num_items_in_batch": 3}, {"shift_labels": labels.flip(0)}, {"ignore_index": 4}):
        got = kernels_v2.layers.ForCausalLMLoss(logits, labels, 11, **extra)
        torch.testing.assert_close(got, source(logits, labels, 11, **extra))


# The files


@pytest.mark.parametrize("build", [*PLAIN_BUILDS, TRITON_BUILD])
def test_a_build_imports_nothing_but_torch(build: str) -> None:
    allowed = {"torch", "triton"} if build == TRITON_BUILD else {"torch"}
    allowed |= {"collections", "dataclasses", "functools", "inspect", "types", "typing"}
    for path in (ROOT / build).glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module]
            assert {name.partition(".")[0] for name in names} <= allowed, path


def test_layers_hold_nothing_but_a_forward(kernels: ModuleType) -> None:
    for name in kernels.layers.__all__:
        layer = getattr(kernels.layers, name)
        if isinstance(layer, type):
            own = {key for key in vars(layer) if not key.startswith("__")}
            assert own == {"forward", "kernel_condition", "has_backward", "can_torch_compile"}


def test_the_public_names_exist(kernels: ModuleType) -> None:
    for module in (kernels, kernels.layers):
        assert module.__all__ == sorted(module.__all__)
        assert SimpleNamespace(**{name: getattr(module, name) for name in module.__all__})


def test_the_triton_build_binds_by_the_same_rules() -> None:
    for name in ("checks.py", "geglu.py", "layers.py", "swiglu.py"):
        assert (ROOT / TRITON_BUILD / name).read_text() == (ROOT / PLAIN_BUILDS[1] / name).read_text()
