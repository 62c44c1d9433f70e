"""Attention functions from a repository, in models of transformers that look theirs up by name."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from kernel_repository import write_build
from layers.tiny_model import IDS, anatomy, gradients, logits, tiny

import kernelhub
from kernelhub.errors import ContractMismatch, UnknownLayer

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.session import Session

    Bind = Callable[..., Any]

ATTENTION = '''
from collections import Counter

import torch
from torch.nn import functional as F

CALLS = Counter()


def count(name):
    if not torch.compiler.is_compiling():
        CALLS[name] += 1


def attend(module, query, key, value, mask, scaling, causal, dropout=0.0):
    out = F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, enable_gqa=True,
        is_causal=causal and mask is None and query.shape[2] > 1,
    )
    return out.transpose(1, 2).contiguous(), None


def flash(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs):
    """Takes masks as flash attention does: here none at all."""
    count("flash")
    assert attention_mask is None
    return attend(module, query, key, value, None, scaling, module.is_causal, dropout)


flash.can_torch_compile = True


def masked(module, query, key, value, attention_mask, scaling=None, dropout=0.0, is_causal=True, **kwargs):
    count("masked")
    return attend(module, query, key, value, attention_mask, scaling, is_causal, dropout)


masked.attention_masks = ("sdpa",)


def added(module, query, key, value, attention_mask, scaling=None, **kwargs):
    count("added")
    groups = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(groups, dim=1) for each in (key, value))
    weights = (query @ key.transpose(2, 3) * scaling + attention_mask).softmax(-1, torch.float32).to(query.dtype)
    return (weights @ value).transpose(1, 2).contiguous(), weights


added.attention_masks = "eager"


def forward_only(module, query, key, value, attention_mask, scaling=None, **kwargs):
    count("forward_only")
    out, weights = attend(module, query, key, value, None, scaling, True)
    return out.detach(), weights


forward_only.has_backward = False


def unscaled(module, query, key, value, attention_mask, **kwargs):
    raise AssertionError


def needy(module, query, key, value, attention_mask, scaling, block_table):
    raise AssertionError


def other_masks(module, query, key, value, attention_mask, scaling=None):
    raise AssertionError


other_masks.attention_masks = ("ragged",)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_build(tmp_path / "local", "acme/attention", "v1", "torch-cpu", {"__init__.py": ATTENTION})


@pytest.fixture
def bind(folder: Path, hubless: Session) -> Bind:
    def bound(model: Any, symbol: str = "flash", **options: Any) -> Any:
        return kernelhub.kernelize(model, {"attention": f"{folder}:{symbol}"}, session=hubless, **options)

    return bound


@pytest.fixture
def calls(folder: Path, hubless: Session) -> Counter[str]:
    counter: Counter[str] = kernelhub.load_kernel(str(folder), session=hubless).CALLS
    counter.clear()
    return counter


def made(family: str = "Qwen3", implementation: str = "sdpa", **changes: Any) -> Any:
    model = tiny(family, **changes)
    model.set_attn_implementation(implementation)
    return model


def registered() -> list[str]:
    interface: Any = transformers.AttentionInterface
    return list(interface().valid_keys())


def padded(model: Any) -> torch.Tensor:
    mask = torch.ones_like(IDS)
    mask[0, :3] = 0
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=IDS, attention_mask=mask).logits
    return logits[:, 3:]


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mistral"])
@pytest.mark.parametrize(("symbol", "implementation"), [("flash", "sdpa"), ("masked", "sdpa"), ("added", "eager")])
def test_the_model_computes_the_same(
    symbol: str, implementation: str, family: str, bind: Bind, calls: Counter[str]
) -> None:
    plain, model = made(family, implementation), made(family, implementation)
    other = made(family, implementation)
    before, elsewhere, known = anatomy(model), anatomy(other), registered()
    bind(model, symbol)
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model), gradients(plain), rtol=1e-4, atol=1e-5)
    assert calls[symbol] == 4
    torch.testing.assert_close(padded(model), padded(plain), rtol=1e-4, atol=1e-5)
    assert calls[symbol] == (4 if symbol == "flash" else 6)
    notes = {row.note for row in kernelhub.report(model).bound}
    assert all(("own function in calls with a mask" in note) is (symbol == "flash") for note in notes)
    logits(other)
    assert calls[symbol] == (4 if symbol == "flash" else 6)
    assert anatomy(other) == elsewhere
    assert model.config._attn_implementation == implementation
    assert registered() == known
    kernelhub.unkernelize(model)
    assert anatomy(model) == before


def test_generation_with_a_cache_is_the_same(bind: Bind, calls: Counter[str]) -> None:
    plain, model = made(), bind(made())
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(IDS, **options), plain.generate(IDS, **options))
    assert calls["flash"] == 10


def test_other_functions_of_the_same_layer_are_bound_beside_it(folder: Path, hubless: Session) -> None:
    mapping = {"attention": f"{folder}:flash", "rotary_pos_emb": "builtin:rotary_pos_emb"}
    model = kernelhub.kernelize(made(), mapping, session=hubless)
    assert {(row.module, row.layer) for row in kernelhub.report(model).bound} == {
        (f"model.layers.{index}.self_attn", layer) for index in range(2) for layer in mapping
    }
    torch.testing.assert_close(logits(model), logits(made()), rtol=1e-4, atol=1e-5)


def test_modes_copies_and_compiling(bind: Bind, calls: Counter[str]) -> None:
    model, plain = bind(made(), "forward_only"), made()
    torch.testing.assert_close(logits(copy.deepcopy(model)), logits(plain), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradients(model.train()), gradients(plain.train()), rtol=1e-4, atol=1e-5)
    assert calls["forward_only"] == 2
    torch._dynamo.reset()
    compiled: Any = torch.compile(bind(made()), backend="eager", fullgraph=True)
    torch.testing.assert_close(logits(compiled), logits(plain.eval()), rtol=1e-4, atol=1e-5)


def test_what_a_function_cannot_honour_is_refused_with_the_reason(bind: Bind) -> None:
    def refused(reason: str, symbol: str, model: Any) -> None:
        with pytest.raises(ContractMismatch, match=reason):
            bind(model, symbol)

    refused("it takes masks for flash, and this model makes those for eager", "flash", made(implementation="eager"))
    refused("it takes masks for eager, and this model makes those for sdpa", "added", made())
    refused("without the scaling", "unscaled", made())
    refused("an attention function is called with", "needy", made())
    refused("'ragged' are not among sdpa, eager, flash", "other_masks", made())
    refused(
        "no parameter 'dropout', which Qwen3Attention passes", "added", made("Qwen3", "eager", attention_dropout=0.1)
    )
    refused("no parameter 'softcap', which Gemma2Attention passes", "added", made("Gemma2", "eager"))
    refused("no parameter 'is_causal', and this BertSelfAttention", "flash", bert())


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    make: Any = transformers.BertModel
    model = make(config).eval()
    model.set_attn_implementation("sdpa")
    return model


def test_dropout_that_the_function_knows_is_passed(bind: Bind, calls: Counter[str]) -> None:
    model, plain = bind(made(attention_dropout=0.5)).train(), made(attention_dropout=0.5).train()
    torch.manual_seed(0)
    expected = plain(input_ids=IDS).logits
    torch.manual_seed(0)
    torch.testing.assert_close(model(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-5)
    assert calls["flash"] == 2


def test_a_sliding_window_is_in_the_mask_of_sdpa(bind: Bind, calls: Counter[str]) -> None:
    model, plain = made("Mistral", sliding_window=3), made("Mistral", sliding_window=3)
    bind(model, "masked")
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    assert calls["masked"] == 2
    bind(model, "flash")
    torch.testing.assert_close(logits(model), logits(plain), rtol=1e-4, atol=1e-5)
    assert calls["flash"] == 0


def test_a_model_without_such_layers_has_no_attention(bind: Bind) -> None:
    with pytest.raises(UnknownLayer, match="attention"):
        bind(torch.nn.Sequential(torch.nn.Linear(2, 2)))
