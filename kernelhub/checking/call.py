"""Call: what one layer, or a function inside it, was called with in a real run of the model."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from kernelhub.checking.nest import replaced, settings, tensors

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Call:
    """The arguments of one call, with tensors that nobody else holds.

    ``held`` is what the body of a whole language model had returned inside the call: a head is checked with its body's
    answer held fixed, so that checking it costs no more than the head. ``differentiable`` names the tensors through
    which gradients flowed.
    """

    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    held: Any = None
    differentiable: frozenset[str] = frozenset()

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], held: Any = None) -> Call:
        """A copy of the arguments of a call that is about to happen."""
        call = cls(args, kwargs, held)
        flowing = frozenset(name for name, tensor in call.tensors.items() if tensor.requires_grad)
        return replace(call.map(lambda _, tensor: copied(tensor)), differentiable=flowing)

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return tensors(self._parts)

    @property
    def shapes(self) -> tuple[tuple[str, tuple[int, ...], str], ...]:
        """Name, shape and dtype of every tensor: what makes two calls of a layer alike."""
        return tuple((name, tuple(each.shape), dtype_name(each.dtype)) for name, each in self.tensors.items())

    @property
    def settings(self) -> tuple[tuple[str, Any], ...]:
        """The plain arguments: an axis, a factor, a flag."""
        return tuple(settings(self._parts).items())

    @property
    def first(self) -> torch.Tensor | None:
        """The first tensor with floating numbers: the data that the layer works on."""
        return next((each for each in self.tensors.values() if each.is_floating_point()), None)

    def map(self, change: Callable[[str, torch.Tensor], Any]) -> Call:
        """The same call with other tensors."""
        parts = replaced(self._parts, change)
        return replace(self, args=parts["args"], kwargs=parts["kwargs"], held=parts["held"])

    @property
    def _parts(self) -> dict[str, Any]:
        return {"args": self.args, "kwargs": self.kwargs, "held": self.held}


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own with the same numbers and, where they can be had without gaps, the same strides."""
    return tensor.detach().clone(memory_format=torch.preserve_format)


def is_mask(tensor: torch.Tensor) -> bool:
    """Does a floating tensor hold infinities or the lowest number, as what is added to hidden scores does?"""
    if tensor.numel() == 0 or not tensor.is_floating_point():
        return False
    return not bool((tensor > torch.finfo(tensor.dtype).min / 2).all())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
