"""Functions as layers, which marks and mappings name, and layers as functions."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn


def function_layer(function: Callable[..., Any]) -> type[nn.Module]:
    """A layer class without state whose ``forward`` calls the function, and says what the function says of itself."""
    from torch import nn  # noqa: PLC0415  # importing these functions must not need torch

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    own = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    known = inspect.signature(function)
    forward.__signature__ = known.replace(  # type: ignore[attr-defined]  # read by inspect.signature
        parameters=[*own, *known.parameters.values()]
    )
    members = {
        "__module__": getattr(function, "__module__", __name__),
        "__doc__": function.__doc__,
        "can_torch_compile": getattr(function, "can_torch_compile", False),
        "has_backward": getattr(function, "has_backward", True),
        "forward": forward,
    }
    return type("Func", (nn.Module,), members)


def marked_function(function: Callable[..., Any]) -> type[nn.Module]:
    """``function_layer`` for a function that a module defines: its one instance takes the function's place there.

    Copying a model copies no functions, so the instance stays the one that the module holds; pickle writes its name.
    """
    layer = function_layer(function)
    name = getattr(function, "__qualname__", "")
    layer.__reduce__ = lambda self: name  # type: ignore[method-assign]
    return layer


def layer_function(layer: type[nn.Module]) -> Callable[..., Any]:
    """The ``forward`` of a layer class without state, to be called where a plain function was."""
    instance = layer()
    forward = instance.forward

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    call.can_torch_compile = getattr(layer, "can_torch_compile", False)  # type: ignore[attr-defined]
    call.has_backward = getattr(layer, "has_backward", True)  # type: ignore[attr-defined]
    return call
