"""Cross entropy that keeps the logits and one number per row for backward.

The logits are read only: a model returns them to its user, so their memory is not reused.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .blocking import row_blocks, wide_dtype
from .labels import causal_labels, check_labels, divisor, safe_scale


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

    Raises:
        IndexError: a label is out of range (CPU; other devices report it in their own way).
    """
    check_labels(labels, logits.shape[-1], ignore_index)
    total = _SummedCrossEntropy.apply(logits, labels, ignore_index, num_items is None)
    return total if num_items is None else total / divisor(num_items, total)


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


class _SummedCrossEntropy(torch.autograd.Function):
    """The sum of the losses, or their mean."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, ignore_index: int, mean: bool) -> Tensor:
        wide = wide_dtype(logits.dtype)
        valid = labels != ignore_index
        targets = labels.where(valid, 0).long().unsqueeze(-1)
        lse = torch.empty(logits.shape[0], 1, dtype=wide, device=logits.device)
        total = torch.zeros((), dtype=wide, device=logits.device)
        for block in row_blocks(*logits.shape, logits.device):
            part = logits[block].to(wide)
            lse[block] = torch.logsumexp(part, dim=-1, keepdim=True)
            losses = (lse[block] - part.gather(-1, targets[block])).squeeze(-1)
            total += losses.where(valid[block], 0).sum()
        count = valid.sum() if mean else None
        ctx.save_for_backward(logits, targets, valid, lse, count)
        return total if count is None else total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        logits, targets, valid, lse, count = ctx.saved_tensors
        scale = safe_scale(grad, count)
        out = torch.empty_like(logits)
        for block in row_blocks(*logits.shape, logits.device):
            part = torch.sub(logits[block], lse[block]).exp_()
            part.scatter_add_(-1, targets[block], -torch.ones_like(lse[block]))
            # Not a product with 0: a row of infinite logits that does not count must stay 0.
            part.masked_fill_(~valid[block].unsqueeze(-1), 0)
            out[block] = part.mul_(scale)
        return out, None, None, None
