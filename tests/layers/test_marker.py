from __future__ import annotations

import pytest
from torch import nn

from kernelhub.layers.marker import mark_of, use_kernel


@use_kernel("RMSNorm")
class Norm(nn.Module):
    def forward(self, x: object) -> object:
        return x


class SameNorm(Norm):
    pass


class OtherNorm(Norm):
    def forward(self, x: object) -> object:
        return None


def test_use_kernel_records_the_name_and_returns_the_same_class() -> None:
    class Plain(nn.Module):
        pass

    before = set(vars(Plain))
    assert use_kernel("MLP")(Plain) is Plain
    assert set(vars(Plain)) - before == {"kernel_layer_name"}


@pytest.mark.parametrize("thing", [len, int, nn.Linear(1, 1), lambda x: x])
def test_use_kernel_refuses_what_is_no_layer_class(thing: object) -> None:
    with pytest.raises(TypeError, match=r"use_kernel\('MLP'\) marks nn.Module classes"):
        use_kernel("MLP")(thing)  # type: ignore[type-var]


@pytest.mark.parametrize("name", ["", "a.b", "org/repo:Layer", Norm])
def test_use_kernel_refuses_what_is_no_name(name: str) -> None:
    with pytest.raises(TypeError, match="takes the name of a layer"):
        use_kernel(name)


def test_a_mark_is_inherited_with_the_forward_it_was_made_for() -> None:
    marks = [mark_of(module) for module in (Norm(), SameNorm(), OtherNorm(), nn.Linear(1, 1))]
    assert marks == ["RMSNorm", "RMSNorm", None, None]


def test_a_module_without_a_forward_has_no_mark() -> None:
    assert mark_of(nn.ModuleList()) is None


def test_a_mark_on_one_module_counts() -> None:
    module = nn.Linear(1, 1)
    module.kernel_layer_name = "Special"
    assert mark_of(module) == "Special"
