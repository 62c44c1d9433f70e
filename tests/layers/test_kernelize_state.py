"""Hooks, copies and pickles of a kernelized model."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from kernelhub.layers.kernelize import report, unkernelize
from layers.kernel_layer import EVERYTHING, kernelize
from layers.tiny_model import IDS, logits, tiny


def test_hooks_keep_firing() -> None:
    model = tiny()
    mlp, fired = model.model.layers[0].mlp, []
    mlp.register_forward_pre_hook(lambda *_: fired.append("before"))
    mlp.register_forward_hook(lambda *_: fired.append("after"))
    mlp.register_full_backward_hook(lambda *_: fired.append("backward"))
    kernelize(model, EVERYTHING)
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert fired == ["before", "after", "backward"]
    unkernelize(model)
    logits(model)
    assert fired == ["before", "after", "backward", "before", "after"]


def test_hidden_states_and_generation_work_on_a_kernelized_model() -> None:
    model = tiny()
    expected = model.generate(IDS, max_new_tokens=3, do_sample=False)
    states = model(input_ids=IDS, output_hidden_states=True).hidden_states
    kernelize(model, EVERYTHING)
    assert torch.equal(model.generate(IDS, max_new_tokens=3, do_sample=False), expected)
    torch.testing.assert_close(model(input_ids=IDS, output_hidden_states=True).hidden_states, states)


def test_a_deep_copy_is_bound_and_restored_on_its_own() -> None:
    model = tiny()
    expected = logits(model)
    kernelize(model, {"RMSNorm": "org/repo:TripleRMSNorm"})
    twin = copy.deepcopy(model)
    assert report(twin) == report(model)
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    assert not logits(twin).any()
    unkernelize(twin)
    assert not torch.allclose(logits(model), expected)
    assert report(model).bound
    assert not any({"forward", "_kernelhub"} & set(vars(module)) for module in twin.modules())
    unkernelize(model)
    assert torch.equal(logits(model), expected)


def test_a_shallow_copy_computes_the_same_and_shares_its_layers() -> None:
    model = tiny()
    expected = logits(model)
    kernelize(model, EVERYTHING)
    twin = copy.copy(model)
    torch.testing.assert_close(logits(twin), expected)
    unkernelize(twin)
    assert "forward" not in vars(twin)
    unkernelize(model)
    assert torch.equal(logits(model), expected)


def saved_and_loaded(model: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


@pytest.mark.parametrize("through", [lambda model: pickle.loads(pickle.dumps(model)), saved_and_loaded])
def test_an_unpickled_model_is_plain_and_can_be_kernelized_again(through: Any) -> None:
    model = tiny()
    expected = logits(model)
    plain = {path: list(vars(module)) for path, module in model.named_modules()}
    kernelize(model, EVERYTHING)
    loaded = through(model)
    assert len(report(loaded)) == 0
    assert torch.equal(logits(loaded), expected)
    assert len(kernelize(loaded, EVERYTHING).bound) == 14
    torch.testing.assert_close(logits(loaded), expected)
    unkernelize(loaded)
    cleaned = unkernelize(through(model))
    assert {path: list(vars(module)) for path, module in loaded.named_modules()} == plain
    assert {path: list(vars(module)) for path, module in cleaned.named_modules()} == plain
