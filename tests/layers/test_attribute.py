from __future__ import annotations

import importlib.util
import inspect
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import nn

from kernelhub.layers.attribute import annotations_of, missing_attribute, read_attributes
from layers.tiny_model import tiny

if TYPE_CHECKING:
    from pathlib import Path

KERNEL = """
import torch
from torch import nn

class Kernel(nn.Module):
    weight: torch.Tensor

    @torch.no_grad()
    def forward(self, x):
        if hasattr(self, "bias"):
            x = x + self.bias
        eps = self.variance_epsilon if hasattr(self, "variance_epsilon") else self.eps
        scale = getattr(self, "scale", None) and self.scale
        try:
            x = x * self.factor
        except AttributeError:
            pass
        self.seen = x
        return (lambda: self.late * self.weight * x + eps + (scale or 0))()
"""


def kernel_in_a_file(folder: Path, source: str = KERNEL) -> Any:
    file = folder / "kernel_in_a_file.py"
    file.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("kernel_in_a_file", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Kernel


def test_what_a_forward_reads_on_every_path_is_needed(tmp_path: Path) -> None:
    assert read_attributes(kernel_in_a_file(tmp_path).forward) == ("late", "weight")


def test_without_source_the_annotations_count() -> None:
    scope: dict[str, Any] = {}
    exec(KERNEL, scope)
    assert read_attributes(scope["Kernel"].forward) == ()
    assert "self.weight" in str(missing_attribute(scope["Kernel"], nn.ReLU()))


class Annotated(nn.Module):
    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    has_backward: bool = False
    limit: ClassVar[int] = 3

    def forward(self, x: Any) -> Any:
        return x


def test_annotations_name_attributes_but_not_flags_or_class_variables() -> None:
    assert list(annotations_of(Annotated)) == ["weight", "bias", "eps"]
    assert list(annotations_of(type("Child", (Annotated,), {"__annotations__": {"scale": nn.Parameter}}))) == [
        "weight",
        "bias",
        "eps",
        "scale",
    ]


def test_annotations_that_cannot_be_evaluated_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def unresolved(cls: type) -> Any:
        raise NameError("name 'OnlyForTypeCheckers' is not defined")

    # What Python 3.14 does when an annotated name exists for type checkers only.
    monkeypatch.setattr(inspect, "get_annotations", unresolved)
    assert annotations_of(Annotated) == {}


def module_with(**attributes: Any) -> nn.Module:
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ({"weight": torch.ones(1), "bias": None, "eps": 1.0}, None),
        ({"weight": nn.Parameter(torch.ones(1)), "bias": torch.ones(1), "eps": 1}, None),
        ({"weight": None, "bias": None, "eps": 1.0}, "it uses self.weight as a tensor, but there it is NoneType"),
        ({"weight": torch.ones(1), "bias": None}, "it uses self.eps, which Module does not have"),
    ],
)
def test_annotated_attributes_must_exist_and_tensors_be_tensors(attributes: dict[str, Any], reason: str | None) -> None:
    assert missing_attribute(Annotated, module_with(**attributes)) == reason


def test_annotations_may_be_types_or_text() -> None:
    def kernel(**annotations: Any) -> type[nn.Module]:
        members = {"__annotations__": annotations, "forward": lambda self, x: x}
        return type("Kernel", (nn.Module,), members)

    for annotation in (torch.Tensor, nn.Parameter, "torch.Tensor", "nn.Parameter", "Tensor"):
        assert "as a tensor" in str(missing_attribute(kernel(weight=annotation), module_with(weight=1)))
    for annotation in ("ClassVar[int]", "typing.ClassVar", ClassVar, ClassVar[int]):
        assert missing_attribute(kernel(limit=annotation), module_with()) is None


def test_a_gemma_norm_lacks_what_a_llama_norm_kernel_reads(tmp_path: Path) -> None:
    source = KERNEL.partition("class")[0] + (
        "class Kernel(nn.Module):\n    def forward(self, x):\n        return self.weight * x + self.variance_epsilon\n"
    )
    kernel = kernel_in_a_file(tmp_path, source)
    reason = "it uses self.variance_epsilon, which GemmaRMSNorm does not have"
    assert missing_attribute(kernel, tiny("Gemma").model.norm) == reason
    assert missing_attribute(kernel, tiny("Llama").model.norm) is None
