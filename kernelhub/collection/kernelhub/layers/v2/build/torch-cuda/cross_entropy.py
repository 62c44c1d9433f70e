"""Cross entropy that keeps the logits and one number per row for backward.

The logits are read only: a model returns them to its user, so their memory is not reused.
"""

# ruff: noqa: N803 - Triton writes compile-time constants in capitals

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .labels import causal_labels, check_labels, divisor, safe_scale
from .launch import runs_here

_BLOCK = 8192
_WARPS = 8


def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    ignore_index: int = -100,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Compute the mean cross entropy, or the sum over `num_items`.

    Args:
        logits: `(tokens, vocabulary)`, any floating dtype; the loss is computed in float32.
        labels: `(tokens,)`, integers from 0 to vocabulary - 1, or `ignore_index`.
        ignore_index: the label of tokens that do not count.
        num_items: what to divide the sum by; the number of counted tokens when None.

    Returns:
        A float32 scalar (float64 for float64 logits); nan if no token counts, as torch does.

    A label out of range stops the device with an assertion, as it does in torch.
    """
    if runs_here(logits):
        check_labels(labels, logits.shape[-1], ignore_index)
        total = _SummedCrossEntropy.apply(logits, labels, ignore_index, num_items is None)
    else:
        total = plain_cross_entropy(logits, labels, ignore_index, num_items is None)
    return total if num_items is None else total / divisor(num_items, total)


def plain_cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int, mean: bool) -> Tensor:
    """Compute the mean or the sum of the losses with torch's own operator."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return functional.cross_entropy(wide, labels, ignore_index=ignore_index, reduction="mean" if mean else "sum")


def causal_lm_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **_kwargs: object,
) -> Tensor:
    """Compute the loss of next token prediction, a drop-in for transformers' `ForCausalLMLoss`.

    Args:
        logits: `(..., sequence, vocab_size)`.
        labels: `(..., sequence)`, not shifted; unused when `shift_labels` is given.
        vocab_size: the last dimension of `logits`.
        num_items_in_batch: what to divide the summed loss by; the mean when None.
        ignore_index: the label of tokens that do not count.
        shift_labels: labels that are shifted already.
    """
    if shift_labels is None:
        if labels is None:
            raise ValueError("labels or shift_labels must be given")
        shift_labels = causal_labels(labels, ignore_index)
    targets = shift_labels.reshape(-1).to(logits.device)
    return cross_entropy(logits.reshape(-1, vocab_size), targets, ignore_index, num_items_in_batch)


@triton.jit
def _losses(
    logits,
    labels,
    losses,
    lse,
    stride,
    vocabulary,
    ignore_index,
    IN_PLACE_GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the loss and log-sum-exp of one row; with the flag, turn the row into its gradient."""
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    place = logits + row * stride
    columns = tl.arange(0, BLOCK)
    if label == ignore_index:
        tl.store(losses + row, 0.0)
        tl.store(lse + row, 0.0)
        if IN_PLACE_GRADIENT:
            zeros = tl.zeros([BLOCK], dtype=logits.dtype.element_ty)
            for start in range(0, vocabulary, BLOCK):
                tl.store(place + start + columns, zeros, mask=start + columns < vocabulary)
    else:
        top = float("-inf")
        total = 0.0
        for start in range(0, vocabulary, BLOCK):
            mask = start + columns < vocabulary
            value = tl.load(place + start + columns, mask=mask, other=float("-inf")).to(tl.float32)
            new_top = tl.maximum(top, tl.max(value, axis=0))
            # A block of nothing but -inf must not give inf - inf.
            base = tl.where(new_top == float("-inf"), 0.0, new_top)
            total = total * tl.exp(top - base) + tl.sum(tl.exp(value - base), axis=0)
            top = new_top
        log_sum = top + tl.log(total)
        inside = (label >= 0) & (label < vocabulary)
        target = tl.load(place + label, mask=inside, other=float("nan")).to(tl.float32)
        tl.store(losses + row, log_sum - target)
        tl.store(lse + row, log_sum)
        if IN_PLACE_GRADIENT:
            # The target was read by all threads before any of them overwrites it.
            tl.debug_barrier()
            for start in range(0, vocabulary, BLOCK):
                mask = start + columns < vocabulary
                value = tl.load(place + start + columns, mask=mask, other=float("-inf")).to(tl.float32)
                share = tl.exp(value - log_sum)
                share = tl.where(start + columns == label, share - 1.0, share)
                tl.store(place + start + columns, share.to(logits.dtype.element_ty), mask=mask)


@triton.jit
def _gradient(
    logits,
    labels,
    lse,
    scale,
    out,
    stride,
    vocabulary,
    ignore_index,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels + row)
    log_sum = tl.load(lse + row)
    factor = tl.load(scale)
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        mask = column < vocabulary
        value = tl.load(logits + row * stride + column, mask=mask, other=float("-inf")).to(tl.float32)
        share = tl.exp(value - log_sum)
        share = tl.where(column == label, share - 1.0, share) * factor
        share = tl.where(label == ignore_index, 0.0, share)
        tl.store(out + row * vocabulary + column, share.to(out.dtype.element_ty), mask=mask)


def losses_of(logits: Tensor, labels: Tensor, ignore_index: int, in_place_gradient: bool) -> tuple[Tensor, Tensor]:
    """Return loss and log-sum-exp of each row of `logits` `(tokens, vocabulary)`, both `(tokens,)`.

    With `in_place_gradient`, `logits` becomes the gradient of the sum of the losses.
    """
    losses, lse = torch.empty(2, logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        with torch.cuda.device(logits.device):
            _losses[(logits.shape[0],)](
                logits, labels, losses, lse, logits.stride(0), logits.shape[1], ignore_index,
                IN_PLACE_GRADIENT=in_place_gradient, BLOCK=_BLOCK, num_warps=_WARPS,
            )  # fmt: skip
    return losses, lse


class _SummedCrossEntropy(torch.autograd.Function):
    """The sum of the losses, or their mean."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, mean: bool) -> Tensor:
        logits = logits if logits.stride(-1) == 1 else logits.contiguous()
        labels = labels.contiguous()
        losses, lse = losses_of(logits, labels, ignore_index, in_place_gradient=False)
        count = (labels != ignore_index).sum() if mean else None
        ctx.save_for_backward(logits, labels, lse, count)
        ctx.ignore_index = ignore_index
        return losses.sum() if count is None else losses.sum() / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, labels, lse, count = ctx.saved_tensors
        out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        scale = safe_scale(grad, count).to(torch.float32)
        if logits.shape[0]:
            with torch.cuda.device(logits.device):
                _gradient[(logits.shape[0],)](
                    logits, labels, lse, scale, out, logits.stride(0), logits.shape[1], ctx.ignore_index,
                    BLOCK=_BLOCK, num_warps=_WARPS,
                )  # fmt: skip
        return out, None, None, None
