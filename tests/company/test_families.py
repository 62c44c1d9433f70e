"""Model families of transformers, tiny and on the CPU, with the embedded collection bound."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from layers.tiny_model import IDS, SIZES, logits, tiny

import kernelhub
from company.embedded import LABELS, assert_same_step, step
from kernelhub.config import KernelConfig

if TYPE_CHECKING:
    from collections.abc import Callable

EVERY = KernelConfig(
    {
        name: (f"builtin:{name}", {"optional": True})
        for name in ("rotary_pos_emb", "RMSNorm", "LayerNorm", "SwiGLUMLP", "GeGLUMLP", "FusedLinearCrossEntropy")
    }
)
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

# What is bound, by layer name, and what is reported as not fitting.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, str]]] = {
    "Llama": ({}, {"RMSNorm": 5, "SwiGLUMLP": 2, "rotary_pos_emb": 2, "FusedLinearCrossEntropy": 1}, {}),
    "Qwen3": ({}, {"RMSNorm": 9, "SwiGLUMLP": 2, "rotary_pos_emb": 2, "FusedLinearCrossEntropy": 1}, {}),
    "Mistral": ({}, {"RMSNorm": 5, "SwiGLUMLP": 2, "rotary_pos_emb": 2, "FusedLinearCrossEntropy": 1}, {}),
    "Gemma": (
        {},
        {"GeGLUMLP": 2, "rotary_pos_emb": 2, "FusedLinearCrossEntropy": 1},
        {"RMSNorm": "it has no variance_epsilon"},
    ),
    "Phi3": ({}, {"RMSNorm": 5, "rotary_pos_emb": 2, "FusedLinearCrossEntropy": 1}, {}),
    "Qwen3Moe": (MOE, {"RMSNorm": 9, "rotary_pos_emb": 2}, {"FusedLinearCrossEntropy": "its forward"}),
    "GPTNeoX": ({}, {"LayerNorm": 5, "rotary_pos_emb": 2}, {}),
}


def counted(model: torch.nn.Module) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in kernelhub.report(model).bound:
        found[row.layer] = found.get(row.layer, 0) + 1
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_forward_loss_and_gradients_agree_and_the_rest_is_reported(
    family: str, tell: Callable[[str, str, str], None]
) -> None:
    changes, bound, refused = FAMILIES[family]
    plain, model = tiny(family, **changes), tiny(family, **changes)
    kernelhub.kernelize(model, EVERY)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    assert_same_step(step(model.train()), step(plain.train()))
    assert counted(model) == bound
    skipped = {row.layer: row.reason for row in kernelhub.report(model).skipped}
    for layer, reason in refused.items():
        assert reason in skipped[layer]
    tell(f"{family}ForCausalLM", ", ".join(f"{name} ({number})" for name, number in bound.items()), "works")
    for layer in refused:
        tell(f"{family}ForCausalLM", layer, f"refused: {skipped[layer]}")


def test_a_vision_model(tell: Callable[[str, str, str], None]) -> None:
    def vision() -> Any:
        torch.manual_seed(0)
        sizes = {name: SIZES[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        config = transformers.ViTConfig(**sizes, num_attention_heads=4, image_size=16, patch_size=8, num_labels=3)
        return transformers.ViTForImageClassification(config).eval()

    pixels = torch.arange(2 * 3 * 16 * 16.0).reshape(2, 3, 16, 16).sin()
    plain, model = vision(), vision()
    kernelhub.kernelize(model, EVERY)
    inputs = {"pixel_values": pixels, "labels": torch.tensor([0, 2])}
    for each in (plain, model):
        each.zero_grad()
        each(**inputs).loss.backward()
    with torch.no_grad():
        torch.testing.assert_close(model(pixels).logits, plain(pixels).logits, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    assert counted(model) == {"LayerNorm": 5}
    tell("ViTForImageClassification", "LayerNorm (5)", "works")


def test_the_loss_kernel_of_the_collection() -> None:
    plain, model = tiny().train(), tiny().train()
    config = KernelConfig.from_liger(cross_entropy=True, source="builtin")
    kernelhub.kernelize(model, config)
    assert counted(model)["ForCausalLMLoss"] == 1
    assert model(input_ids=IDS, labels=LABELS).logits is not None
    assert_same_step(step(model), step(plain))
    with kernelhub.kernelized(model, {"RMSNorm": ""}):
        assert not kernelhub.report(model).bound
    assert counted(model)["ForCausalLMLoss"] == 1
