"""Root mean square normalisation: one pass over memory forward, one backward."""

# ruff: noqa: N803 - Triton writes compile-time constants in capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from .launch import as_rows, fits_one_program, programs, row_tile, runs_here, wide_dtype


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
    fits = weight.shape == x.shape[-1:] and fits_one_program(x.shape[-1])
    if not fits or not runs_here(x, weight):
        return plain_rms_norm(x, weight, eps, cast_last)
    return _RMSNorm.apply(x, weight, eps, cast_last)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, cast_last: bool = False) -> Tensor:
    """Compute `rms_norm` with differentiable torch operations only."""
    wide = x.to(wide_dtype(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (weight * normed).to(x.dtype) if cast_last else weight * normed.to(x.dtype)


@triton.jit
def _forward(
    x,
    weight,
    out,
    rstd,
    rows,
    width,
    x_stride,
    eps,
    CAST_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(rstd + row, scale, mask=row < rows)
    normed = value * scale[:, None]
    if not CAST_LAST:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    result = normed * factor[None, :]
    tl.store(out + row[:, None] * width + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad,
    x,
    weight,
    rstd,
    grad_x,
    partial,
    rows,
    width,
    grad_stride,
    x_stride,
    CAST_LAST: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        upper = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0)
        upper = upper.to(tl.float32)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = value.to(tl.float32) * scale[:, None]
        if CAST_LAST:
            total += upper * normed
        else:
            total += upper * normed.to(x.dtype.element_ty).to(tl.float32)
        upper = upper * factor[None, :]
        mean = tl.sum(upper * normed, axis=1) / width
        result = (upper - normed * mean[:, None]) * scale[:, None]
        tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
    # One row of sums for each program: adding them up afterwards is deterministic, atomics are not.
    offset = tl.program_id(0).to(tl.int64) * width
    tl.store(partial + offset + column, tl.sum(total, axis=0), mask=column < width)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, cast_last: bool) -> Tensor:
        rows, weight = as_rows(x), weight.contiguous()
        out_dtype = x.dtype if cast_last else torch.promote_types(x.dtype, weight.dtype)
        out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
        rstd = torch.empty(rows.shape[0], dtype=torch.float32, device=x.device)
        height, columns, warps = row_tile(rows.shape[1])
        if rows.shape[0]:
            with torch.cuda.device(x.device):
                _forward[(triton.cdiv(rows.shape[0], height),)](
                    rows, weight, out, rstd, *rows.shape, rows.stride(0), eps,
                    CAST_LAST=cast_last, ROWS=height, COLUMNS=columns, num_warps=warps,
                )  # fmt: skip
        ctx.save_for_backward(x, weight, rstd)
        ctx.cast_last = cast_last
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, rstd = ctx.saved_tensors
        rows, grads = as_rows(x), as_rows(grad)
        height, columns, warps = row_tile(rows.shape[1])
        count = programs(x.device, triton.cdiv(rows.shape[0], height))
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = torch.empty(count, rows.shape[1], dtype=torch.float32, device=x.device)
        with torch.cuda.device(x.device):
            _backward[(count,)](
                grads, rows, weight, rstd, grad_x, partial, *rows.shape, grads.stride(0), rows.stride(0),
                CAST_LAST=ctx.cast_last, ROWS=height, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip
        return grad_x, partial.sum(0).to(weight.dtype), None, None
