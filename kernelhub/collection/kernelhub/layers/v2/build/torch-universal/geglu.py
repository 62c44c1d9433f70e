"""The gate of GeGLU layers."""

from typing import Literal

from torch import Tensor

from .gated import gated


def gelu_mul(gate: Tensor, up: Tensor, approximate: Literal["none", "tanh"] = "none") -> Tensor:
    """Compute `gelu(gate) * up`; both and the result are `(..., intermediate)`.

    `approximate` means what it means to `torch.nn.functional.gelu`.
    """
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return gated(gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")
