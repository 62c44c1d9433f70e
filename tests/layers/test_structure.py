from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - torch's own habit
from torch import nn
from transformers.activations import ACT2FN

from kernelhub.layers.structure import STRUCTURES, calls_function, global_name
from layers.tiny_model import tiny

if TYPE_CHECKING:
    from types import FunctionType


class GatedMLP(nn.Module):
    def __init__(self, act_fn: Any) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(2, 3), nn.Linear(2, 3), nn.Linear(3, 2)
        self.act_fn = act_fn


@pytest.mark.parametrize("act_fn", [ACT2FN["silu"], ACT2FN["swish"], nn.SiLU(), F.silu])
def test_a_gated_mlp_with_silu_is_a_swiglu(act_fn: Any) -> None:
    assert STRUCTURES["SwiGLUMLP"](GatedMLP(act_fn)) is True
    assert "not GELU" in str(STRUCTURES["GeGLUMLP"](GatedMLP(act_fn)))


@pytest.mark.parametrize(
    "act_fn",
    [ACT2FN["gelu"], ACT2FN["gelu_pytorch_tanh"], ACT2FN["gelu_new"], nn.GELU(), F.gelu,
     functools.partial(F.gelu, approximate="tanh")],
)  # fmt: skip
def test_a_gated_mlp_with_gelu_is_a_geglu(act_fn: Any) -> None:
    assert STRUCTURES["GeGLUMLP"](GatedMLP(act_fn)) is True
    assert "not SiLU" in str(STRUCTURES["SwiGLUMLP"](GatedMLP(act_fn)))


def test_another_activation_is_neither() -> None:
    assert STRUCTURES["SwiGLUMLP"](GatedMLP(nn.ReLU())) == "its activation is ReLU, not SiLU"
    assert STRUCTURES["GeGLUMLP"](GatedMLP(ACT2FN["quick_gelu"])) == "its activation is QuickGELUActivation, not GELU"


def test_what_lacks_a_projection_or_the_activation_is_no_gated_mlp() -> None:
    without_gate = GatedMLP(nn.SiLU())
    del without_gate.gate_proj
    for module in (without_gate, GatedMLP(None), nn.Linear(1, 1)):
        assert STRUCTURES["SwiGLUMLP"](module) is False


def test_a_causal_language_model_has_a_head_and_a_base_model() -> None:
    model = tiny()
    assert STRUCTURES["ForCausalLM"](model) is True
    assert STRUCTURES["ForCausalLM"](model.model) is False
    del model.lm_head
    assert STRUCTURES["FusedLinearCrossEntropy"](model) is False


def test_a_function_is_found_where_the_own_forward_loads_it() -> None:
    attention = tiny().model.layers[0].self_attn
    assert calls_function(attention, "apply_rotary_pos_emb") is True
    assert calls_function(attention, "rotate_half") is False
    assert calls_function(nn.ReLU(), "apply_rotary_pos_emb") is False


def apply_rotary_pos_emb(x: torch.Tensor) -> torch.Tensor:
    return x


class Decorated(nn.Module):
    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return apply_rotary_pos_emb(x)


def test_a_decorated_forward_is_seen_through() -> None:
    """transformers 5.24 wraps the forwards of its attention layers to take an argument's old name."""
    assert calls_function(Decorated(), "apply_rotary_pos_emb") is True
    assert global_name(Decorated(), apply_rotary_pos_emb) == "apply_rotary_pos_emb"


class HiddenByDecorator(nn.Module):
    """Its decorator keeps the function in an attribute, where a copy cannot be put."""

    def forward(self, x: Any) -> Any:
        return Decorated.forward(self, x)  # type: ignore[arg-type]

    forward.__wrapped__ = Decorated.forward  # type: ignore[attr-defined]


def test_a_decorator_that_cannot_be_rebuilt_hides_the_function() -> None:
    assert calls_function(HiddenByDecorator(), "apply_rotary_pos_emb") == (
        "HiddenByDecorator.forward is wrapped by a decorator, which hides apply_rotary_pos_emb"
    )
    assert global_name(HiddenByDecorator(), apply_rotary_pos_emb) is None


def test_decorators_are_rebuilt_around_a_copy_that_calls_the_kernel() -> None:
    from kernelhub.layers.binding import forward_calling

    forward = cast("FunctionType", Decorated.forward)
    copy = forward_calling(forward, {"apply_rotary_pos_emb": lambda x: 2 * x})
    x = torch.ones(2, requires_grad=True)
    assert torch.equal(copy(Decorated(), x), 2 * x)
    assert not copy(Decorated(), x).requires_grad  # the decorator is at work
    assert torch.equal(Decorated()(x), x)
    assert inspect.unwrap(copy).__globals__["apply_rotary_pos_emb"] is not apply_rotary_pos_emb
