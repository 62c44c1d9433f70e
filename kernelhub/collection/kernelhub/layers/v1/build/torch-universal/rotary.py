"""Rotary position embedding of queries and keys, in the "rotate half" form."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by the angles of their positions.

    Args:
        q: `(batch, heads, sequence, dim)`, or `(batch, sequence, heads, dim)` with `unsqueeze_dim=2`.
        k: the same with its own number of heads.
        cos: cosines, `(batch or 1, sequence, dim)`; with fewer than `dim`, only that many leading
            elements are rotated.
        sin: sines, as `cos`.
        unsqueeze_dim: where `cos` and `sin` get their dimension of heads.

    Returns:
        The rotated `q` and `k`, in their dtypes promoted with that of `cos` and `sin`.
    """
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    plain = torch.compiler.is_compiling() or cos.requires_grad or sin.requires_grad
    if plain or not _is_standard(q, cos, sin) or not _is_standard(k, cos, sin):
        return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)
    return _Rotary.apply(q, cos, sin), _Rotary.apply(k, cos, sin)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` with differentiable torch operations; `cos` and `sin` broadcast against it."""
    if cos.shape[-1] < x.shape[-1]:
        rotated, rest = x.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat((plain_rotary(rotated, cos, sin), rest), dim=-1)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _is_standard(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Tell whether the result has the shape of `x`, so that it can be written half by half."""
    return (
        x.dim() == cos.dim()
        and cos.shape == sin.shape
        and cos.dtype == sin.dtype
        and cos.shape[-1] == x.shape[-1]
        and x.shape[-1] % 2 == 0
        and all(small in (1, large) for small, large in zip(cos.shape, x.shape, strict=True))
    )


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype, sign: int) -> Tensor:
    """Write `x * cos + rotate_half(x) * sin` (sign 1), or its transpose applied to `x` (sign -1)."""
    # empty_like keeps the memory order of x: a transposed view stays one, without a copy.
    out = torch.empty_like(x, dtype=dtype)
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    # Transposing the rotation swaps the two sines, which may differ.
    low, high = (sin[..., :half], sin[..., half:])[::sign]
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(second, low, value=-sign)
    out[..., half:].addcmul_(first, high, value=sign)
    return out


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.dtype = x.dtype
        return _rotate(x, cos, sin, torch.promote_types(x.dtype, cos.dtype), 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotate(grad, cos, sin, grad.dtype, -1).to(ctx.dtype), None, None
