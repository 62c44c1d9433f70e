from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from torch import nn

from kernelhub.layers.signature import difference, function_signature, method_signature

if TYPE_CHECKING:
    from collections.abc import Callable


def signature(text: str) -> Any:
    return function_signature(eval(f"lambda {text}: None"))


def judged(kernel: str, original: str, free_names: str = "first") -> str | None:
    return difference(signature(kernel), signature(original), free_names=free_names)


@pytest.mark.parametrize(
    ("kernel", "original"),
    [
        ("x", "x"),
        ("hidden_states", "x"),
        ("hidden_states, gate=None", "x, gate=None"),
        ("x, gate=None", "x, gate=3"),
        ("x, extra=1", "x"),
        ("x, *, extra=1", "x"),
        ("x, **more", "x"),
        ("x, /", "y"),
        ("x, z, /", "x, y, /"),
        ("x, y", "x, *, y"),
        ("x, *, y", "x, *, y"),
        ("x, **kw", "x, *, y=1, **kw"),
        ("*args, **kwargs", "x, y"),
        ("ids=None, labels=None, keep=0, **kw", "ids=None, mask=None, labels=None, keep=0, **kw"),
        ("x, y, **kw", "x, y, z=None, **kw"),
        ("", ""),
    ],
)
def test_a_kernel_that_takes_every_call_fits(kernel: str, original: str) -> None:
    assert judged(kernel, original) is None


@pytest.mark.parametrize(
    ("kernel", "original", "problem"),
    [
        ("x", "x, y", "it does not take 'y'"),
        ("x, y", "x", "it needs 'y', which callers of the original may not give"),
        ("x, *, y", "x", "it needs 'y', which callers of the original may not give"),
        ("a, b", "x, y", "its parameter 2 is 'b' instead of 'y'"),
        ("y, x", "x, y", "its parameter 2 is 'x' instead of 'y'"),
        ("x, y, /", "x, y", "its parameter 2 is 'y' instead of 'y'"),
        ("x, dim=1", "x, axis=1", "its parameter 2 is 'dim' instead of 'axis'"),
        ("x, pos=None, dim=1", "x, dim=1", "its parameter 2 is 'pos' instead of 'dim'"),
        ("x, dim", "x, dim=1", "its parameter 'dim' has no default"),
        ("x, dim=2", "x, dim=1", "its parameter 'dim' defaults to 2 instead of 1"),
        ("x", "x, *, y", "it does not take 'y' by keyword"),
        ("x", "x, *args", "it does not take *args"),
        ("x", "x, **kwargs", "it does not take **kwargs"),
        ("b, **kw", "a=None, **kw", "it needs 'b', which callers of the original may not give"),
        ("a=1, **kw", "a=None, **kw", "its parameter 'a' defaults to 1 instead of None"),
    ],
)
def test_a_kernel_that_misses_some_calls_is_refused_with_both_signatures(
    kernel: str, original: str, problem: str
) -> None:
    shown = f"{problem}; its signature is ({kernel}), that of the original ({original})"
    assert judged(kernel, original) == shown


def test_functions_may_name_what_has_no_default_as_they_like() -> None:
    assert judged("query, key, cos, sin, dim=1", "q, k, cos, sin, dim=1", "all") is None
    assert judged("query, key, dim=1", "q, k, axis=1", "all") is not None


def test_method_signatures_leave_self_and_annotations_out() -> None:
    class Layer(nn.Module):
        def forward(self, x: int, *rest: int) -> int:
            return x

    assert str(method_signature(Layer.forward)) == "(x, *rest)"
    assert str(method_signature(nn.Module.forward)) == "(*input)"
    assert str(method_signature(lambda *args: args)) == "(*args)"
    assert str(method_signature(lambda: None)) == "()"


@pytest.mark.parametrize("function", [type, 3])
def test_a_signature_that_cannot_be_read_is_none(function: Callable[..., Any]) -> None:
    assert function_signature(function) is None
    assert method_signature(function) is None
