"""Lookup: the attention function that a layer finds in a table, as something that can be called and listened to."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from kernelhub.layers.decision import original_of
from kernelhub.layers.fitting import replacement

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.layers.discovery import Target
    from kernelhub.layers.outcome import Kernel

    Function = Callable[..., Any]

SOUGHT = frozenset({"[0]"})
"""What an attention function has to return: the weights beside it are for looking at, and kernels never make them."""

_DEFAULT = "eager_attention_forward"


def own_attention(target: Target) -> Function:
    """The function that the layer of a target calls by itself."""
    return _found(original_of(target), target)


def kernel_attention(target: Target, kernel: Kernel) -> Function:
    """What it calls with the kernel: the kernel itself, or for some masks the own function."""
    return _found(replacement(target, kernel), target)


class Listening:
    """A table whose functions tell ``hear`` their arguments before they run."""

    def __init__(self, original: Any, hear: Callable[[tuple[Any, ...], dict[str, Any]], object]) -> None:
        self._original = original
        self._hear = hear

    def get_interface(self, name: str, default: Function) -> Function:
        return self._listened(self._original.get_interface(name, default))

    def get(self, name: str, default: Function | None = None) -> Function:
        return self._listened(self._original.get(name, default))

    def __getitem__(self, name: str) -> Function:
        return self._listened(self._original[name])

    def __contains__(self, name: object) -> bool:
        return name in self._original

    def _listened(self, function: Function) -> Function:
        def listening(*args: Any, **kwargs: Any) -> Any:
            self._hear(args, kwargs)
            return function(*args, **kwargs)

        return listening


def _found(table: Any, target: Target) -> Function:
    config: Any = target.module.config
    default = inspect.unwrap(type(target.module).forward).__globals__.get(_DEFAULT)
    found: Function = table.get_interface(config._attn_implementation, default)
    return found
