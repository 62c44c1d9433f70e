"""Labels: shifting them, checking them, and dividing by their number."""

import torch
from torch import Tensor
from torch.nn import functional


def check_labels(labels: Tensor, vocabulary: int, ignore_index: int) -> None:
    """Raise IndexError if a label is neither a class nor `ignore_index`.

    Only on the CPU, where looking costs no synchronisation; elsewhere the gather below traps.
    """
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return
    wrong = ((labels < 0) | (labels >= vocabulary)) & (labels != ignore_index)
    if wrong.any():
        found = labels[wrong][0].item()
        raise IndexError(f"label {found} is out of bounds for a vocabulary of {vocabulary}")


def causal_labels(labels: Tensor, ignore_index: int) -> Tensor:
    """Shift labels `(..., sequence)` to the left: each position is to predict the next token."""
    return functional.pad(labels[..., 1:], (0, 1), value=ignore_index)


def divisor(num_items: Tensor | float, like: Tensor) -> Tensor | float:
    """Return `num_items`, on the device of `like` if it is a tensor."""
    return num_items.to(like.device) if isinstance(num_items, Tensor) else num_items


def safe_scale(grad: Tensor, count: Tensor | None) -> Tensor:
    """Return `grad / count`, and 0 where nothing counts: torch's gradient of an empty mean is 0."""
    return grad if count is None else torch.where(count > 0, grad / count, 0.0)
