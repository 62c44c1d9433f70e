"""Functions inside a forward: replaced in one module, or in a wrapper that layers share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from kernelhub.layers.binding import record_of
from kernelhub.layers.kernelize import report, unkernelize
from kernelhub.layers.symbol import LoadedSymbol
from layers.kernel_layer import RAN, kernelize
from layers.tiny_model import anatomy, logits, tiny

if TYPE_CHECKING:
    from kernelhub.config import KernelChoice


def test_a_rotary_function_and_a_whole_attention_kernel_do_not_mix() -> None:
    model = tiny()
    mapping = {"rotary_pos_emb": "org/repo:rotary", "model.layers.0.self_attn": "org/repo:NoAttention"}
    result = kernelize(model, mapping)
    assert [(row.module, row.layer, row.reason or row.state) for row in result] == [
        ("model.layers.0.self_attn", "rotary_pos_emb",
         "its whole forward is replaced by the entry 'model.layers.0.self_attn'"),
        ("model.layers.1.self_attn", "rotary_pos_emb", "bound"),
        ("model.layers.0.self_attn", "model.layers.0.self_attn", "bound"),
    ]  # fmt: skip
    RAN.clear()
    logits(model)
    assert RAN["rotary"] == 1


class Wrapped(nn.Module):
    kernel_layer_name = "scale"

    def forward(self, x: Any) -> Any:
        return x * 2


scale = Wrapped()
shift = Wrapped()
shift.kernel_layer_name = "shift"


class TwoFunctions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.__dict__["_kernel_funcs"] = {"scale": scale, "shift": shift}

    def forward(self, x: Any) -> Any:
        return shift(scale(x))


class Indirect(TwoFunctions):
    def forward(self, x: Any) -> Any:
        return self.step(x)

    def step(self, x: Any) -> Any:
        return scale(x)


def load_multiplication(choice: KernelChoice, backend: str) -> LoadedSymbol:
    factor = {"scale": 10, "shift": 100}[str(choice.request.symbol)]
    return LoadedSymbol(lambda x: x * factor, "org/repo@0123abc", f"torch-{backend}", str(choice.request.symbol))


def test_two_functions_of_one_forward_are_replaced_together_in_one_model_only() -> None:
    first, second = nn.Sequential(TwoFunctions()), nn.Sequential(TwoFunctions())
    before = anatomy(first)
    result = kernelize(first, {"scale": "org/repo:scale", "shift": "org/repo:shift"}, load=load_multiplication)
    assert (first(1), second(1)) == (1000, 4)
    assert report(first) == result
    assert [row.layer for row in result.bound] == ["scale", "shift"]
    unkernelize(first)
    assert (first(1), anatomy(first)) == (4, before)


def test_a_wrapped_function_shared_by_layers_is_bound_once_and_reported_for_each() -> None:
    model = nn.Sequential(Indirect(), Indirect())
    before = dict(vars(scale))
    result = kernelize(model, {"scale": "org/repo:scale"}, load=load_multiplication)
    assert [row.module for row in result.bound] == ["0.scale", "1.scale"]
    assert report(model) == result
    assert model(1) == 100
    record = record_of(scale)
    assert record is not None
    unkernelize(model)
    assert (model(1), vars(scale)) == (4, before)
