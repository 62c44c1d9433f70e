"""A kernel repository whose layers have other parameters than those of the models, each with its layout class.

The layouts are written as the documentation of transformers asks for: the rules of ``conversion_mapping`` are objects
of transformers, imported only if it is there. ``CALLS`` counts what ran.
"""

from __future__ import annotations

LAYERS = '''
from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.nn import functional as F

try:
    from transformers import Concatenate, WeightConverter
    from transformers.core_model_loading import Transpose, WeightRenaming
except ImportError:
    Concatenate = Transpose = WeightConverter = WeightRenaming = None

CALLS = Counter()


def count(name):
    if not torch.compiler.is_compiling():
        CALLS[name] += 1


def rms_norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotated(x, cos, sin):
    left, right = x.chunk(2, dim=-1)
    return x * cos.unsqueeze(1) + torch.cat((-right, left), dim=-1) * sin.unsqueeze(1)


class NormMLPLayout(nn.Module):
    conversion_mapping = [
        WeightRenaming("post_attention_layernorm.weight", "post_attention_layernorm.scale"),
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            "post_attention_layernorm.gate_up_proj.weight",
            [Concatenate(dim=0)],
        ),
        WeightRenaming("mlp.down_proj.weight", "post_attention_layernorm.down_proj.weight"),
    ]

    def __init__(self, norm, mlp):
        super().__init__()
        self.variance_epsilon = norm.variance_epsilon
        self.scale = nn.Parameter(torch.empty_like(norm.weight))
        gate, up, down = mlp.gate_proj, mlp.up_proj, mlp.down_proj
        self.gate_up_proj = nn.Linear(gate.in_features, gate.out_features + up.out_features, bias=False)
        self.down_proj = nn.Linear(down.in_features, down.out_features, bias=False)
        self.act_fn = mlp.act_fn


class NormMLP(nn.Module):
    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        count("NormMLP")
        gate, up = self.gate_up_proj(rms_norm(hidden_states, self.scale, self.variance_epsilon)).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)


class GateUpMLPLayout(nn.Module):
    """One layer whose first two projections become one; the third is called as the layer's own module."""

    conversion_mapping = [
        WeightConverter([r"mlp\\.gate_proj\\.weight", r"mlp\\.up_proj\\.weight"], "mlp.gate_up", [Concatenate(dim=0)]),
    ]

    def __init__(self, mlp):
        super().__init__()
        shape = (mlp.gate_proj.out_features + mlp.up_proj.out_features, mlp.gate_proj.in_features)
        self.gate_up = nn.Parameter(torch.empty(shape))
        self.down_proj = mlp.down_proj
        self.act_fn = mlp.act_fn


class GateUpMLP(nn.Module):
    can_torch_compile = True
    gate_up: torch.Tensor

    @staticmethod
    def kernel_condition(layer: nn.Module) -> bool | str:
        name = type(layer.act_fn).__name__
        return name.startswith("SiLU") or f"its activation is {name}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count("GateUpMLP")
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class InferenceMLPLayout(GateUpMLPLayout):
    pass


class InferenceMLP(nn.Module):
    has_backward = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count("InferenceMLP")
        gate, up = F.linear(x, self.gate_up).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up).detach()


class TransposedMLPLayout(nn.Module):
    """Weights that lie the other way round, and joined along their second dimension: each call makes them."""

    conversion_mapping = [
        WeightConverter(
            ["mlp.gate_proj.weight", "mlp.up_proj.weight"], "mlp.gate_up", [Concatenate(dim=1)]
        ),
        WeightConverter("mlp.down_proj.weight", "mlp.down", [Transpose(0, 1)]),
    ]

    def __init__(self, mlp):
        super().__init__()
        rows, columns = mlp.gate_proj.weight.shape
        self.gate_up = nn.Parameter(torch.empty(rows, 2 * columns))
        self.down = nn.Parameter(torch.empty(mlp.down_proj.weight.shape[::-1]))


class TransposedMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count("TransposedMLP")
        columns = x.shape[-1]
        gate, up = x @ self.gate_up[:, :columns].T, x @ self.gate_up[:, columns:].T
        return (F.silu(gate) * up) @ self.down


class QKVAttentionLayout(nn.Module):
    conversion_mapping = [
        WeightConverter(
            ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"],
            "self_attn.qkv_proj.weight",
            [Concatenate(dim=0)],
        ),
    ]

    def __init__(self, attention):
        super().__init__()
        rows = [each.out_features for each in (attention.q_proj, attention.k_proj, attention.v_proj)]
        self.rows, self.head_dim, self.scaling = rows, attention.head_dim, attention.scaling
        self.layer_idx = attention.layer_idx
        self.qkv_proj = nn.Linear(attention.q_proj.in_features, sum(rows), bias=False)
        self.o_proj = attention.o_proj
        self.q_norm, self.k_norm = (getattr(attention, name, None) or nn.Identity() for name in ("q_norm", "k_norm"))


class QKVAttention(nn.Module):
    can_torch_compile = True

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):
        count("QKVAttention")
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query, key, value = (each.view(shape) for each in self.qkv_proj(hidden_states).split(self.rows, dim=-1))
        query, key, value = (each.transpose(1, 2) for each in (self.q_norm(query), self.k_norm(key), value))
        query, key = (rotated(each, *position_embeddings) for each in (query, key))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        causal = attention_mask is None and query.shape[2] > 1
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, is_causal=causal, scale=self.scaling, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(*hidden_states.shape[:-1], -1)), None


class AddNormLayerLayout(nn.Module):
    """A whole decoder layer, for the addition between its halves; it takes the norm's weight as it is."""

    def __init__(self, layer):
        super().__init__()
        self.input_layernorm, self.self_attn, self.mlp = layer.input_layernorm, layer.self_attn, layer.mlp
        self.scale = layer.post_attention_layernorm.weight
        self.variance_epsilon = layer.post_attention_layernorm.variance_epsilon


class AddNormLayer(nn.Module):
    def forward(
        self,
        hidden_states,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        use_cache=False,
        position_embeddings=None,
        **kwargs,
    ):
        count("AddNormLayer")
        attended, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            position_embeddings=position_embeddings,
            **kwargs,
        )
        summed = hidden_states + attended
        return summed + self.mlp(rms_norm(summed, self.scale, self.variance_epsilon))


class ConfiguredMLPLayout(nn.Module):
    """For a plain layer name: made from the arguments that the layer was made with."""

    conversion_mapping = [
        WeightConverter(["gate_proj.weight", "up_proj.weight"], "gate_up_proj.weight", [Concatenate(dim=0)]),
    ]

    def __init__(self, config):
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)


class ConfiguredMLP(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        count("ConfiguredMLP")
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class SizedNormLayout(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.variance_epsilon = eps


class SizedNorm(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden_states, self.weight, self.variance_epsilon)


class WithoutLayout(nn.Module):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states
'''

FILES: dict[str, str | bytes] = {"__init__.py": "from . import layers\n", "layers.py": LAYERS}

NORM_MLP = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
MLP = (("MLP", "model.layers.*.mlp"),)
ATTENTION = (("Attention", "model.layers.*.self_attn"),)
LAYER = (("DecoderLayer", "model.layers.*"),)
