"""Attribute adapters and optional entries of a config, and ``kernelized``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from kernelhub.errors import ContractMismatch, UnknownLayer
from kernelhub.layers import kernelize as module_under_test
from kernelhub.layers.kernelize import kernelized, report, unkernelize
from kernelhub.layers.symbol import LoadedSymbol
from layers.kernel_layer import RMSNorm, kernelize
from layers.tiny_model import anatomy, logits, tiny

EPS = {"attributes": {"variance_epsilon": "eps"}}


def norms() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.RMSNorm(4, eps=0.5), nn.RMSNorm(4, eps=0.25))


def test_a_kernel_reads_an_attribute_under_the_name_that_the_layer_has() -> None:
    model, x = norms(), torch.arange(4.0)
    expected, before, public = model(x), anatomy(model), dir(model[0])
    original = RMSNorm.forward.__code__
    with pytest.raises(ContractMismatch, match=r"it uses self\.variance_epsilon, which RMSNorm does not have"):
        kernelize(model, {"RMSNorm": "org/repo:RMSNorm"})
    kernelize(model, {"RMSNorm": ("org/repo:RMSNorm", EPS)})
    assert len(report(model).bound) == 2
    torch.testing.assert_close(model(x), expected)
    model[0].eps = 2.0
    assert not torch.allclose(model(x), expected)
    model[0].eps = 0.5
    assert {*dir(model[0])} - {*public} == {"_kernelhub"}
    assert not hasattr(model[0], "variance_epsilon")
    assert list(model.state_dict()) == ["0.weight", "1.weight"]
    assert RMSNorm.forward.__code__ is original
    unkernelize(model)
    assert anatomy(model) == before


class Nested(nn.Module):
    can_torch_compile = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        def scale() -> Any:
            return self.factor + 1

        return input * scale() + sum(self.factor for _ in range(2))


class Ambiguous(nn.Module):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input * self.shape + input.shape[0]


def load(choice: Any, backend: str) -> LoadedSymbol:
    symbol = str(choice.request.symbol)
    return LoadedSymbol({"Nested": Nested, "Ambiguous": Ambiguous}[symbol], "org/repo@0123abc", "torch-cpu", symbol)


def test_functions_inside_a_forward_read_the_other_name_too_and_torch_compile_follows() -> None:
    model = norms()
    kernelize(model, {"RMSNorm": ("org/repo:Nested", {"attributes": {"factor": "eps"}})}, load=load)
    assert float(model[0](torch.tensor(2.0))) == 2 * 1.5 + 1.0
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(torch.tensor(2.0)), model(torch.tensor(2.0)))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (("org/repo:Ambiguous", {"attributes": {"shape": "eps"}}), "uses the name 'shape' for something else too"),
        (("org/repo:Nested", {"attributes": {"factor": "epsilon"}}), "which RMSNorm does not have (as 'epsilon')"),
        (("org/repo:Nested", {"attributes": {"weight": "eps"}}), "does not use self.weight"),
    ],
)
def test_a_name_that_cannot_be_given_is_refused(value: Any, words: str) -> None:
    with pytest.raises(ContractMismatch) as caught:
        kernelize(norms(), {"RMSNorm": value}, load=load)
    assert words in str(caught.value)


def test_an_optional_entry_may_mean_nothing_or_fit_nothing() -> None:
    """REF huggingface/transformers#46399, #48457: a default that did not fit crashed the model."""
    model = tiny()
    mapping = {
        "RMSNorm": "org/repo:RMSNorm",
        "GeGLUMLP": ("org/repo:SwiGLUMLP", {"optional": True}),
        "NoSuchLayer": ("org/repo:RMSNorm", {"optional": True}),
        "SwiGLUMLP": ("org/repo:TwoInputs", {"optional": True}),
    }
    result = kernelize(model, mapping)
    assert {row.layer for row in result.bound} == {"RMSNorm"}
    assert {row.layer for row in result.skipped} == {"GeGLUMLP", "NoSuchLayer", "SwiGLUMLP"}
    with pytest.raises(UnknownLayer):
        kernelize(model, {**mapping, "NoSuchLayer": "org/repo:RMSNorm"})


def test_kernelized_binds_for_a_while_and_gives_back_what_was_bound_before() -> None:
    model = tiny()
    plain, untouched = logits(model), anatomy(model)
    triple = {"model.norm": "org/repo:TripleRMSNorm"}
    with kernelized(model, lambda each: kernelize(each, triple)) as same:
        assert same is model
        assert not torch.allclose(logits(model), plain)
    assert anatomy(model) == untouched
    kernelize(model, triple)
    bound, tripled = anatomy(model), logits(model)
    with kernelized(model, lambda each: kernelize(each, {"RMSNorm": "org/repo:RMSNorm"})):
        torch.testing.assert_close(logits(model), plain)
    assert anatomy(model) == bound
    assert torch.equal(logits(model), tripled)
    with pytest.raises(ZeroDivisionError), kernelized(model, module_under_test.unkernelize):
        raise ZeroDivisionError
    assert anatomy(model) == bound


def test_kernelized_of_a_config_that_fails_leaves_the_model_as_it_was() -> None:
    model = tiny()
    kernelize(model, {"model.norm": "org/repo:TripleRMSNorm"})
    before = anatomy(model)
    with (
        pytest.raises(UnknownLayer),
        kernelized(model, lambda each: kernelize(each, {"RMSNrom": "org/repo:RMSNorm"})),
    ):
        raise AssertionError("never here")
    assert anatomy(model) == before
