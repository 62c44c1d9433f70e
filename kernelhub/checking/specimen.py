"""Specimen: a small model of plain torch layers, to try the shipped kernels by where there is no other model."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

KERNELS = {"RMSNorm": "builtin:RMSNorm", "LayerNorm": "builtin:LayerNorm", "SwiGLUMLP": "builtin:SwiGLUMLP"}
_WIDTH = 96
_VOCABULARY = 128


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, 2 * width, bias=False)
        self.up_proj = nn.Linear(width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width, width, bias=False)
        self.act_fn = nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class Specimen(nn.Module):
    """Embedding, norm, MLP, norm; the same random weights each time."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=_VOCABULARY)
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            self.embedding = nn.Embedding(_VOCABULARY, _WIDTH)
            self.first, self.last = nn.RMSNorm(_WIDTH, eps=1e-6), nn.LayerNorm(_WIDTH)
            self.mlp = GatedMLP(_WIDTH)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """``(batch, tokens)`` ids to ``(batch, tokens, width)``."""
        x = self.embedding(input_ids)
        out: torch.Tensor = self.last(x + self.mlp(self.first(x)))
        return out
