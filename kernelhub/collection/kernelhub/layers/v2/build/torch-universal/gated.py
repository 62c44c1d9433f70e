"""Gated activations, `act(gate) * up`, that keep no product, and on accelerators no activation."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

Activation = Literal["silu", "gelu", "gelu_tanh"]


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Apply the activation function of that name."""
    if activation == "silu":
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activate_backward(grad: Tensor, x: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return torch.ops.aten.silu_backward(grad, x)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(grad, x, approximate=approximate)


def gated(gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
    """Compute `act(gate) * up`; `gate` and `up` are `(..., intermediate)`, as is the result."""
    _check_pair(gate, up)
    if torch.compiler.is_compiling():
        return activate(gate, activation) * up
    return _Gated.apply(gate, up, activation)


def gated_linear(gate: Tensor, up: Tensor, linear: nn.Linear, activation: Activation) -> Tensor:
    """Compute `linear(act(gate) * up)` without keeping the product for backward.

    `linear` must be a bare `torch.nn.Linear` (see `checks.is_bare_linear`). Backward computes the
    product again: one cheap pass in exchange for a tensor as large as `gate`.
    """
    _check_pair(gate, up)
    return _GatedLinear.apply(gate, up, linear.weight, linear.bias, activation)


def _check_pair(gate: Tensor, up: Tensor) -> None:
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ")


def _keeps_value(gate: Tensor) -> bool:
    """Tell whether to keep `act(gate)`: a CPU has memory, and is slow at computing it again."""
    return gate.device.type == "cpu"


def _gradients(grad: Tensor, gate: Tensor, up: Tensor, value: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate and up from that of the product; `value` is `act(gate)`."""
    return _activate_backward(grad * up, gate, activation), grad * value


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: Activation) -> Tensor:
        value = activate(gate, activation)
        ctx.save_for_backward(gate, up, value if _keeps_value(gate) else None)
        ctx.activation = activation
        return value * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up, value = ctx.saved_tensors
        value = activate(gate, ctx.activation) if value is None else value
        return *_gradients(grad, gate, up, value, ctx.activation), None


class _GatedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, gate: Tensor, up: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation
    ) -> Tensor:
        value = activate(gate, activation)
        ctx.save_for_backward(gate, up, weight, value if _keeps_value(gate) else None)
        ctx.activation = activation
        return functional.linear(value * up, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        gate, up, weight, value = ctx.saved_tensors
        need_gate, need_up, need_weight, need_bias = ctx.needs_input_grad[:4]
        value = activate(gate, ctx.activation) if value is None else value
        grad_weight = _rows(grad).t() @ _rows(value * up) if need_weight else None
        grad_bias = _rows(grad).sum(0) if need_bias else None
        grad_gate, grad_up = None, None
        if need_gate or need_up:
            grad_gate, grad_up = _gradients(grad @ weight, gate, up, value, ctx.activation)
        return grad_gate, grad_up, grad_weight, grad_bias, None
