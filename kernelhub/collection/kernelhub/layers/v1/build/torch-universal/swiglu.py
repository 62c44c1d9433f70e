"""The gate of SwiGLU layers, which keeps no activation on accelerators."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`; both and the result are `(..., intermediate)`."""
    if gate.shape != up.shape or gate.dtype != up.dtype:
        raise ValueError(f"gate {tuple(gate.shape)} {gate.dtype} and up {tuple(up.shape)} {up.dtype} differ")
    if torch.compiler.is_compiling():
        return functional.silu(gate) * up
    return _SiluMul.apply(gate, up)


class _SiluMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        value = functional.silu(gate)
        # A CPU has memory, and is slow at computing the activation again.
        ctx.save_for_backward(gate, up, value if gate.device.type == "cpu" else None)
        return value * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up, value = ctx.saved_tensors
        value = functional.silu(gate) if value is None else value
        return torch.ops.aten.silu_backward(grad * up, gate), grad * value
