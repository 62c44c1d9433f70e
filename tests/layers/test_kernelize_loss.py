"""The loss function of a language model as a layer name: ``ForCausalLMLoss`` with a kernel that takes logits."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from kernelhub.errors import ContractMismatch
from kernelhub.layers.kernelize import report, unkernelize
from kernelhub.layers.symbol import LoadedSymbol
from layers.kernel_layer import kernelize
from layers.tiny_model import IDS, anatomy, tiny

CALLS: list[str] = []


def loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: Any = None,
    ignore_index: int = -100,
    shift_labels: Any = None,
    **kwargs: Any,
) -> torch.Tensor:
    CALLS.append("loss")
    return logits.float().sum() * 0 + 7


class LossLayer(nn.Module):
    can_torch_compile = True

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: Any = None,
        ignore_index: int = -100,
        shift_labels: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        return logits.float().sum() * 0 + 7


class NoBackward(LossLayer):
    has_backward = False


def too_few(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return logits.sum()


def bound(kernel: Any = loss, model: Any = None, **options: Any) -> Any:
    model = tiny() if model is None else model
    symbol = LoadedSymbol(kernel, "org/repo@0123abc", "torch-cpu", kernel.__name__)
    kernelize(model, {"ForCausalLMLoss": f"org/repo:{kernel.__name__}"}, load=lambda *_: symbol, **options)
    return model


def loss_of(model: Any) -> float:
    return float(model(input_ids=IDS, labels=IDS).loss.detach())


@pytest.mark.parametrize("kernel", [loss, LossLayer])
def test_a_loss_kernel_takes_the_place_of_the_standard_one_and_is_removed_without_a_trace(kernel: Any) -> None:
    model = tiny()
    before, expected = anatomy(model), loss_of(model)
    bound(kernel, model)
    assert [row.module for row in report(model).bound] == ["(model)"]
    assert loss_of(model) == 7
    assert model.loss_function.__name__ == "ForCausalLMLoss"
    assert "forward" not in vars(model)
    unkernelize(model)
    assert (anatomy(model), loss_of(model)) == (before, expected)


def test_copies_keep_the_kernel_and_pickles_the_loss_that_it_stands_for() -> None:
    model = bound()
    assert loss_of(copy.deepcopy(model)) == 7
    loaded = pickle.loads(pickle.dumps(model))
    assert loss_of(loaded) == loss_of(tiny())
    assert not report(loaded)
    assert bound(loss, loaded) is loaded
    unkernelize(unkernelize(loaded))
    assert loss_of(loaded) == loss_of(tiny())


def test_a_loss_set_by_the_user_is_refused_and_one_set_later_is_kept() -> None:
    model = tiny()
    model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    with pytest.raises(ContractMismatch, match="its loss is <lambda>, not the standard ForCausalLMLoss"):
        bound(loss, model)
    model = bound()
    mine = model.loss_function = lambda logits, labels, vocab_size, **kwargs: logits.sum()
    unkernelize(model)
    assert model.loss_function is mine


def test_the_standard_loss_set_on_the_instance_is_restored() -> None:
    model = tiny()
    own = model.loss_function = tiny().loss_function
    unkernelize(bound(loss, model))
    assert vars(model)["_loss_function"] is own


def test_a_loss_that_cannot_be_called_alike_or_has_no_backward_is_refused() -> None:
    with pytest.raises(ContractMismatch, match=r"it does not take \*\*kwargs; its signature is \(logits, labels\)"):
        bound(too_few)
    model = bound(NoBackward)
    assert report(model)[0].reason == "NoBackward has no backward (has_backward is False)"
    assert "_loss_function" not in vars(model)


def test_torch_compile_traces_a_loss_that_allows_it_and_the_standard_one_else() -> None:
    for kernel, expected in ((LossLayer, 7.0), (loss, loss_of(tiny()))):
        model = bound(kernel)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        assert float(compiled(input_ids=IDS, labels=IDS).loss.detach()) == pytest.approx(expected)


def test_the_kernel_for_training_is_the_loss_in_every_mode() -> None:
    model = tiny()
    symbols = {"loss": loss, "LossLayer": LossLayer}

    def load(choice: Any, backend: str) -> LoadedSymbol:
        symbol = str(choice.request.symbol)
        return LoadedSymbol(symbols[symbol], "org/repo@0123abc", "torch-cpu", symbol)

    kernelize(model, {"ForCausalLMLoss": {"cpu": {"training": "o/r:loss", "inference": "o/r:LossLayer"}}}, load=load)
    CALLS.clear()
    assert [loss_of(model.train(flag)) for flag in (True, False)] == [7, 7]
    assert CALLS == ["loss", "loss"]
    assert [(row.symbol, row.mode) for row in report(model)] == [("loss", "inference, training")]
