"""Marks: the names under which mappings know the layers and functions of a model."""

from __future__ import annotations

import functools
import inspect
from typing import TYPE_CHECKING, Any, TypeVar

from kernelhub.errors import InvalidConfig
from kernelhub.integrations.kernels.layer.function import marked_function

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

Class = TypeVar("Class", bound=type[Any])


def replace_kernel_forward_from_hub(
    cls: Any, layer_name: str, condition: Callable[[nn.Module], bool] | None = None
) -> None:
    """Mark a layer class that somebody else wrote.

    Args:
        cls: the class; its modules answer to the name from now on.
        layer_name: the name in mappings.
        condition: asked about each module when a model is kernelized; False leaves that module alone.

    Raises:
        InvalidConfig: the name is not a Python name.
    """
    if not isinstance(layer_name, str) or not layer_name.isidentifier():
        raise InvalidConfig(layer_name, "not the name of a layer", "a Python name such as 'RMSNorm'")
    cls.kernel_layer_name = layer_name
    cls.kernel_condition = staticmethod(_always if condition is None else condition)


def use_kernel_forward_from_hub(
    layer_name: str, condition: Callable[[nn.Module], bool] | None = None
) -> Callable[[Any], Any]:
    """Mark the class that is decorated; a function becomes a layer that is called as the function was.

    A function is found by ``kernelize`` where ``use_kernelized_func`` attached it. Arguments as in
    ``replace_kernel_forward_from_hub``.

    Raises:
        TypeError: what is decorated is neither a class nor a function.

    Example:
        >>> from torch import nn
        >>> @use_kernel_forward_from_hub("RMSNorm")
        ... class Norm(nn.Module): ...
        >>> Norm.kernel_layer_name
        'RMSNorm'
    """

    def mark(marked: Any) -> Any:
        if inspect.isfunction(marked):
            layer = marked_function(marked)
            replace_kernel_forward_from_hub(layer, layer_name, condition)
            return layer()
        if not inspect.isclass(marked):
            raise TypeError(f"use_kernel_forward_from_hub({layer_name!r}) marks classes and functions, not {marked!r}")
        replace_kernel_forward_from_hub(marked, layer_name, condition)
        return marked

    return mark


def use_kernel_func_from_hub(func_name: str) -> Callable[[Any], Any]:
    """The older name of ``use_kernel_forward_from_hub`` for functions."""
    return use_kernel_forward_from_hub(func_name)


def use_kernelized_func(*args: Callable[..., Any]) -> Callable[[Class], Class]:
    """Attach marked functions to the modules of the class that is decorated, for ``kernelize`` to find there.

    Raises:
        InvalidConfig: (when the class is decorated) a function is not marked.
    """

    def attach(cls: Class) -> Class:
        named = {_name_of(function): function for function in args}
        init = cls.__init__

        @functools.wraps(init)
        def with_functions(self: Any, *arguments: Any, **keywords: Any) -> None:
            init(self, *arguments, **keywords)
            vars(self).setdefault("_kernel_funcs", {}).update(named)

        cls.__init__ = with_functions
        return cls

    return attach


def _name_of(function: Any) -> str:
    layer_name = getattr(function, "kernel_layer_name", None)
    if layer_name is None:
        raise InvalidConfig(function, "the function is not marked", "one decorated by use_kernel_forward_from_hub")
    return str(getattr(function, "__name__", None) or layer_name)


def _always(module: nn.Module) -> bool:
    return True
