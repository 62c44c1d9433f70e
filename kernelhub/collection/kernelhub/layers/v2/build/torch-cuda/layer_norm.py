"""Layer normalisation: one pass over memory forward, one backward."""

# ruff: noqa: N803 - Triton writes compile-time constants in capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .launch import as_rows, fits_one_program, programs, row_tile, runs_here


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension of `x` to mean 0 and variance 1, then scale and shift it.

    Args:
        x: `(..., hidden)`.
        weight: `(hidden,)`, or None for no scaling.
        bias: `(hidden,)`, or None for no shift.
        eps: added to the variance.
    """
    if weight is None or bias is None or not fits_one_program(x.shape[-1]) or not runs_here(x, weight, bias):
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return _LayerNorm.apply(x, weight, bias, eps)


@triton.jit
def _forward(
    x,
    weight,
    bias,
    out,
    mean,
    rstd,
    rows,
    width,
    x_stride,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < width)[None, :]
    value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0).to(tl.float32)
    center = tl.sum(value, axis=1) / width
    value = tl.where(mask, value - center[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(value * value, axis=1) / width + eps)
    tl.store(mean + row, center, mask=row < rows)
    tl.store(rstd + row, scale, mask=row < rows)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    result = value * scale[:, None] * factor[None, :] + shift[None, :]
    tl.store(out + row[:, None] * width + column[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _backward(
    grad,
    x,
    weight,
    mean,
    rstd,
    grad_x,
    partial,
    rows,
    width,
    grad_stride,
    x_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    factor = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    total_bias = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < rows)[:, None] & (column < width)[None, :]
        value = tl.load(x + row[:, None] * x_stride + column[None, :], mask=mask, other=0.0)
        upper = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=mask, other=0.0)
        upper = upper.to(tl.float32)
        center = tl.load(mean + row, mask=row < rows, other=0.0)
        scale = tl.load(rstd + row, mask=row < rows, other=0.0)
        normed = tl.where(mask, (value.to(tl.float32) - center[:, None]) * scale[:, None], 0.0)
        total += upper * normed
        total_bias += upper
        upper = upper * factor[None, :]
        along = tl.sum(upper * normed, axis=1) / width
        flat = tl.sum(upper, axis=1) / width
        result = (upper - flat[:, None] - normed * along[:, None]) * scale[:, None]
        tl.store(grad_x + row[:, None] * width + column[None, :], result.to(grad_x.dtype.element_ty), mask=mask)
    # One row of sums for each program: adding them up afterwards is deterministic, atomics are not.
    place = partial + tl.program_id(0).to(tl.int64) * 2 * width + column
    tl.store(place, tl.sum(total, axis=0), mask=column < width)
    tl.store(place + width, tl.sum(total_bias, axis=0), mask=column < width)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        rows, weight = as_rows(x), weight.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        mean, rstd = torch.empty(2, rows.shape[0], dtype=torch.float32, device=x.device)
        height, columns, warps = row_tile(rows.shape[1])
        if rows.shape[0]:
            with torch.cuda.device(x.device):
                _forward[(triton.cdiv(rows.shape[0], height),)](
                    rows, weight, bias.contiguous(), out, mean, rstd, *rows.shape, rows.stride(0), eps,
                    ROWS=height, COLUMNS=columns, num_warps=warps,
                )  # fmt: skip
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.bias_dtype = bias.dtype
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, rstd = ctx.saved_tensors
        rows, grads = as_rows(x), as_rows(grad)
        height, columns, warps = row_tile(rows.shape[1])
        count = programs(x.device, triton.cdiv(rows.shape[0], height))
        grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        partial = torch.empty(count, 2, rows.shape[1], dtype=torch.float32, device=x.device)
        with torch.cuda.device(x.device):
            _backward[(count,)](
                grads, rows, weight, mean, rstd, grad_x, partial,
                *rows.shape, grads.stride(0), rows.stride(0),
                ROWS=height, COLUMNS=columns, num_warps=warps,
            )  # fmt: skip
        grad_weight, grad_bias = partial.sum(0)
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(ctx.bias_dtype), None
