from __future__ import annotations

import functools
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from kernelhub.layers.contract import function_mismatch, mismatch, mode_mismatch
from kernelhub.mode import Mode
from layers import kernel_layer
from layers.tiny_model import tiny


class Layer(nn.Module):
    def forward(self, x: Any) -> Any:
        return x


class Stateless(nn.Module):
    """Everything a kernel layer may define."""

    can_torch_compile: ClassVar[bool] = True
    has_backward = False
    weight: torch.Tensor

    @staticmethod
    def kernel_condition(module: nn.Module) -> bool:
        return True

    def forward(self, hidden_states: Any) -> Any:
        return hidden_states

    def extra_repr(self) -> str:
        return ""


class WithInit(Layer):
    def __init__(self) -> None:
        super().__init__()


class WithMember(Layer):
    limit = 3


class WithCall(Layer):
    def __call__(self, x: Any) -> Any:
        return x


class UsesSuper(Layer):
    def forward(self, x: Any) -> Any:
        return super().forward(x)


class NotPython(nn.Module):
    forward = functools.partial(print)


class NoForward(nn.Module):
    pass


def test_a_stateless_layer_with_the_flags_of_a_kernel_fits() -> None:
    assert mismatch(Stateless, nn.LayerNorm(4)) is None
    assert mismatch(Stateless, nn.RMSNorm(4)) is None


@pytest.mark.parametrize(
    ("kernel", "reason"),
    [
        (int, "int is no torch.nn.Module"),
        (3, "int is neither a layer class nor a function"),
        (WithInit, "WithInit is not stateless: it defines __init__, and only forward is used"),
        (WithMember, "WithMember is not stateless: it defines limit, and only forward is used"),
        (WithCall, "WithCall is not stateless: it defines __call__, and only forward is used"),
        (UsesSuper, "UsesSuper.forward uses super(), which means nothing in another module"),
        (NotPython, "NotPython has no forward written in Python"),
        (NoForward, "NoForward has no forward written in Python"),
    ],
)
def test_what_is_no_stateless_layer_is_refused(kernel: Any, reason: str) -> None:
    assert mismatch(kernel, Layer()) == reason


def test_members_of_a_base_class_count_too() -> None:
    assert "limit" in str(mismatch(type("Child", (WithMember,), {}), Layer()))


def test_other_signatures_are_refused_with_both_signatures() -> None:
    reason = str(mismatch(kernel_layer.TwoInputs, Layer()))
    assert "its signature is (x, residual), that of the original (x)" in reason


def test_a_decorated_forward_is_compared_by_what_it_wraps() -> None:
    class Decorated(nn.Module):
        @torch.no_grad()
        def forward(self, x: Any) -> Any:
            return x

    assert mismatch(Decorated, Layer()) is None
    assert mismatch(Stateless, type("Marked", (Decorated,), {"weight": torch.ones(1)})()) is None
    assert "that of the original (x)" in str(mismatch(kernel_layer.TwoInputs, Decorated()))


def test_a_causal_language_model_kernel_with_kwargs_fits_each_family() -> None:
    for family in ("Qwen3", "Llama", "Mistral", "Gemma"):
        assert mismatch(kernel_layer.CausalLM, tiny(family)) is None


def test_gemma_norms_refuse_a_kernel_that_reads_variance_epsilon() -> None:
    assert "variance_epsilon" in str(mismatch(kernel_layer.RMSNorm, tiny("Gemma").model.norm))
    assert mismatch(kernel_layer.RMSNorm, tiny("Mistral").model.norm) is None


def conditional(answer: Any) -> type[nn.Module]:
    def condition(module: nn.Module) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    return type("Kernel", (Layer,), {"kernel_condition": staticmethod(condition)})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (True, None),
        (1, None),
        (False, "Kernel.kernel_condition says no"),
        (None, "Kernel.kernel_condition says no"),
        ("", "Kernel.kernel_condition says no"),
        ("its weight\nis odd\x1b[31m", "its weight is odd\\x1b[31m"),
        (ValueError("bad"), "Kernel.kernel_condition raised ValueError: bad"),
    ],
)
def test_the_condition_of_a_kernel_is_asked(answer: Any, reason: str | None) -> None:
    assert mismatch(conditional(answer), Layer()) == reason


@pytest.mark.parametrize(("answer", "reason"), [(True, None), (False, "Kernel.kernel_condition says no")])
def test_the_condition_of_the_module_class_is_asked(answer: bool, reason: str | None) -> None:
    assert mismatch(Layer, conditional(answer)()) == reason


def test_a_function_may_stand_in_for_a_layer_without_parameters() -> None:
    assert mismatch(kernel_layer.silu, nn.SiLU()) is None
    assert "cannot use the parameters of Linear" in str(mismatch(kernel_layer.silu, nn.Linear(1, 1)))
    assert "that of the original (x)" in str(mismatch(kernel_layer.rotary, Layer()))


def original(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    return q, k


def test_a_function_is_compared_with_the_function_it_replaces() -> None:
    assert function_mismatch(kernel_layer.rotary, original) is None
    assert "that of the original (q, k, cos, sin, unsqueeze_dim=1)" in str(
        function_mismatch(kernel_layer.silu, original)
    )
    assert function_mismatch(Layer, original) == "Layer is no function"
    assert function_mismatch(3, original) == "int is no function"
    assert "signature of the kernel cannot be read" in str(function_mismatch(torch.relu, original))


def test_a_function_wrapped_into_a_module_is_compared_by_its_forward() -> None:
    class Function(nn.Module):
        def forward(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
            return q, k

    assert function_mismatch(kernel_layer.rotary, Function()) is None
    assert function_mismatch(kernel_layer.silu, Function()) is not None
    Function.kernel_condition = staticmethod(lambda module: False)  # type: ignore[attr-defined]
    assert function_mismatch(kernel_layer.rotary, Function()) == "Function.kernel_condition says no"


def test_the_condition_of_a_function_is_asked_about_the_original() -> None:
    def kernel(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        return q, k

    asked: list[Any] = []
    kernel.kernel_condition = lambda function: asked.append(function) or "no"
    assert function_mismatch(kernel, original) == "no"
    assert asked == [original]


@pytest.mark.parametrize(
    ("mode", "kernel", "reason"),
    [
        (Mode.INFERENCE, kernel_layer.ForwardOnlyRMSNorm, None),
        (Mode.TRAINING, kernel_layer.ForwardOnlyRMSNorm, "ForwardOnlyRMSNorm has no backward"),
        (Mode.TRAINING, kernel_layer.RMSNorm, None),
        (Mode.INFERENCE_COMPILE, kernel_layer.RMSNorm, "RMSNorm does not support torch.compile"),
        (Mode.TRAINING_COMPILE, kernel_layer.CompilableRMSNorm, None),
        (Mode.FALLBACK, kernel_layer.ForwardOnlyRMSNorm, None),
    ],
)
def test_the_flags_of_a_kernel_limit_its_modes(mode: Mode, kernel: Any, reason: str | None) -> None:
    found = mode_mismatch(kernel, mode)
    assert found is None if reason is None else str(found).startswith(reason)
