"""Training kernels in plain torch, for any device: less memory, no compiler needed."""

# ruff: noqa: N999 - the folder is named as the Hub names build variants

from . import layers
from .fused_linear_cross_entropy import fused_linear_cross_entropy
from .rms_norm import rms_norm
from .rotary import rotary_pos_emb
from .swiglu import silu_mul

__all__ = [
    "fused_linear_cross_entropy",
    "layers",
    "rms_norm",
    "rotary_pos_emb",
    "silu_mul",
]
