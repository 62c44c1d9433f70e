"""Tiny transformers models with random weights, and what a test wants to know about them."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = (torch.arange(14).reshape(2, 7) * 5 + 3) % 64


def tiny(family: str = "Qwen3", **changes: Any) -> Any:
    """A ``<family>ForCausalLM`` in evaluation mode; the same weights each time."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **changes)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    model(input_ids=IDS, labels=IDS).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def anatomy(model: nn.Module) -> dict[str, list[tuple[str, int]]]:
    """Each module's ``__dict__``: the keys in order and the identity of the values."""
    return {path: [(key, id(value)) for key, value in vars(module).items()] for path, module in model.named_modules()}


def hook_counts(model: nn.Module) -> dict[str, list[int]]:
    """How many hooks each module has, of each kind."""
    return {
        path: [len(value) for key, value in vars(module).items() if key.endswith("_hooks")]
        for path, module in model.named_modules()
    }
