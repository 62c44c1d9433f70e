"""Layout: the module that a kernel with other parameters than the layers' runs on (``companion`` makes it).

The layout never becomes a part of the model. Its parameters are filled in for each call, from the layers as they are
then. So the model keeps its modules and its parameters, the same objects under the same names: an optimizer made before
works, and ``state_dict``, ``load_state_dict`` and saved files are those of the plain model.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernelhub.layers.conversion import Recipe


class Slot(NamedTuple):
    """A parameter of a layout: the module inside it that has it, its name there, and how it is made."""

    owner: nn.Module
    name: str
    recipe: Recipe


class Source(NamedTuple):
    """A parameter of the layers: the module that has it, and its name there."""

    owner: nn.Module
    name: str


class Link(NamedTuple):
    """A module inside the layers, which has to be there still.

    One that is not ``called`` by the kernel may have no hooks and no forward of its own, which would not run.
    """

    parent: nn.Module
    name: str
    child: nn.Module
    called: bool

    @property
    def holds(self) -> bool:
        child = self.child
        if self.parent._modules.get(self.name) is not child:
            return False
        if self.called:
            return True
        if "forward" in child.__dict__ or child._backward_hooks or child._backward_pre_hooks:
            return False
        return not (child._forward_hooks or child._forward_pre_hooks)


class Layout:
    """A kernel's ``self`` in place of some layers.

    ``own`` are the modules that the layout is made of, those of the layers left out, which the kernel may call too.
    """

    def __init__(
        self,
        module: nn.Module,
        own: Sequence[nn.Module],
        slots: tuple[Slot, ...],
        sources: tuple[Source, ...],
        links: tuple[Link, ...],
    ) -> None:
        self.module = module
        self.slots = slots
        self.sources = sources
        self.links = links
        self._own = tuple(own)
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    def keeps(self, module: nn.Module) -> bool:
        """Is this module of the layers one that the kernel calls?"""
        own = {id(each) for each in self._own}
        return any(each is module and id(each) not in own for each in self.module.modules())

    def tensors(self) -> list[torch.Tensor] | None:
        """The layers' parameters; None if the layers are not now what the layout was made of."""
        for link in self.links:
            if not link.holds:
                return None
        found: list[torch.Tensor] = []
        for owner, name in self.sources:
            tensor = owner._parameters.get(name)
            if tensor is None or not _is_whole(tensor):
                return None
            found.append(tensor)
        return found

    def run(
        self, forward: Callable[..., Any], tensors: Sequence[torch.Tensor], training: bool, args: Any, kwargs: Any
    ) -> Any:
        """Call a kernel's forward on this layout, with its parameters made of ``tensors``."""
        if is_compiling():
            return self._run(forward, tensors, training, args, kwargs)
        with self._lock:  # one call at a time: the parameters are there during the call only
            return self._run(forward, tensors, training, args, kwargs)

    def _run(
        self, forward: Callable[..., Any], tensors: Sequence[torch.Tensor], training: bool, args: Any, kwargs: Any
    ) -> Any:
        if is_compiling() or self.module.training is not training:  # reading it while compiling would guard it
            for each in self._own:
                each.training = training
        empty = [owner._parameters[name] for owner, name, _ in self.slots]
        try:
            for owner, name, recipe in self.slots:
                # In the dict itself: a tensor with a history is no Parameter, which is all that a module would take.
                owner._parameters[name] = recipe.make(tensors)  # type: ignore[assignment]
            return forward(self.module, *args, **kwargs)
        finally:
            for (owner, name, _), parameter in zip(self.slots, empty, strict=True):
                owner._parameters[name] = parameter


def _is_whole(tensor: torch.Tensor) -> bool:
    """Is this all of a parameter? Not for DTensors, what ZeRO-3 leaves empty, or quantised weights."""
    return (type(tensor) is nn.Parameter or type(tensor) is torch.Tensor) and tensor.numel() > 0
