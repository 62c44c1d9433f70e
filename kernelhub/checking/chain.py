"""Chain: the layers that one kernel replaces together (or one layer with a layout), as a module of their own.

The copies are the same to plain layers and kernel: one chain is left as it is, the other bound as the decision says.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from kernelhub.layers.binder import Binder
from kernelhub.layers.discovery import Siblings

if TYPE_CHECKING:
    from kernelhub.layers.decision import Decision


class Chain(nn.Module):
    """Calls its layers one after the other, each with what the one before it returned."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *others = self.children()
        result = first(*args, **kwargs)
        for layer in others:
            result = layer(result)
        return result


def plain_chain(decision: Decision) -> Chain:
    """Copies of the layers that a decision is about; none of them is bound."""
    return Chain(copy.deepcopy(_layers(decision)))


def bound_chain(decision: Decision) -> Chain:
    """Such copies with the kernel of the decision."""
    layers, layouts = copy.deepcopy((_layers(decision), decision.layouts))  # together: layouts refer to the layers
    chain = Chain(layers)
    target = decision.target
    modules = tuple(layers.values())
    siblings = None if target.siblings is None else Siblings(chain, "", tuple(layers), modules)
    copied = type(target)(target.path, modules[0], target.layer, siblings=siblings)
    Binder().bind_all(chain, [decision._replace(target=copied, layouts=layouts)])
    return chain


def _layers(decision: Decision) -> dict[str, nn.Module]:
    siblings = decision.target.siblings
    if siblings is None:
        return {"layer": decision.target.module}
    return dict(zip(siblings.names, siblings.modules, strict=True))
