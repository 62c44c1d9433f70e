"""Layer normalisation: torch's own operator, which is already one pass over memory."""

from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dimension of `x` to mean 0 and variance 1, then scale and shift it.

    Args:
        x: `(..., hidden)`.
        weight: `(hidden,)`, or None for no scaling.
        bias: `(hidden,)`, or None for no shift.
        eps: added to the variance.
    """
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
