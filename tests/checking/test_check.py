"""The check: planted kernels, each wrong in its own way, are all caught; honest ones all pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from layers.tiny_model import IDS, tiny

from checking import planted
from checking.small import Small, batch, bind
from kernelhub.checking.choosing import Chooser
from kernelhub.checking.when import When
from kernelhub.errors import InputsNeeded, InvalidConfig, NumericsMismatch
from kernelhub.layers.binding import is_bound

if TYPE_CHECKING:
    from torch import nn

    from kernelhub.session import Session


def function_of(module: nn.Module) -> Any:
    """The function that a module runs."""
    forward: Any = module.forward
    return forward.__func__


def checked(session: Session, model: nn.Module, mapping: Any, inputs: Any, strict: bool = True) -> Any:
    chooser = Chooser(session, When(bind=True), inputs, fastest=False, strict=strict)
    return bind(model, mapping, judge=chooser, strict=strict)


DTYPES = {"WrongInHalf": torch.bfloat16}
# What has to be said about each: the kind of fault, not just that there is one.
TOLD = {
    "IgnoresEps": "error: ",
    "IgnoresWeight": "output with the real inputs: ",
    "InPlace": "changes its input args[0] in place",
    "ChangesWeight": "changes its input weight in place",
    "HalfInside": "output has NaN in",
    "Transposed": "output has strides (24, 72, 1), not (168, 24, 1)",
    "WrongShape": "output has shape (21, 24), not (3, 7, 24)",
    "WrongDtype": "output is float64, not float32",
    "MisreadsStrides": "with transposed in memory",
    "NoEmpty": "raises RuntimeError: invalid configuration argument (with empty batch)",
    "NoTail": "output with the real inputs",
    "NoLastRow": "output with the real inputs",
    "Nondeterministic": "output is another one at the second call",
    "WrongUnderAutocast": "with autocast to bfloat16",
    "DtypeUnderAutocast": "output is bfloat16, not float32 (with autocast to bfloat16)",
    "StaleCache": "output with twice the batch",
    "WrongInHalf": "with the real inputs: ",
    "NanForZeros": "output has NaN in",
    "WrongSecondCall": "output is another one at the second call",
    "WrongWithoutGradients": "output with no_grad",
    "ScalesGradient": "gradient of args[0] with the real inputs",
    "ScalesWeightGradient": "gradient of weight with the real inputs",
    "NoWeightGradient": "the gradient of weight is missing",
    "NoGradientAtAll": "output has no gradient, the plain layer's has",
}


@pytest.mark.parametrize("kernel", planted.WRONG_NORMS, ids=lambda kernel: kernel.__name__)
def test_a_wrong_kernel_is_caught_and_told(session: Session, kernel: type) -> None:
    """REF huggingface/kernels#308: the second call crashed; one try would have passed (``WrongSecondCall``)."""
    name = kernel.__name__
    dtype = DTYPES.get(name, torch.float32)
    model = Small().to(dtype)
    forwards = [module.forward for module in model.modules()]
    with pytest.raises(NumericsMismatch) as caught:
        checked(session, model, {"Norm": f"org/wrong:{name}"}, batch(dtype))
    assert caught.value.module_path in ("norm", "last")
    assert caught.value.kernel == f"org/wrong@0123abc0123abc:{name}"
    assert TOLD[name] in caught.value.problem, caught.value.problem
    assert [module.forward for module in model.modules()] == forwards
    assert not any(map(is_bound, model.modules()))


def test_there_are_24_ways_to_be_wrong() -> None:
    assert len(set(planted.WRONG_NORMS)) == len(TOLD) == 24


@pytest.mark.parametrize("kernel", ["WrongActivation", "SwapsProjections", "ForgetsGradientOfUp"])
def test_a_wrong_mlp_is_caught(session: Session, kernel: str) -> None:
    """huggingface/transformers#48335: a model with GELU was given a kernel for SiLU."""
    with pytest.raises(NumericsMismatch, match="mlp"):
        checked(session, Small(), {"mlp": f"org/wrong:{kernel}"}, batch())


def test_a_wrong_function_is_caught(session: Session) -> None:
    with pytest.raises(NumericsMismatch, match=r"swaps_sines computes other numbers than model.layers.0.self_attn"):
        checked(session, tiny(), {"rotary_pos_emb": "org/wrong:swaps_sines"}, {"input_ids": IDS})


def test_a_wrong_head_is_caught(session: Session) -> None:
    inputs = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(NumericsMismatch, match="loss with the real inputs"):
        checked(session, tiny(), {"ForCausalLM": "org/wrong:UnshiftedHead"}, inputs)


def test_a_wrong_loss_function_is_caught(session: Session) -> None:
    """REF linkedin/Liger-Kernel#512, #827: a loss that looks alike and trains worse."""
    labels = IDS.clone()
    labels[0, 2:5] = -100
    inputs = {"input_ids": IDS, "labels": labels}
    with pytest.raises(NumericsMismatch, match="mean_over_all"):
        checked(session, tiny(), {"ForCausalLMLoss": "org/wrong:mean_over_all"}, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", planted.HONEST_NORMS, ids=lambda kernel: kernel.__name__)
def test_an_honest_kernel_passes(session: Session, kernel: type, dtype: torch.dtype) -> None:
    """REF huggingface/kernels-community#105; huggingface/transformers#38083: in bfloat16 numbers differ, and nobody
    knew by how much they may.
    """
    model = Small().to(dtype)
    checked(session, model, {"Norm": f"org/right:{kernel.__name__}"}, batch(dtype))
    assert is_bound(model.norm)
    assert is_bound(model.last)


def test_a_wrong_kernel_is_skipped_with_its_reason_when_not_strict(session: Session) -> None:
    model = Small()
    report = checked(session, model, {"Norm": "org/wrong:IgnoresWeight"}, batch(), strict=False)
    assert [row.state for row in report] == ["skipped", "skipped"]
    assert "times the" in report[0].reason
    assert "the plain layer's own error" in report[0].reason
    assert report[0].reason.endswith("(input 3x7x24 float32)")


def test_only_the_layers_that_a_kernel_is_wrong_for_are_skipped(session: Session) -> None:
    model = Small()
    model.last.eps = 1e-2  # noticed at any size of the numbers
    model.norm.eps = 1e-30
    report = checked(session, model, {"Norm": "org/wrong:IgnoresEps"}, batch(), strict=False)
    assert {row.module: row.state for row in report} == {"norm": "bound", "last": "skipped"}


def test_a_layer_that_is_never_called_is_not_bound(session: Session) -> None:
    model = Small()
    model.spare = type(model.norm)(24)
    report = checked(session, model, {"Norm": "org/right:Right"}, batch())
    assert {row.module: row.state for row in report} == {"norm": "bound", "last": "bound", "spare": "skipped"}
    assert "never call it" in next(row.reason for row in report if row.module == "spare")


def test_checking_leaves_the_model_as_it_was(session: Session) -> None:
    model = Small().train()
    model.norm.eval()
    state = {name: each.clone() for name, each in model.state_dict().items()}
    random = torch.random.get_rng_state()
    checked(session, model, {"Norm": "org/right:Right"}, batch())
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(each, state[name]) for name, each in model.state_dict().items())
    assert all(each.grad is None for each in model.parameters())
    assert torch.equal(torch.random.get_rng_state(), random)


def test_a_checked_layer_runs_the_very_forward_of_an_unchecked_one(session: Session) -> None:
    plain, model = Small(), Small()
    bind(plain, {"Norm": "org/right:Right"})
    checked(session, model, {"Norm": "org/right:Right"}, batch())
    assert function_of(model.norm) is function_of(plain.norm) is planted.Right.forward


def test_inputs_that_nothing_tells_are_asked_for(session: Session) -> None:
    with pytest.raises(InputsNeeded, match="cannot make up inputs for a Small"):
        checked(session, Small(), {"Norm": "org/right:Right"}, None)


def test_inputs_of_a_language_model_are_made_up(session: Session) -> None:
    model = tiny()
    with pytest.raises(NumericsMismatch, match="swaps_sines"):
        checked(session, model, {"rotary_pos_emb": "org/wrong:swaps_sines"}, None)


@pytest.mark.parametrize("text", ["", "on", "first", "first:0", "first:-1", "first:1.5", "bind ", 3, None, True])
def test_an_unreadable_time_to_check_is_refused(text: Any) -> None:
    with pytest.raises(InvalidConfig, match="'off', 'bind' or 'first:N'"):
        When.parse(text)


def test_the_readable_times() -> None:
    assert When.parse("off") == When()
    assert When.parse("bind") == When(bind=True)
    assert When.parse("first:12") == When(calls=12)
