"""Root mean square normalisation that keeps its input and one number per row for backward."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocking import row_blocks, wide_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, cast_last: bool = False) -> Tensor:
    """Normalise the last dimension of `x` by its root mean square, then scale it.

    Args:
        x: `(..., hidden)`, any floating dtype; the mean square is taken in float32.
        weight: `(hidden,)`.
        eps: added to the mean square.
        cast_last: round to the dtype of `x` after the scaling, as `torch.nn.RMSNorm` does, instead
            of before it, as Llama does.

    Returns:
        `(..., hidden)`, in the dtype of `x` if `cast_last`, else promoted with that of `weight`.
    """
    if torch.compiler.is_compiling():
        # A compiler fuses the formula by itself; an opaque function would hinder it.
        return plain_rms_norm(x, weight, eps, cast_last)
    return _RMSNorm.apply(x, weight, eps, cast_last)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, cast_last: bool = False) -> Tensor:
    """Compute `rms_norm` with differentiable torch operations only."""
    wide = x.to(wide_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed).to(x.dtype) if cast_last else weight * normed.to(x.dtype)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cast_last: bool) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        wide = wide_dtype(x.dtype)
        out_dtype = x.dtype if cast_last else torch.promote_types(x.dtype, weight.dtype)
        out = torch.empty(rows.shape, dtype=out_dtype, device=x.device)
        rstd = torch.empty(rows.shape[0], 1, dtype=wide, device=x.device)
        for block in row_blocks(*rows.shape, x.device):
            part = rows[block].to(wide)
            norm = torch.linalg.vector_norm(part, dim=-1, keepdim=True)
            torch.rsqrt(norm.square_().div_(rows.shape[1]).add_(eps), out=rstd[block])
            normed = part * rstd[block]
            torch.mul(normed if cast_last else normed.to(x.dtype), weight, out=out[block])
        ctx.save_for_backward(x, weight, rstd)
        ctx.cast_last = cast_last
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight, rstd = ctx.saved_tensors
        need_x, need_weight = ctx.needs_input_grad[:2]
        rows, grads = x.reshape(-1, x.shape[-1]), grad.reshape(-1, x.shape[-1])
        grad_x = torch.empty(rows.shape, dtype=x.dtype, device=x.device) if need_x else None
        wide = rstd.dtype
        wide_weight = weight.to(wide)
        grad_weight = torch.zeros_like(wide_weight) if need_weight else None
        for block in row_blocks(*rows.shape, x.device):
            part, upper, scale = rows[block].to(wide), grads[block].to(wide), rstd[block]
            product = part * upper
            if grad_weight is not None:
                grad_weight += torch.mv(product.t(), scale.squeeze(1))
            if grad_x is not None:
                # One factor at a time: the cube of the scale may leave the range of float32.
                mean = torch.mv(product, wide_weight).div_(-rows.shape[1]).unsqueeze(1)
                mean.mul_(scale).mul_(scale).mul_(scale)
                inner = torch.mul(upper, wide_weight, out=product).mul_(scale)
                grad_x[block] = inner.addcmul_(part, mean)
        return (
            None if grad_x is None else grad_x.view(x.shape),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None,
            None,
        )
