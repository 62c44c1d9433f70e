"""use_kernel: the mark that gives the layers of a class a name in kernel configs."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from torch import nn

if TYPE_CHECKING:
    from collections.abc import Callable

MARK = "kernel_layer_name"  # the attribute that transformers' own marks use, so both are found alike

Layer = TypeVar("Layer", bound=type[nn.Module])


def use_kernel(layer_name: str) -> Callable[[Layer], Layer]:
    """Mark a layer class: entries named ``layer_name`` mean its modules. Records the name, changes no behaviour.

    Raises:
        TypeError: the name is not an identifier, or what is decorated is not an ``nn.Module`` class.

    Example:
        >>> @use_kernel("RMSNorm")
        ... class MyNorm(nn.Module): ...
        >>> MyNorm.kernel_layer_name
        'RMSNorm'
    """
    if not isinstance(layer_name, str) or not layer_name.isidentifier():
        raise TypeError(f"use_kernel takes the name of a layer, such as 'RMSNorm', not {layer_name!r}")

    def mark(cls: Layer) -> Layer:
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"use_kernel({layer_name!r}) marks nn.Module classes, not {cls!r}")
        setattr(cls, MARK, layer_name)
        return cls

    return mark


def mark_of(module: nn.Module) -> str | None:
    """The layer name a module is marked with, or None.

    A class that inherits the mark but defines another ``forward`` is another layer: the mark ends there.
    """
    if MARK in vars(module):
        return str(vars(module)[MARK])
    telling = (cls for cls in type(module).__mro__ if MARK in vars(cls) or "forward" in vars(cls))
    mark = vars(next(telling)).get(MARK)  # at the latest nn.Module itself defines forward
    return None if mark is None else str(mark)
