"""The output projection and its cross entropy in one, without ever holding all the logits.

Forward goes over the tokens in blocks and computes the gradients right away, before they are
scaled; backward only scales them. At most one block of logits exists at a time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .cross_entropy import losses_of, plain_cross_entropy
from .labels import check_labels, divisor, safe_scale
from .launch import runs_here, wide_dtype

# Products of half precision matrices that are added up in float32.
_HAS_WIDE_ADDMM = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 8)


def fused_linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    num_items: Tensor | float | None = None,
) -> Tensor:
    """Compute the cross entropy of `hidden @ weight.T + bias` with `labels`.

    Args:
        hidden: `(tokens, hidden)`.
        weight: `(vocabulary, hidden)`.
        labels: `(tokens,)`, integers from 0 to vocabulary - 1, or `ignore_index`.
        bias: `(vocabulary,)`.
        ignore_index: the label of tokens that do not count.
        num_items: what to divide the summed loss by; the number of counted tokens when None.

    Returns:
        A float32 scalar (float64 for float64 input); nan if no token counts, as torch does.

    A label out of range stops the device with an assertion, as it does in torch.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    if not runs_here(hidden, weight):
        logits = functional.linear(hidden, weight, bias)
        total = plain_cross_entropy(logits, labels, ignore_index, num_items is None)
        return total if num_items is None else total / divisor(num_items, total)
    check_labels(labels, weight.shape[0], ignore_index)
    with torch.autocast(device, enabled=False):
        total = _FusedLinearCrossEntropy.apply(hidden, weight, bias, labels, ignore_index, num_items is None, needs)
    return total if num_items is None else total / divisor(num_items, total)


def _block_tokens(width: int) -> int:
    """Return how many tokens to take at a time: logits of about twice the memory of the weight.

    Each block reads and writes the whole gradient of the weight, so small blocks are slow.
    """
    return max(1024, min(2 * width, 4096))


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left.T @ right` to `total`, which may be of a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
    elif _HAS_WIDE_ADDMM:
        torch.addmm(total, left.t(), right, out_dtype=total.dtype, out=total)
    else:
        total += left.t() @ right


class _FusedLinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses, or their mean."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        ignore_index: int,
        mean: bool,
        needs: tuple[bool, bool, bool],
    ) -> Tensor:
        wide = wide_dtype(hidden.dtype)
        labels = labels.contiguous()
        total = torch.zeros((), dtype=wide, device=hidden.device)
        # Unscaled gradients are of order one: half precision does not lose small ones, and a
        # gradient scaler that multiplies the loss later needs no second pass.
        grad_hidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        grad_bias = None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=wide)
        size = _block_tokens(hidden.shape[-1])
        for begin in range(0, hidden.shape[0], size):
            block = slice(begin, begin + size)
            part = hidden[block]
            logits = functional.linear(part, weight, bias)
            total += losses_of(logits, labels[block], ignore_index, in_place_gradient=any(needs))[0].sum()
            if grad_hidden is not None:
                torch.mm(logits, weight, out=grad_hidden[block])
            if grad_weight is not None:
                _accumulate(grad_weight, logits, part)
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
            # Freed before the next block is computed, or two would exist at a time.
            del logits
        count = (labels != ignore_index).sum() if mean else None
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias, count)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total if count is None else total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *grads, count = ctx.saved_tensors
        scale = safe_scale(grad, count)
        # Into new tensors, as backward may run again with retain_graph; and in the dtype of the
        # loss, as half precision would round the scale.
        scaled = (
            None if g is None else torch.mul(g.to(grad.dtype), scale, out=torch.empty_like(g, dtype=dtype))
            for g, dtype in zip(grads, ctx.dtypes, strict=True)
        )
        return (*scaled, None, None, None, None)
