"""torch.compile traces the kernels that are bound."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernelhub.layers.kernelize import unkernelize
from kernelhub.mode import Mode
from layers.kernel_layer import kernelize
from layers.tiny_model import IDS, logits, tiny


def compiled(model: nn.Module) -> torch.Tensor:
    torch._dynamo.reset()
    with torch.no_grad():
        return torch.compile(model, backend="eager", fullgraph=True)(input_ids=IDS).logits


def test_a_kernelized_model_compiles_without_a_graph_break() -> None:
    model = tiny()
    expected = logits(model)
    kernelize(
        model,
        {"RMSNorm": "org/repo:CompilableRMSNorm", "rotary_pos_emb": "org/repo:plain_rotary"},
    )
    torch.testing.assert_close(compiled(model), expected)


@pytest.mark.parametrize(("layer", "symbol"), [("RMSNorm", "TripleRMSNorm"), ("rotary_pos_emb", "no_rotary")])
def test_the_kernel_is_what_torch_compile_traces(layer: str, symbol: str) -> None:
    model = tiny()
    plain = compiled(model)
    kernelize(model, {layer: f"org/repo:{symbol}"}, mode=Mode.INFERENCE_COMPILE)
    with_kernel = logits(model)
    assert not torch.allclose(with_kernel, plain)
    torch.testing.assert_close(compiled(model), with_kernel)
    unkernelize(model)
    torch.testing.assert_close(compiled(model), plain)


def test_a_model_compiled_before_follows_kernelize_and_unkernelize() -> None:
    model = tiny()
    torch._dynamo.reset()
    compiled_model = torch.compile(model, backend="eager")
    plain = logits(compiled_model)
    kernelize(compiled_model, {"rotary_pos_emb": "org/repo:no_rotary"})
    torch.testing.assert_close(logits(compiled_model), logits(model))
    assert not torch.allclose(logits(compiled_model), plain)
    unkernelize(compiled_model)
    torch.testing.assert_close(logits(compiled_model), plain)
