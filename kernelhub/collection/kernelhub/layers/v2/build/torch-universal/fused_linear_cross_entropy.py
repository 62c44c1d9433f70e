"""The output projection and its cross entropy in one, without ever holding all the logits.

Forward goes over the tokens in blocks and computes the gradients right away, before they are
scaled; backward only scales them. At most one block of logits exists at a time.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from .blocking import row_blocks, wide_dtype
from .labels import check_labels, divisor, safe_scale


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

    Raises:
        IndexError: a label is out of range (CPU; other devices report it in their own way).
    """
    check_labels(labels, weight.shape[0], ignore_index)
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    needs = tuple(torch.is_grad_enabled() and t is not None and t.requires_grad for t in (hidden, weight, bias))
    with torch.autocast(device, enabled=False):
        total = _FusedLinearCrossEntropy.apply(hidden, weight, bias, labels, ignore_index, num_items is None, needs)
    return total if num_items is None else total / divisor(num_items, total)


def _token_blocks(valid: Tensor, width: int) -> list[slice] | list[Tensor]:
    """Split the tokens into blocks, of at most about twice the memory of the weight.

    Small blocks save memory, but each reads and writes the whole gradient of the weight: a CPU hides
    that behind its slower products, an accelerator does not.
    """
    if valid.device.type != "cpu":
        size = max(1024, min(2 * width, 4096))
    else:
        size = max(512, min(width // 2, 4096))
        # Tokens that do not count need no logits; elsewhere finding them would synchronise.
        if not torch.compiler.is_compiling() and not bool(valid.all()):
            return list(valid.nonzero().squeeze(-1).split(size))
    return [slice(start, start + size) for start in range(0, valid.shape[0], size)]


def _losses_to_gradient(logits: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Overwrite `logits` with the gradient of their summed loss; return that loss."""
    wide = wide_dtype(logits.dtype)
    total = torch.zeros((), dtype=wide, device=logits.device)
    for block in row_blocks(*logits.shape, logits.device):
        part, target = logits[block].to(wide), targets[block]
        lse = torch.logsumexp(part, dim=-1, keepdim=True)
        losses = (lse - part.gather(-1, target)).squeeze(-1)
        total += losses.where(valid[block], 0).sum()
        part.sub_(lse).exp_().scatter_add_(-1, target, -torch.ones_like(lse))
        logits[block] = part.masked_fill_(~valid[block].unsqueeze(-1), 0)
    return total


def _accumulate(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add `left.T @ right` to `total`, which may be of a wider dtype."""
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
        return
    for block in row_blocks(*total.shape, total.device):
        total[block] += left[:, block].t() @ right


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
        valid = labels != ignore_index
        targets = labels.where(valid, 0).long().unsqueeze(-1)
        total = torch.zeros((), dtype=wide, device=hidden.device)
        # Unscaled gradients are of order one: half precision does not lose small ones, and a
        # gradient scaler that multiplies the loss later needs no second pass.
        grad_hidden = torch.zeros_like(hidden) if needs[0] else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs[1] else None
        grad_bias = None if bias is None or not needs[2] else torch.zeros_like(bias, dtype=wide)
        for block in _token_blocks(valid, hidden.shape[-1]):
            part = hidden[block]
            logits = functional.linear(part, weight, bias)
            total += _losses_to_gradient(logits, targets[block], valid[block])
            if grad_hidden is not None:
                grad_hidden[block] = logits @ weight
            if grad_weight is not None:
                _accumulate(grad_weight, logits, part)
            if grad_bias is not None:
                grad_bias += logits.sum(0, dtype=wide)
            # Freed before the next block is computed, or two would exist at a time.
            del logits
        count = valid.sum() if mean else None
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
