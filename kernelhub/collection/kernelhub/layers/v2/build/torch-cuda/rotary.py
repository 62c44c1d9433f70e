"""Rotary position embedding of queries and keys in one launch, whatever their strides."""

# ruff: noqa: N803 - Triton writes compile-time constants in capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import runs_here


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
    fits = unsqueeze_dim in (1, 2) and q.dtype == k.dtype and q.shape[0] == k.shape[0]
    fits = fits and all(_is_standard(x, cos, sin, unsqueeze_dim) for x in (q, k))
    if not fits or cos.requires_grad or sin.requires_grad or not runs_here(q, k, cos, sin):
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return plain_rotary(q, cos, sin), plain_rotary(k, cos, sin)
    return _Rotary.apply(q, k, cos, sin, unsqueeze_dim)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate `x` with differentiable torch operations; `cos` and `sin` broadcast against it."""
    if cos.shape[-1] < x.shape[-1]:
        rotated, rest = x.tensor_split([cos.shape[-1]], dim=-1)
        return torch.cat((plain_rotary(rotated, cos, sin), rest), dim=-1)
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _is_standard(x: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int) -> bool:
    """Tell whether `x` is four-dimensional, not empty, and wholly rotated by `cos` and `sin`."""
    if x.dim() != 4 or cos.dim() != 3 or cos.shape != sin.shape or x.numel() == 0:
        return False
    batch, sequence, dim = x.shape[0], x.shape[3 - unsqueeze_dim], x.shape[3]
    same = cos.shape[1:] == (sequence, dim) and cos.dtype == sin.dtype
    return same and cos.shape[0] in (1, batch) and dim % 2 == 0


@triton.jit
def _rotate_heads(
    x,
    out,
    x_head,
    out_head,
    heads,
    half,
    cos_low,
    cos_high,
    sin_low,
    sin_high,
    TRANSPOSE: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    column = tl.arange(0, HALF)[None, :]
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
        mask = (head < heads) & (column < half)
        place = x + head * x_head + column
        low = tl.load(place, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(place + half, mask=mask, other=0.0).to(tl.float32)
        if TRANSPOSE:
            new_low = low * cos_low + high * sin_high
            new_high = high * cos_high - low * sin_low
        else:
            new_low = low * cos_low - high * sin_low
            new_high = high * cos_high + low * sin_high
        place = out + head * out_head + column
        tl.store(place, new_low.to(out.dtype.element_ty), mask=mask)
        tl.store(place + half, new_high.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _rotate(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    q_batch,
    q_head,
    q_step,
    k_batch,
    k_head,
    k_step,
    q_out_batch,
    q_out_head,
    q_out_step,
    k_out_batch,
    k_out_head,
    k_out_step,
    cos_batch,
    cos_step,
    sin_batch,
    sin_step,
    sequence,
    q_heads,
    k_heads,
    half,
    TRANSPOSE: tl.constexpr,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    batch = (tl.program_id(0) // sequence).to(tl.int64)
    step = (tl.program_id(0) % sequence).to(tl.int64)
    column = tl.arange(0, HALF)[None, :]
    inside = column < half
    place = cos + batch * cos_batch + step * cos_step + column
    cos_low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    place = sin + batch * sin_batch + step * sin_step + column
    sin_low = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(place + half, mask=inside, other=0.0).to(tl.float32)
    _rotate_heads(
        q + batch * q_batch + step * q_step, q_out + batch * q_out_batch + step * q_out_step,
        q_head, q_out_head, q_heads, half, cos_low, cos_high, sin_low, sin_high,
        TRANSPOSE, Q_HEADS, HALF,
    )  # fmt: skip
    _rotate_heads(
        k + batch * k_batch + step * k_step, k_out + batch * k_out_batch + step * k_out_step,
        k_head, k_out_head, k_heads, half, cos_low, cos_high, sin_low, sin_high,
        TRANSPOSE, K_HEADS, HALF,
    )  # fmt: skip


def _block_heads(heads: int, half: int) -> int:
    """Return how many heads a program takes at a time."""
    return min(triton.next_power_of_2(heads), max(1, 4096 // half))


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, head_dim: int, dtype: torch.dtype, transpose: bool
) -> tuple[Tensor, Tensor]:
    """Rotate `q` and `k`, or apply the transposed rotation; `head_dim` is their dimension of heads."""
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    # empty_like keeps the memory order: a transposed view gives one, without a copy.
    outs = torch.empty_like(q, dtype=dtype), torch.empty_like(k, dtype=dtype)
    step_dim = 3 - head_dim
    batch, sequence = q.shape[0], q.shape[step_dim]
    cos, sin = (x.expand(batch, -1, -1) for x in (cos, sin))
    cos, sin = (x if x.stride(-1) == 1 else x.contiguous() for x in (cos, sin))
    strides = [x.stride(d) for x in (q, k, *outs) for d in (0, head_dim, step_dim)]
    half = q.shape[-1] // 2
    with torch.cuda.device(q.device):
        _rotate[(batch * sequence,)](
            q, k, *outs, cos, sin, *strides, *cos.stride()[:2], *sin.stride()[:2],
            sequence, q.shape[head_dim], k.shape[head_dim], half,
            TRANSPOSE=transpose, HALF=triton.next_power_of_2(half),
            Q_HEADS=_block_heads(q.shape[head_dim], half), K_HEADS=_block_heads(k.shape[head_dim], half),
        )  # fmt: skip
    return outs


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        ctx.head_dim, ctx.dtypes = head_dim, (q.dtype, k.dtype)
        return _launch(q, k, cos, sin, head_dim, torch.promote_types(q.dtype, cos.dtype), False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        grad_q, grad_k = _launch(grad_q, grad_k, cos, sin, ctx.head_dim, grad_q.dtype, True)
        return grad_q.to(ctx.dtypes[0]), grad_k.to(ctx.dtypes[1]), None, None, None
