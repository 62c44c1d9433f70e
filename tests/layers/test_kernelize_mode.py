"""Kernels per mode: each call of a layer takes the one for what the layer does then."""

from __future__ import annotations

import inspect
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

from kernelhub.errors import ContractMismatch, NotCached
from kernelhub.layers.kernelize import report, unkernelize
from kernelhub.layers.symbol import LoadedSymbol
from kernelhub.mode import Mode
from layers.kernel_layer import backend_of, kernelize, load
from layers.tiny_model import anatomy, tiny

if TYPE_CHECKING:
    from kernelhub.config import KernelChoice


class Scale(nn.Module):
    def forward(self, x: Any) -> Any:
        return x * 2


class Outer(nn.Module):
    """Its own train() does more than the one of nn.Module, and less."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Scale()
        self.switched: list[bool] = []

    def train(self, mode: bool = True) -> Outer:
        self.switched.append(mode)
        super().train(mode)
        return self

    def forward(self, x: Any) -> Any:
        return self.inner(x)


class Ten(nn.Module):
    can_torch_compile = True

    def forward(self, x: Any) -> Any:
        return x * 10


class Hundred(nn.Module):
    can_torch_compile = True

    def forward(self, x: Any) -> Any:
        return x * 100


class Thousand(nn.Module):
    """Says nothing about torch.compile."""

    def forward(self, x: Any) -> Any:
        return x * 1000


KERNELS = {cls.__name__: cls for cls in (Ten, Hundred, Thousand)}


def load_scale(choice: KernelChoice, backend: str) -> LoadedSymbol:
    symbol = str(choice.request.symbol)
    return LoadedSymbol(KERNELS[symbol], "org/repo@0123abc", "torch-cpu", symbol)


def bound(value: Any, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = Outer() if model is None else model
    kernelize(model, {"Scale": value}, load=load_scale, **options)
    return model


PER_MODE = {"cpu": {"training": "org/repo:Ten", "inference": "org/repo:Hundred"}}


def test_train_and_eval_switch_to_the_kernel_for_it() -> None:
    """REF huggingface/kernels#68, #90, #103: train() and eval() had to bind anew."""
    model = bound(PER_MODE)
    assert [model.train(flag)(1) for flag in (True, False, True)] == [10, 100, 10]
    model.eval()
    model.inner.train()
    assert model(1) == 10


def test_a_train_method_of_the_users_own_switches_too() -> None:
    model = bound(PER_MODE)
    model.eval()
    model.train()
    assert (model(1), model.switched) == (10, [False, True])
    other = Outer()
    other.inner.train = lambda mode=True: setattr(other.inner, "training", mode) or other.inner  # type: ignore[method-assign]
    bound(PER_MODE, other)
    assert (other.eval()(1), other.train()(1)) == (100, 10)


def test_one_kernel_for_every_mode_is_the_bound_forward_itself() -> None:
    model = bound("org/repo:Ten")
    assert model.inner.forward.__func__ is Ten.forward
    assert [row.mode for row in report(model)] == ["any"]


def test_the_rows_tell_the_modes_of_each_kernel() -> None:
    rows = report(bound(PER_MODE))
    assert [(row.symbol, row.mode, row.note) for row in rows] == [
        ("Hundred", "inference", "own forward in inference|compile, training|compile: the config has no kernel for it"),
        ("Ten", "training", ""),
    ]


@pytest.mark.parametrize(
    ("entries", "values"),
    [
        # eager inference, eager training, compiled inference, compiled training
        ({"fallback": "Ten"}, (10, 10, 10, 10)),
        ({"training": "Ten"}, (10, 10, 2, 2)),
        ({"inference": "Ten"}, (10, 2, 2, 2)),
        ({"training|compile": "Ten"}, (10, 10, 10, 10)),
        ({"inference|compile": "Ten"}, (10, 2, 10, 2)),
        ({"inference|compile": "Hundred", "training": "Ten"}, (100, 10, 100, 2)),
        ({"inference": "Thousand", "fallback": "Ten"}, (1000, 10, 10, 10)),
        ({"fallback": "Thousand"}, (1000, 1000, 2, 2)),
        ({"inference": "", "fallback": "Ten"}, (2, 10, 10, 10)),
    ],
)
def test_the_documented_order_of_modes_holds_for_every_call(entries: dict[str, str], values: tuple[int, ...]) -> None:
    """REF linkedin/Liger-Kernel#174; huggingface/kernels-community#270, #272: torch.compile met kernels that it cannot
    trace; they are not traced.
    """
    model = bound({"cpu": {mode: symbol and f"org/repo:{symbol}" for mode, symbol in entries.items()}})
    x = torch.ones(())
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    found = [int(runs.train(flag)(x)) for runs in (model, compiled) for flag in (False, True)]
    assert tuple(found) == values


@pytest.mark.parametrize(
    ("mode", "values"),
    [(Mode.INFERENCE, (100, 100)), ("training", (10, 10)), (Mode.TRAINING_COMPILE, (2, 2)), (Mode.FALLBACK, (2, 2))],
)
def test_a_mode_that_is_given_is_pinned(mode: Any, values: tuple[int, int]) -> None:
    model = bound(PER_MODE, mode=Mode(mode))
    assert (model.eval()(1), model.train()(1)) == values
    assert {row.mode for row in report(model)} == {Mode(mode).value}


def test_switching_compiles_once_for_each_mode_without_graph_breaks() -> None:
    """REF huggingface/kernels#85, #87, #607; huggingface/diffusers#12387, #12475, #12236."""
    model = nn.Sequential(*(Scale() for _ in range(4)))
    bound({"cpu": {"training|compile": "org/repo:Ten", "inference|compile": "org/repo:Hundred"}}, model)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for flag in (True, False) * 3:
        assert compiled.train(flag)(torch.ones(())) == (10**4 if flag else 100**4)
    assert counter.frame_count == 2


def test_a_kernel_for_one_mode_that_cannot_be_had_is_an_error() -> None:
    missing = NotCached("kernel org/repo", "store", "kernelhub prefetch")  # type: ignore[arg-type]

    def failing(choice: KernelChoice, backend: str) -> LoadedSymbol:
        if choice.request.symbol == "Ten":
            raise missing
        return load_scale(choice, backend)

    model = Outer()
    before = anatomy(model)
    with pytest.raises(NotCached):
        kernelize(model, {"Scale": PER_MODE}, load=failing)
    assert anatomy(model) == before
    result = kernelize(model, {"Scale": PER_MODE}, load=failing, strict=False)
    assert (model.eval()(1), model.train()(1)) == (100, 2)
    assert "own forward in training: NotCached" in result[0].note


def test_a_kernel_that_fits_in_one_mode_only_is_an_error_too() -> None:
    mapping = {"model.norm": {"cpu": {"inference": "org/repo:RMSNorm", "training": "org/repo:TwoInputs"}}}
    with pytest.raises(ContractMismatch, match="TwoInputs"):
        kernelize(tiny(), mapping)


def test_a_switching_layer_shows_its_signature_and_can_be_pickled_and_restored() -> None:
    model = bound(PER_MODE)
    assert str(inspect.signature(model.inner.forward)) == "(x: 'Any') -> 'Any'"
    assert pickle.loads(pickle.dumps(model))(1) == 2
    unkernelize(model)
    assert (model(1), list(vars(model.inner))) == (2, list(vars(Scale())))


def test_all_layers_with_the_same_kernels_share_one_forward() -> None:
    model = bound(PER_MODE, nn.Sequential(Scale(), Scale()))
    assert model[0].forward.__func__ is model[1].forward.__func__


def test_functions_inside_a_forward_switch_too() -> None:
    from layers.tiny_model import logits

    model = tiny()
    plain = logits(model)
    mapping = {"rotary_pos_emb": {"cpu": {"training": "org/repo:no_rotary", "inference": "org/repo:rotary"}}}
    kernelize(model, mapping, load=load, backend_of=backend_of)
    torch.testing.assert_close(logits(model), plain)
    assert not torch.allclose(logits(model.train()), plain)
    torch.testing.assert_close(logits(model.eval()), plain)


def test_a_kernel_that_takes_anything_shows_the_signature_of_the_layer() -> None:
    """Callers (transformers' Trainer and generate) look for the names of parameters there."""

    class Anything(nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return type(self).forward(self, *args, **kwargs) + 1

    model = Outer()
    loaded = LoadedSymbol(Anything, "org/repo@0123abc", "torch-cpu", "Anything")
    kernelize(model, {"Scale": "org/repo:Anything"}, load=lambda choice, backend: loaded)
    assert str(inspect.signature(model.inner.forward)) == "(x: 'Any') -> 'Any'"
    assert model(1) == 3
