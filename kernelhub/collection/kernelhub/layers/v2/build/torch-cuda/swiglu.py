"""The gate of SwiGLU layers."""

from torch import Tensor

from .gated import gated


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `silu(gate) * up`; both and the result are `(..., intermediate)`."""
    return gated(gate, up, "silu")
