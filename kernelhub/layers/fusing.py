"""Fusing: forwards that let one kernel run in place of several layers, and what they share.

The first layer's forward runs the kernel, on a layout, and the others pass on what it returned. It is decided at each
call of the first layer whether the kernel runs, and the others follow that decision, whatever their own state is: so
nothing is computed twice or left out. The parent has to hand the first layer's result to the next as it is: a layer
that is called with anything else raises, as the fused kernel would have computed something else than the model.

The kernel makes way for the layers' own forwards while they are not what the layout was made of: an adapter or a hook
was put inside, a weight is sharded, a layer was taken out or replaced.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from kernelhub.errors import BrokenFusion
from kernelhub.layers import joint
from kernelhub.layers.binding import RECORD

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from torch import nn

    from kernelhub.layers.layout import Layout

    Forward = Callable[..., Any]

_CHANGED = "their parent does not hand the result of one to the next as it is"
_MIXED = "one of them is compiled and another is not"


class Fused:
    """Layers that one kernel replaces: the same object in the record of each.

    ``names`` are those in their ``parent``, which is None for a single layer that is no fusion's. ``layouts`` are those
    of the kernels, of which there may be one for training and another for inference.
    """

    def __init__(
        self, parent: nn.Module | None, names: tuple[str, ...], layers: tuple[nn.Module, ...], layouts: Sequence[Layout]
    ) -> None:
        self.parent = parent
        self.names = names
        self.layers = layers
        self.layouts = tuple(layouts)
        self._joint: list[list[tuple[nn.Module, str]]] = []
        self._handed: dict[int, weakref.ref[torch.Tensor]] = {}
        self._traced: torch.Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> Fused | None:
        """A copy for the layers' copies; None where one is copied without its parent, which runs its own forward."""
        anchor = self.layers[0] if self.parent is None else self.parent
        if id(anchor) not in memo:
            return None
        made = copy.copy(self)
        memo[id(self)] = made
        made.parent = copy.deepcopy(self.parent, memo)
        made.layers = copy.deepcopy(self.layers, memo)
        made.layouts = copy.deepcopy(self.layouts, memo)
        made._joint, made._handed, made._traced = [], {}, None
        return made

    def titled(self, path: str) -> str:
        """The path of the first layer, as a report names all of them."""
        return " + ".join([path, *self.names[1:]])

    @property
    def is_one(self) -> bool:
        return len(self.layers) == 1

    def ready(self, index: int) -> list[torch.Tensor] | None:
        """The parameters for the kernel with this layout; None if the layers have to run their own forwards now."""
        if self.parent is not None:
            inside = self.parent._modules
            for name, layer in zip(self.names, self.layers, strict=True):
                if inside.get(name) is not layer:
                    return None
        for layer in self.layers[1:]:
            if not _passes(layer):
                return None
        return self.layouts[index].tensors()

    def hand(self, result: torch.Tensor) -> None:
        """Remember what the kernel returned, for the layers after the first."""
        if is_compiling():
            self._traced = result
        else:
            key = threading.get_ident()
            self._handed[key] = weakref.ref(result)

    def forget(self) -> None:
        """The first layer ran its own forward: the others do too."""
        if is_compiling():
            self._traced = None
        elif self._handed:
            self._handed.pop(threading.get_ident(), None)

    def handed(self, layer: nn.Module) -> torch.Tensor | None:
        """What the kernel returned in this pass; None if it did not run. Forgotten when the last layer asks."""
        if is_compiling():
            if self._handed:
                raise BrokenFusion(self.title, _MIXED)
            found, is_last = self._traced, layer is self.layers[-1]
            if is_last:
                self._traced = None
            return found
        if self._traced is not None:
            raise BrokenFusion(self.title, _MIXED)
        key = threading.get_ident()
        ref = self._handed.pop(key, None) if layer is self.layers[-1] else self._handed.get(key)
        if ref is None:
            return None
        found = ref()
        if found is None:
            raise BrokenFusion(self.title, _CHANGED)
        return found

    @property
    def title(self) -> str:
        return " + ".join(self.names)

    def join(self, elsewhere: Collection[int]) -> None:
        """Let parameters that a kernel wants as one lie in one piece of memory, where nobody else manages them."""
        for layout in self.layouts:
            for slot in layout.slots:
                if slot.recipe.can_be_joint:
                    sources = [layout.sources[index] for index in slot.recipe.sources]
                    parts = [owner._parameters[name] for owner, name in sources]
                    if joint.join([part for part in parts if part is not None], elsewhere):
                        self._joint.append([(owner, name) for owner, name in sources])

    def part(self) -> None:
        """The inverse of ``join``."""
        for sources in self._joint:
            parts = [owner._parameters.get(name) for owner, name in sources]
            found = [part for part in parts if part is not None]
            if len(found) == len(parts):
                joint.part(found)
        self._joint = []


def first(index: int, kernel: Forward, own: Forward) -> Forward:
    """The forward of the first layer: the kernel's, on the layout with this index, or the layer's own."""

    @functools.wraps(kernel)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fused = _fused(self)
        if fused is None:
            return own(self, *args, **kwargs)
        tensors = fused.ready(index)
        if tensors is None:
            fused.forget()
            return own(self, *args, **kwargs)
        result = fused.layouts[index].run(kernel, tensors, self.training, args, kwargs)
        if not fused.is_one:
            if not isinstance(result, torch.Tensor):
                raise BrokenFusion(fused.title, f"their kernel returned a {type(result).__name__}, not a tensor")
            fused.hand(result)
        return result

    return forward


def alone(own: Forward) -> Forward:
    """The first layer's own forward, in a mode without a kernel."""

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fused = _fused(self)
        if fused is not None:
            fused.forget()
        return own(self, *args, **kwargs)

    return forward


def passing(own: Forward) -> Forward:
    """The forward of the other layers: what the kernel returned, or the layer's own where the kernel did not run."""

    @functools.wraps(own)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        fused = _fused(self)
        handed = None if fused is None else fused.handed(self)
        if fused is None or handed is None:
            return own(self, *args, **kwargs)
        if len(args) != 1 or kwargs or args[0] is not handed:
            raise BrokenFusion(fused.title, _CHANGED)
        return handed

    return forward


def _fused(module: nn.Module) -> Fused | None:
    return getattr(module.__dict__.get(RECORD), "fused", None)


def _passes(layer: nn.Module) -> bool:
    """Does a layer after the first still run the forward that follows the first?"""
    record = layer.__dict__.get(RECORD)
    forward = layer.__dict__.get("forward")
    if getattr(forward, "__func__", None) is getattr(record, "forward", False):
        return True
    return getattr(layer.__dict__.get("_old_forward"), "__func__", None) is getattr(record, "forward", False)
