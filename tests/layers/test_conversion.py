from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Concatenate, WeightConverter
from transformers.core_model_loading import (
    Chunk,
    Interleave,
    MergeModulelist,
    Split,
    Transpose,
    WeightRenaming,
)

from kernelhub.layers.conversion import Conversion, NotConvertible, Recipe

PATH = "model.layers.3."


def recipes(rules: list[Any], sources: dict[str, Any], targets: dict[str, Any]) -> dict[str, Recipe]:
    """With paths and rules given below the layer."""
    found = Conversion(rules).recipes(
        {PATH + name: shape for name, shape in sources.items()}, {PATH + name: shape for name, shape in targets.items()}
    )
    return {name.removeprefix(PATH): recipe for name, recipe in found.items()}


@pytest.mark.parametrize(
    ("rule", "sources", "target", "recipe"),
    [
        (WeightRenaming("norm.weight", "mlp.scale"), {"norm.weight": (4,)}, (4,), Recipe("same", (0,))),
        (
            WeightConverter(["a.weight", "b.weight"], "mlp.scale", [Concatenate(dim=0)]),
            {"b.weight": (3, 2), "a.weight": (5, 2)},
            (8, 2),
            Recipe("join", (1, 0), (0,)),
        ),
        (
            WeightConverter(["a.weight", "b.weight"], "mlp.scale", [Concatenate(dim=1)]),
            {"a.weight": (3, 2), "b.weight": (3, 2)},
            (3, 4),
            Recipe("join", (0, 1), (1,)),
        ),
        (
            WeightConverter(r"experts.\d+.weight", "mlp.scale", [MergeModulelist(dim=0)]),
            {f"experts.{index}.weight": (3, 2) for index in range(3)},
            (3, 3, 2),
            Recipe("stack", (0, 1, 2), (0,)),
        ),
        (WeightConverter("a.weight", "mlp.scale", [Transpose(0, 1)]), {"a.weight": (3, 2)}, (2, 3), None),
    ],
)
def test_rules_become_recipes(rule: Any, sources: Any, target: Any, recipe: Recipe | None) -> None:
    assert recipes([rule], sources, {"mlp.scale": target}) == {"mlp.scale": recipe or Recipe("swap", (0,), (0, 1))}


@pytest.mark.parametrize("operation", [Chunk(dim=0), Split(dim=0)])
def test_one_parameter_becomes_parts(operation: Any) -> None:
    rule = WeightConverter("qkv.weight", ["q.weight", "k.weight"], [operation])
    found = recipes([rule], {"qkv.weight": (6, 2)}, {"q.weight": (3, 2), "k.weight": (3, 2)})
    assert found == {"q.weight": Recipe("part", (0,), (0, 0, 3)), "k.weight": Recipe("part", (0,), (0, 3, 3))}


def test_groups_of_a_pattern_are_filled_in() -> None:
    rules = [
        WeightRenaming(r"model.layers.(\d+).norm.weight", r"model.layers.\1.fused.norm_weight"),
        WeightRenaming(r"model.layers.(\d+).mlp.(gate|up)_proj.weight", r"model.layers.\1.fused.\2_proj.weight"),
    ]
    sources = {"norm.weight": (2,), "mlp.gate_proj.weight": (3, 2), "mlp.up_proj.weight": (3, 2)}
    targets = {"fused.norm_weight": (2,), "fused.gate_proj.weight": (3, 2), "fused.up_proj.weight": (3, 2)}
    assert [recipe.sources for recipe in recipes(rules, sources, targets).values()] == [(0,), (1,), (2,)]


def test_a_pattern_ends_where_a_name_ends() -> None:
    rule = WeightRenaming("a.weight", "b.weight")
    with pytest.raises(
        NotConvertible, match=r"no rule of its conversion_mapping makes model\.layers\.3\.b\.weight_scale"
    ):
        recipes([rule], {"a.weight_scale": (1,)}, {"b.weight_scale": (1,)})


def test_rules_that_name_a_whole_model_serve_its_base_model() -> None:
    rule = WeightRenaming(r"model.layers.(\d+).a.weight", r"model.layers.\1.b.weight")
    assert Conversion([rule]).recipes({"layers.0.a.weight": (2,)}, {"layers.0.b.weight": (2,)}) == {
        "layers.0.b.weight": Recipe("same", (0,))
    }


def test_a_kernel_may_bring_rules_of_its_own() -> None:
    class Joined:
        def convert(self, given: Any, target_patterns: list[str], **_: Any) -> Any:
            return {target_patterns[0]: torch.cat([each[0] for each in given.values()])}

    rule = SimpleNamespace(source_patterns=["a", "b"], target_patterns="c", operations=[Joined()])
    assert recipes([rule], {"x.a": (2,), "x.b": (1,)}, {"x.c": (3,)}) == {"x.c": Recipe("join", (0, 1), (0,))}


class Scaled:
    def convert(self, given: Any, target_patterns: list[str], **_: Any) -> Any:
        return {target_patterns[0]: next(iter(given.values()))[0] * 2}


OWN_RULE = SimpleNamespace(source_patterns="a.weight", target_patterns="b.weight", operations=[Scaled()])


@pytest.mark.parametrize(
    ("rules", "reason"),
    [
        ([OWN_RULE], "what Scaled makes of b.weight cannot follow"),
        ([WeightConverter("a.weight", "b.weight", [Interleave(dim=0)])], "what Interleave makes of b.weight cannot"),
        ([WeightConverter("a.weight", "b.weight", [Transpose(0, 5)])], "its conversion raised"),
        ([], "no rule of its conversion_mapping makes"),
        ([WeightRenaming("a.weight", "c.weight")], "no rule of its conversion_mapping makes"),
        ([WeightRenaming(r"(a|d).weight", "b.weight")], "2 parameters would become"),
        ([object()], "object in its conversion_mapping is no rule"),
        ([SimpleNamespace(source_patterns=[], target_patterns=[])], "has no patterns"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_with_the_reason(rules: list[Any], reason: str) -> None:
    with pytest.raises(NotConvertible, match=reason):
        recipes(rules, {"a.weight": (4, 2), "d.weight": (4, 2)}, {"b.weight": (4, 2)})


def test_a_parameter_without_a_place_is_named() -> None:
    rule = WeightRenaming("a.weight", "b.weight")
    with pytest.raises(NotConvertible, match=r"no place for model\.layers\.3\.a\.bias$"):
        recipes([rule], {"a.weight": (2,), "a.bias": (2,)}, {"b.weight": (2,)})
