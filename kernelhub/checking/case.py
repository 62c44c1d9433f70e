"""Case: one kind of call of the model's layers (layer, kernel, shapes, dtype), with the layers that are called so."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kernelhub.checking.call import dtype_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kernelhub.checking.call import Call
    from kernelhub.checking.subject import Subject
    from kernelhub.layers.decision import Decision

_NOT_TELLING = ("training", "layer_idx", "layer_id")
_PLAIN = (bool, int, float, str, type(None))


@dataclass
class Case:
    """``decisions`` are those about the layers that are called like this, ``count`` how often they were."""

    key: tuple[object, ...]
    subject: Subject
    call: Call
    decisions: list[Decision] = field(default_factory=list)
    count: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest floating dtype among data and weights: what rounding is judged by."""
        return max(self._dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=torch.float32)

    @property
    def longest(self) -> int:
        """The longest dimension, or the number of rows: no sum in this layer is likely to have more terms."""
        sizes = [size for each in self._tensors for size in each.shape]
        first = self.call.first
        rows = 1 if first is None or not first.numel() else first.numel() // max(first.shape[-1:] or (1,))
        return max([*sizes, rows, 1])

    @property
    def title(self) -> str:
        return self.decisions[0].target.title

    @property
    def sizes(self) -> str:
        """The shape and dtype of the first tensor, for people: ``2x7x32 float32``."""
        first = self.call.first
        shape = "scalar" if first is None else "x".join(map(str, first.shape))
        return f"{shape} {dtype_name(self.dtype)}"

    @property
    def device(self) -> torch.device:
        return next((each.device for each in self._tensors), torch.device("cpu"))

    @property
    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from self.call.tensors.values()
        yield from () if self.subject.module is None else self.subject.module.parameters()

    @property
    def _dtypes(self) -> Iterator[torch.dtype]:
        return (each.dtype for each in self._tensors if each.is_floating_point())


def case_key(decision: Decision, shapes: tuple[object, ...]) -> tuple[object, ...]:
    """What makes two calls the same case: nothing that a kernel may depend on differs, but for the numbers."""
    target = decision.target
    if decision.is_attention:
        facts: tuple[object, ...] = tuple(settings_of(target.module).items())
    elif target.function or decision.is_loss:
        facts = ()
    else:
        facts = tuple(module_facts(module) for module in target.modules)
    kernels = tuple(None if kernel is None else (id(kernel.value), kernel.spelled) for kernel in decision.kernels)
    return (target.layer, target.function, kernels, facts, shapes)


def module_facts(module: nn.Module) -> tuple[object, ...]:
    """What a layer is, apart from the numbers of its weights: classes, settings, shapes and dtypes."""
    return tuple(_facts_of(name, each) for name, each in module.named_modules() if len(name) < 200)


def _facts_of(name: str, module: nn.Module) -> tuple[object, ...]:
    weights = tuple((key, tuple(each.shape), dtype_name(each.dtype)) for key, each in _tensors_of(module).items())
    return (name, _class_name(module), weights, tuple(settings_of(module).items()))


def settings_of(module: nn.Module) -> dict[str, Any]:
    """The plain attributes of a module: numbers, texts, and the names of functions."""
    found: dict[str, Any] = {}
    for key, value in vars(module).items():
        if key.startswith("_") or key in _NOT_TELLING:
            continue
        if isinstance(value, _PLAIN):
            found[key] = value
        elif callable(value) and hasattr(value, "__qualname__"):
            found[key] = f"{value.__module__}.{value.__qualname__}"
    return found


def _tensors_of(module: nn.Module) -> Mapping[str, torch.Tensor]:
    return {key: each for key, each in (*module._parameters.items(), *module._buffers.items()) if each is not None}


def _class_name(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"
