"""Kernel layers as a Hub repository would hold them, and the loader that hands them to kernelize."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kernelhub.config import KernelConfig
from kernelhub.layers import kernelize as module_under_test
from kernelhub.layers.symbol import LoadedSymbol, PlannedSymbol

if TYPE_CHECKING:
    from kernelhub.config import KernelChoice
    from kernelhub.layers.report import Report

RAN: Counter[str] = Counter()


class RMSNorm(nn.Module):
    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        RAN["RMSNorm"] += 1
        wide = hidden_states.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * normed.to(hidden_states.dtype)


class CompilableRMSNorm(nn.Module):
    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon))


class TripleRMSNorm(nn.Module):
    """Wrong on purpose: its effect shows."""

    can_torch_compile = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x * 3.0


class ForwardOnlyRMSNorm(nn.Module):
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RAN["ForwardOnlyRMSNorm"] += 1
        return nn.functional.rms_norm(x, self.weight.shape, self.weight, self.variance_epsilon).detach()


class TorchRMSNorm(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return nn.functional.rms_norm(hidden_states, self.weight.shape, self.weight, self.eps)


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return x + residual


class SwiGLUMLP(nn.Module):
    @staticmethod
    def kernel_condition(module: nn.Module) -> bool | str:
        name = type(module.act_fn).__name__
        return name.startswith("SiLU") or f"its activation is {name}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        RAN["SwiGLUMLP"] += 1
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class CausalLM(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        RAN["CausalLM"] += 1
        return type(self).forward(self, *args, **kwargs)


class NoAttention(nn.Module):
    """Wrong on purpose: adds nothing to the residual stream."""

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Any,
        attention_mask: Any,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> Any:
        return hidden_states * 0, None


def rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    RAN["rotary"] += 1
    return plain_rotary(q, k, cos, sin, unsqueeze_dim)


def plain_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turned = [torch.cat((-x.chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) for x in (q, k)]
    return q * cos + turned[0] * sin, k * cos + turned[1] * sin


def no_rotary(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Wrong on purpose: positions do not count any more."""
    return q, k


no_rotary.can_torch_compile = True


def silu(x: torch.Tensor) -> torch.Tensor:
    return nn.functional.silu(x)


def load(choice: KernelChoice, backend: str) -> LoadedSymbol:
    """Bring the object of this module that the choice names."""
    symbol = str(choice.request.symbol)
    return LoadedSymbol(globals()[symbol], f"{choice.request.name}@0123abc", f"torch-{backend}", symbol)


def resolve(choice: KernelChoice, backend: str) -> PlannedSymbol:
    return PlannedSymbol(f"{choice.request.name}@0123abc", f"torch-{backend}", str(choice.request.symbol))


def backend_of(device: torch.device) -> str:
    return device.type


EVERYTHING = {
    "RMSNorm": "org/repo:RMSNorm",
    "SwiGLUMLP": "org/repo:SwiGLUMLP",
    "rotary_pos_emb": "org/repo:rotary",
    "ForCausalLM": "org/repo:CausalLM",
}


def kernelize(model: nn.Module, mapping: Any, **options: Any) -> Report:
    options = {"load": load, "backend_of": backend_of, **options}
    return module_under_test.kernelize(model, KernelConfig(mapping), **options)


def outcomes(result: Report) -> dict[str, str]:
    return {row.module: row.reason or row.state for row in result}
