"""A model of a norm, a gated MLP and another norm, and the way from kernel classes to its report."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from checking import planted
from kernelhub.config import KernelConfig
from kernelhub.layers import kernelize as binder
from kernelhub.layers.symbol import LoadedSymbol


class Norm(nn.Module):
    """The plain layer."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, size))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> Any:
        return planted.rms(x, self.weight, self.eps)


class GeluMLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(size, 2 * size), nn.Linear(size, 2 * size)
        self.down_proj = nn.Linear(2 * size, size)
        self.act_fn = nn.GELU()

    def forward(self, x: torch.Tensor) -> Any:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Small(nn.Module):
    def __init__(self, size: int = 24) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(size, size)
        self.norm, self.mlp, self.last = Norm(size), GeluMLP(size), Norm(size)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.first(x)
        return self.last(x + self.mlp(self.norm(x)))


def batch(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Three sequences of seven: no multiple of a block."""
    return torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(1)).to(dtype)


def load(choice: Any, backend: str) -> LoadedSymbol:
    """Bring a kernel of ``planted.py``, as a commit of a repository would hold it."""
    symbol = str(choice.request.symbol)
    return LoadedSymbol(getattr(planted, symbol), f"{choice.request.name}@{'0123abc' * 2}", "torch-cpu", symbol)


def backend_of(device: torch.device) -> str:
    return device.type


def bind(model: nn.Module, mapping: Any, **options: Any) -> Any:
    """``kernelize`` with the kernels of ``planted.py``."""
    return binder.kernelize(model, KernelConfig(mapping), load=load, backend_of=backend_of, **options)
