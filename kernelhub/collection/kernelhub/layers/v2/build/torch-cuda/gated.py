"""Gated activations, `act(gate) * up`, that keep only gate and up for backward."""

# ruff: noqa: N803 - Triton writes compile-time constants in capitals

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .launch import runs_here

Activation = Literal["silu", "gelu", "gelu_tanh"]

_BLOCK = 2048


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the activation function of that name."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Compute `act(gate) * up`; `gate` and `up` are `(..., intermediate)`, as is the result."""
    _check_pair(gate, up)
    if not runs_here(gate, up):
        return activate(gate, activation) * up
    return _Gated.apply(gate, up, activation)


def gated_linear(gate: Tensor, up: Tensor, linear: nn.Linear, activation: Activation) -> Tensor:
    """Compute `linear(act(gate) * up)` without keeping the product for backward.

    `linear` must be a bare `torch.nn.Linear` (see `checks.is_bare_linear`). Backward computes the
    product again: one cheap pass in exchange for a tensor as large as `gate`.
    """
    _check_pair(gate, up)
    if not runs_here(gate, up, linear.weight):
        return linear(activate(gate, activation) * up)
    return _GatedLinear.apply(gate, up, linear.weight, linear.bias, activation)


def _check_pair(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ")


@triton.jit
def _value_and_slope(x, ACTIVATION: tl.constexpr):
    """Return the activation of x and its derivative."""
    if ACTIVATION == "silu":
        share = tl.sigmoid(x)
        value = x * share
        slope = share + value * (1.0 - share)
    elif ACTIVATION == "gelu":
        share = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
        value = x * share
        slope = share + x * tl.exp(-0.5 * x * x) * 0.3989422804014327
    else:
        # (1 + tanh(y)) / 2 is sigmoid(2 y), with 2 y = x (a + b x^2).
        square = x * x
        share = tl.sigmoid(x * (1.5957691216057308 + 0.07135481282743183 * square))
        value = x * share
        slope = share + value * (1.0 - share) * (1.5957691216057308 + 0.2140644384822955 * square)
    return value, slope


@triton.jit
def _forward(gate, up, out, count, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    x = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    value, _ = _value_and_slope(x, ACTIVATION)
    tl.store(out + place, (value * y).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad,
    gate,
    up,
    grad_gate,
    grad_up,
    product,
    count,
    ACTIVATION: tl.constexpr,
    KEEP_PRODUCT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = place < count
    x = tl.load(gate + place, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + place, mask=mask, other=0.0).to(tl.float32)
    upper = tl.load(grad + place, mask=mask, other=0.0).to(tl.float32)
    value, slope = _value_and_slope(x, ACTIVATION)
    tl.store(grad_gate + place, (upper * y * slope).to(grad_gate.dtype.element_ty), mask=mask)
    tl.store(grad_up + place, (upper * value).to(grad_up.dtype.element_ty), mask=mask)
    if KEEP_PRODUCT:
        tl.store(product + place, (value * y).to(product.dtype.element_ty), mask=mask)


def _product(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Return `act(gate) * up` of contiguous tensors."""
    out = torch.empty_like(gate)
    if gate.numel():
        with torch.cuda.device(gate.device):
            _forward[(triton.cdiv(gate.numel(), _BLOCK),)](
                gate, up, out, gate.numel(), ACTIVATION=activation, BLOCK=_BLOCK
            )
    return out


def _gradients(
    grad: Tensor, gate: Tensor, up: Tensor, activation: Activation, keep_product: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up and, if asked, the product (else its place is undefined)."""
    grad_gate, grad_up = torch.empty_like(gate), torch.empty_like(up)
    # The incoming gradient is a temporary of the caller when the product is wanted: reuse it.
    product = grad if keep_product else grad_up
    if gate.numel():
        with torch.cuda.device(gate.device):
            _backward[(triton.cdiv(gate.numel(), _BLOCK),)](
                grad, gate, up, grad_gate, grad_up, product, gate.numel(),
                ACTIVATION=activation, KEEP_PRODUCT=keep_product, BLOCK=_BLOCK,
            )  # fmt: skip
    return grad_gate, grad_up, product


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _product(gate, up, activation)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_gate, grad_up, _ = _gradients(grad.contiguous(), *ctx.saved_tensors, ctx.activation, keep_product=False)
        return grad_gate, grad_up, None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.save_for_backward(gate, up, weight)
        ctx.activation = activation
        return functional.linear(_product(gate, up, activation), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, None]:
        gate, up, weight = ctx.saved_tensors
        need_weight, need_bias = ctx.needs_input_grad[2:4]
        grads = _rows(grad)
        grad_gate, grad_up, product = _gradients(grads @ weight, gate, up, ctx.activation, keep_product=need_weight)
        grad_weight = grads.t() @ _rows(product) if need_weight else None
        grad_bias = grads.sum(0) if need_bias else None
        return grad_gate, grad_up, grad_weight, grad_bias, None
