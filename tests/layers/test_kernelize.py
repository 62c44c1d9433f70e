from __future__ import annotations

import functools
import logging
from typing import Any

import pytest
import torch
from torch import nn

from kernelhub import errors
from kernelhub.config import KernelChoice, KernelConfig
from kernelhub.environment import Environment
from kernelhub.errors import ContractMismatch, DigestMismatch, NotCached, UnknownLayer
from kernelhub.layers import kernelize as module_under_test
from kernelhub.layers.kernelize import mode_of, plan, report, unkernelize
from kernelhub.mode import Mode
from layers.kernel_layer import EVERYTHING, RAN, backend_of, kernelize, load, outcomes, resolve
from layers.tiny_model import anatomy, gradients, hook_counts, logits, tiny


@pytest.mark.parametrize("family", ["Qwen3", "Llama", "Mistral"])
def test_a_kernelized_model_computes_the_same_forward_and_backward(family: str) -> None:
    """REF linkedin/Liger-Kernel#257, #268, #279; QwenLM/Qwen3#921: modules were replaced without their weights, and the
    loss never fell.
    """
    model = tiny(family)
    parameters = dict(model.named_parameters())
    expected, expected_gradients = logits(model), gradients(model)
    RAN.clear()
    result = kernelize(model, EVERYTHING)
    torch.testing.assert_close(logits(model), expected)
    norms = 9 if family == "Qwen3" else 5
    assert dict(RAN) == {"RMSNorm": norms, "SwiGLUMLP": 2, "rotary": 2, "CausalLM": 1}
    assert result.counts == {"bound": norms + 5, "would bind": 0, "postponed": 0, "skipped": 0}
    model.train()
    torch.testing.assert_close(gradients(model), expected_gradients)
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())


def test_a_kernel_whose_place_was_taken_later_is_reported_as_skipped() -> None:
    """Trainers give a model another forward when it is bound already; the report went on without the row."""
    model = tiny()
    kernelize(model, EVERYTHING)
    before = report(model)
    plain = type(model).forward
    model.forward = functools.wraps(plain)(lambda **inputs: plain(model, **inputs))
    [lost] = report(model).skipped
    assert (lost.module, lost.symbol, lost.state) == ("(model)", "CausalLM", "skipped")
    assert lost.reason == f"its forward was replaced after the kernel was bound (by {__name__}.<lambda>)"
    assert {row for row in before if row.module != "(model)"} == set(report(model).bound)
    del model.forward
    assert report(model).skipped[0].reason == "its bound forward was removed from the instance"
    unkernelize(model)
    assert not report(model)


def test_unkernelize_leaves_no_trace() -> None:
    model = tiny()
    model.model.norm.register_forward_hook(lambda *_: None)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected, before, hooks = logits(model), anatomy(model), hook_counts(model)
    kernelize(model, EVERYTHING)
    assert list(model.state_dict()) == list(state)
    assert anatomy(model) != before
    assert hook_counts(model) == hooks
    assert unkernelize(model) is model
    assert anatomy(model) == before
    assert torch.equal(logits(model), expected)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert len(report(model)) == 0


def test_a_second_model_of_the_same_class_is_untouched() -> None:
    """REF linkedin/Liger-Kernel#242: patching a class changed teacher and student alike."""
    first, second = tiny(), tiny()
    before, expected = anatomy(second), logits(second)
    kernelize(first, {"RMSNorm": "org/repo:TripleRMSNorm", "rotary_pos_emb": "org/repo:no_rotary"})
    assert not torch.allclose(logits(first), expected)
    assert torch.equal(logits(second), expected)
    assert anatomy(second) == before


def test_one_config_serves_two_models() -> None:
    config = KernelConfig({"RMSNorm": "org/repo:RMSNorm"})
    for model in (tiny("Qwen3"), tiny("Llama")):
        assert module_under_test.kernelize(model, config, load=load, backend_of=backend_of).bound


def test_a_typo_raises_and_suggests_the_layer_name() -> None:
    """REF huggingface/kernels#61, #796: a name that nothing answers to was ignored."""
    model = tiny()
    before = anatomy(model)
    with pytest.raises(UnknownLayer, match="'RMSNrom', did you mean 'RMSNorm'"):
        kernelize(model, {"SwiGLUMLP": "org/repo:SwiGLUMLP", "RMSNrom": "org/repo:RMSNorm"})
    assert anatomy(model) == before


def test_a_typo_is_a_skipped_row_when_not_strict() -> None:
    result = kernelize(tiny(), {"RMSNrom": "org/repo:RMSNorm", "model.norm": "org/repo:RMSNorm"}, strict=False)
    assert outcomes(result) == {
        "": "no layer of this model answers to 'RMSNrom', did you mean 'RMSNorm'?",
        "model.norm": "bound",
    }


def test_an_entry_that_fits_nothing_raises_with_both_signatures() -> None:
    """REF huggingface/kernels#143: "different number of arguments", without saying of what."""
    model = tiny()
    before = anatomy(model)
    with pytest.raises(ContractMismatch) as caught:
        kernelize(model, {"SwiGLUMLP": "org/repo:SwiGLUMLP", "RMSNorm": "org/repo:TwoInputs"})
    message = str(caught.value)
    for part in ("self_attn.q_norm", "Qwen3RMSNorm", "org/repo@0123abc:TwoInputs", "(x, residual)", "(hidden_states)"):
        assert part in message
    assert anatomy(model) == before


def test_gemma_norms_are_refused_by_a_llama_kernel() -> None:
    """REF huggingface/transformers#33195: a kernel that lacks what the model needs gave gibberish."""
    with pytest.raises(ContractMismatch, match=r"GemmaRMSNorm.*self\.variance_epsilon"):
        kernelize(tiny("Gemma"), {"RMSNorm": "org/repo:RMSNorm"})
    result = kernelize(tiny("Gemma"), {"RMSNorm": "org/repo:RMSNorm"}, strict=False)
    assert result.counts["skipped"] == 5


def test_two_mlps_of_one_class_with_other_activations_end_one_bound_and_one_skipped() -> None:
    """REF huggingface/transformers#48335; huggingface/kernels#796: a SiLU kernel served a GELU model."""
    for key in ("model.layers.*.mlp", "SwiGLUMLP", "MLP"):
        model = tiny()
        model.model.layers[1].mlp.act_fn = nn.GELU()
        expected = logits(model)
        result = kernelize(model, {key: "org/repo:SwiGLUMLP"})
        found = outcomes(result)
        assert found["model.layers.0.mlp"] == "bound"
        assert found["model.layers.1.mlp"].startswith("its activation is GELU")
        torch.testing.assert_close(logits(model), expected)


def test_path_entries_win_over_names_and_may_leave_a_layer_alone() -> None:
    """REF huggingface/transformers#38905: single kernels, to find the one that is wrong."""
    result = kernelize(
        tiny(),
        {
            "RMSNorm": "org/repo:RMSNorm",
            "model.layers.*.self_attn.*_norm": "",
            "model.layers.1.input_layernorm": "org/repo:CompilableRMSNorm",
        },
    )
    assert {row.module: row.symbol for row in result.bound} == {
        "model.layers.0.input_layernorm": "RMSNorm",
        "model.layers.0.post_attention_layernorm": "RMSNorm",
        "model.layers.1.input_layernorm": "CompilableRMSNorm",
        "model.layers.1.post_attention_layernorm": "RMSNorm",
        "model.norm": "RMSNorm",
    }
    assert {row.reason for row in result.skipped} == {"left alone by the config"}


def test_an_entry_whose_layers_all_belong_to_others_is_no_error() -> None:
    result = kernelize(tiny(), {"MLP": "org/repo:SwiGLUMLP", "SwiGLUMLP": "org/repo:SwiGLUMLP"})
    assert [row.reason for row in result] == ["", "", "served by the entry 'MLP'", "served by the entry 'MLP'"]


def test_per_device_values_choose_by_the_backend_of_the_layer() -> None:
    mapping = {"RMSNorm": {"cuda": "org/gpu:RMSNorm", "cpu": "org/repo:RMSNorm"}}
    assert {row.variant for row in kernelize(tiny(), mapping).bound} == {"torch-cpu"}
    result = kernelize(tiny(), mapping, backend_of=lambda device: "cuda")
    assert {(row.kernel, row.variant) for row in result.bound} == {("org/gpu@0123abc", "torch-cuda")}


def test_a_kernel_without_backward_serves_evaluation_and_steps_aside_in_training() -> None:
    """REF huggingface/transformers#40459, #40628; huggingface/kernels#68, #90, #103, #108."""
    model = tiny().train()
    expected = gradients(model)
    result = kernelize(model, {"RMSNorm": "org/repo:ForwardOnlyRMSNorm"})
    assert {(row.state, row.mode) for row in result} == {("bound", "inference")}
    assert result[0].note == (
        "own forward in training, training|compile: ForwardOnlyRMSNorm has no backward (has_backward is False); "
        "own forward in inference|compile: "
        "ForwardOnlyRMSNorm does not support torch.compile (can_torch_compile is not True)"
    )
    RAN.clear()
    torch.testing.assert_close(gradients(model), expected)
    assert RAN["ForwardOnlyRMSNorm"] == 0
    logits(model.eval())
    assert RAN["ForwardOnlyRMSNorm"] == 9
    torch.testing.assert_close(gradients(model.train()), expected)
    assert RAN["ForwardOnlyRMSNorm"] == 9


def test_a_kernel_without_backward_is_refused_where_training_is_pinned() -> None:
    result = kernelize(tiny(), {"RMSNorm": "org/repo:ForwardOnlyRMSNorm"}, mode=Mode.TRAINING)
    assert {row.reason for row in result} == {"ForwardOnlyRMSNorm has no backward (has_backward is False)"}


def test_the_mode_is_taken_from_the_model_or_the_argument() -> None:
    model = tiny()
    assert mode_of(model) is Mode.INFERENCE
    model.model.norm.train()
    assert mode_of(model) is Mode.TRAINING
    result = kernelize(model, {"model.norm": "org/repo:CompilableRMSNorm"}, mode=Mode.INFERENCE_COMPILE)
    assert result[0].mode == "inference|compile"


def test_kernelize_again_replaces_what_was_bound() -> None:
    model = tiny()
    before = anatomy(model)
    kernelize(model, EVERYTHING)
    result = kernelize(model, {"model.norm": "org/repo:RMSNorm", "SwiGLUMLP": ""})
    assert outcomes(report(model)) == outcomes(result)
    assert [row.module for row in report(model).bound] == ["model.norm"]
    unkernelize(model)
    assert anatomy(model) == before


def test_a_failing_kernelize_keeps_the_earlier_kernels() -> None:
    model = tiny()
    result = kernelize(model, EVERYTHING)
    before = anatomy(model)
    for mapping in ({"RMSNorm": "org/repo:TwoInputs"}, {"NoSuchLayer": ""}, {"RMSNorm": "org/repo:not_there"}):
        with pytest.raises((ContractMismatch, UnknownLayer, KeyError)):
            kernelize(model, mapping)
        assert anatomy(model) == before
    assert report(model) == result


def test_an_error_while_binding_leaves_the_model_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    from kernelhub.layers import binding

    model = tiny()
    before = anatomy(model)
    bind, bound = binding.bind_as, []

    def bind_three(module: nn.Module, *rest: Any) -> None:
        if len(bound) == 3:
            raise KeyboardInterrupt
        bound.append(module)
        bind(module, *rest)

    monkeypatch.setattr(binding, "bind_as", bind_three)
    with pytest.raises(KeyboardInterrupt):
        kernelize(model, EVERYTHING)
    assert anatomy(model) == before


def failing(error: Exception) -> Any:
    def fail(choice: KernelChoice, backend: str) -> Any:
        raise error

    return fail


REFUSED = [
    errors.UntrustedPublisher("org/repo", "org", "unknown"),
    errors.DigestMismatch("b", "p", "differs"),
    errors.UnsignedKernel("b", "unsigned", "a signature"),
    errors.BadSignature("b", "for another build"),
    errors.OlderBuild("b", "org/repo", "1", "2"),
    errors.ChangedKernel("b", "org/repo@v1", "a" * 40, "b" * 40),
    errors.PinMismatch("org/repo", "a" * 40, "b" * 40, "kernelhub.toml"),
]
UNSERVED = [
    errors.NoCompatibleVariant("org/repo", "v1", Environment.parse("torch=2.13")),
    errors.InvalidBackend("rocm", "not available in this process"),
    errors.MissingDependency("b", "einops", "einops", "einops"),
]


@pytest.mark.parametrize("error", [*REFUSED, *UNSERVED], ids=lambda error: type(error).__name__)
def test_r_45_the_own_forward_serves_only_where_there_is_no_kernel_and_the_user_allows_it(error: Exception) -> None:
    mapping = {"RMSNorm": "org/repo:RMSNorm"}
    with pytest.raises(type(error)):
        kernelize(tiny(), mapping, load=failing(error))
    optional = {"RMSNorm": ("org/repo:RMSNorm", {"optional": True})}
    for allowed, strict in ((mapping, False), (optional, True)):
        if error in REFUSED:
            with pytest.raises(type(error)):
                kernelize(tiny(), allowed, load=failing(error), strict=strict)
        else:
            result = kernelize(tiny(), allowed, load=failing(error), strict=strict)
            assert {row.reason for row in result} == {str(error)}


def test_load_errors_raise_or_are_reported_but_trust_errors_always_raise() -> None:
    missing = NotCached("kernel org/repo", "store", "kernelhub prefetch")  # type: ignore[arg-type]
    with pytest.raises(NotCached):
        kernelize(tiny(), {"RMSNorm": "org/repo:RMSNorm"}, load=failing(missing))
    result = kernelize(tiny(), {"RMSNorm": "org/repo:RMSNorm"}, load=failing(missing), strict=False)
    assert {row.reason for row in result} == {str(missing)}
    with pytest.raises(DigestMismatch):
        kernelize(tiny(), EVERYTHING, load=failing(DigestMismatch("b", "p", "differs")), strict=False)


def test_the_report_follows_the_model() -> None:
    model = tiny()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    result = kernelize(model.model, {"RMSNorm": "org/repo:RMSNorm", "layers.*.mlp": "org/repo:SwiGLUMLP"})
    assert report(model.model) == result
    outer = outcomes(report(model))
    assert outer["model.norm"] == "bound"
    assert outer["model.layers.1.mlp"] == "its activation is GELU"
    del model.model.layers[0]
    assert [row.module for row in report(model).bound][-1] == "model.norm"
    assert not any("layers.1" in row.module for row in report(model).bound)


def test_plan_tells_what_would_be_bound_without_loading() -> None:
    model = tiny()
    model.model.layers[1].mlp.act_fn = nn.GELU()
    before = anatomy(model)
    config = KernelConfig({**EVERYTHING, "MPL": "org/repo:SwiGLUMLP", "model.norm": {"cuda": "org/repo:RMSNorm"}})
    result = plan(model, config, resolve=resolve, backend_of=backend_of)
    found = outcomes(result)
    assert found["model.layers.0.mlp"] == "would bind"
    assert found["model.layers.1.mlp"] == "its activation is GELU, not SiLU"
    assert found[""] == "no layer of this model answers to 'MPL', did you mean 'MLP'?"
    assert found["model.norm"] == "the config has no kernel for cpu"
    assert anatomy(model) == before


def test_plan_turns_every_error_into_a_reason_and_sees_through_bound_kernels() -> None:
    model = tiny()
    kernelize(model, EVERYTHING)
    broken = DigestMismatch("b", "p", "differs")
    config = KernelConfig({"model.norm": "org/repo:RMSNorm"})
    [row] = plan(model, config, resolve=failing(broken), backend_of=backend_of)
    assert row.reason == str(broken)
    [row] = plan(model, config, mode=Mode.TRAINING, resolve=resolve, backend_of=backend_of)
    assert (row.state, row.mode) == ("would bind", "training")


@pytest.mark.parametrize(
    ("mapping", "level", "line"),
    [
        (EVERYTHING, logging.INFO, "Qwen3ForCausalLM: 14 bound"),
        ({"RMSNorm": ""}, logging.INFO, "Qwen3ForCausalLM: 9 skipped"),
        ({"RMSNorm": {"cuda": "org/repo:RMSNorm"}}, logging.WARNING, "Qwen3ForCausalLM: 9 skipped"),
        ({}, logging.INFO, "Qwen3ForCausalLM: nothing to bind"),
    ],
)
def test_one_log_line_a_model_warns_when_nothing_asked_for_was_bound(
    mapping: Any, level: int, line: str, caplog: pytest.LogCaptureFixture
) -> None:
    """REF huggingface/transformers#46755: kernels were on, nothing was replaced, and nobody was told."""
    with caplog.at_level(logging.INFO, logger="kernelhub"):
        kernelize(tiny(), mapping)
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [(level, line)]


def test_what_is_left_alone_is_told_once_and_not_at_all_when_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    """REF huggingface/transformers#48185: a slow path without a sign, or with one at every call."""
    mapping = {"RMSNorm": {"cuda": "org/repo:RMSNorm"}}
    with caplog.at_level(logging.INFO, logger="kernelhub"):
        model = tiny()
        kernelize(model, mapping)
        for _ in range(3):
            logits(model)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    caplog.clear()
    with caplog.at_level(logging.ERROR, logger="kernelhub"):
        kernelize(tiny(), mapping)
    assert caplog.records == []
