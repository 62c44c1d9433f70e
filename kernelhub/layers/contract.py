"""Contract: may a kernel stand in for the forward of a module, or for a function that a forward calls?

One check is one function with one reason; the tuples of checks are the policy. A kernel layer is used without an
instance of its own: only its ``forward`` runs, with the bound module as ``self``.
"""

from __future__ import annotations

import inspect
from types import FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from kernelhub.layers.attribute import missing_attribute
from kernelhub.layers.report import one_line
from kernelhub.layers.signature import difference, function_signature, method_signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.mode import Mode

_MEMBERS = ("forward", "can_torch_compile", "has_backward", "kernel_condition", "extra_repr")
_WRITTEN_BY_PYTHON = ("__annotate__", "__annotate_func__")  # callable, but not written by the kernel's author


def mismatch(kernel: Any, module: nn.Module) -> str | None:
    """Why ``kernel`` cannot replace the forward of ``module``, or None if it fits.

    ``kernel`` is a layer class, or a function for a module without parameters (an activation, a wrapped function).
    """
    checks = _LAYER_CHECKS if isinstance(kernel, type) else _FUNCTION_CHECKS
    return next((reason for check in checks if (reason := check(kernel, module))), None)


def function_mismatch(kernel: Any, original: Callable[..., Any]) -> str | None:
    """Why ``kernel`` cannot replace the function ``original`` inside the forward that calls it, or None."""
    if isinstance(kernel, type) or not callable(kernel):
        return f"{_name(kernel)} is no function"
    unwanted = _module_condition(kernel, original) if isinstance(original, nn.Module) else None
    return _function_difference(kernel, original) or unwanted or _kernel_condition(kernel, original)


def mode_mismatch(kernel: Any, mode: Mode) -> str | None:
    """Why ``kernel`` is not used in ``mode``, or None (``has_backward`` is True unless told, compiling False)."""
    if mode.training and not getattr(kernel, "has_backward", True):
        return f"{_name(kernel)} has no backward (has_backward is False) and the mode is {mode.value}"
    if mode.compile and not getattr(kernel, "can_torch_compile", False):
        return f"{_name(kernel)} does not support torch.compile (can_torch_compile is not True)"
    return None


def _is_layer(kernel: Any, module: nn.Module) -> str | None:
    return None if issubclass(kernel, nn.Module) else f"{_name(kernel)} is no torch.nn.Module"


def _is_python(kernel: Any, module: nn.Module) -> str | None:
    if not isinstance(kernel.forward, FunctionType) or kernel.forward is nn.Module.forward:
        return f"{_name(kernel)} has no forward written in Python"
    if "__class__" in inspect.unwrap(kernel.forward).__code__.co_freevars:
        return f"{_name(kernel)}.forward uses super(), which means nothing in another module"
    return None


def _is_stateless(kernel: Any, module: nn.Module) -> str | None:
    classes = kernel.__mro__[: kernel.__mro__.index(nn.Module)]
    members = [name for cls in classes for name, value in vars(cls).items() if not _is_allowed(name, value)]
    if not members:
        return None
    return f"{_name(kernel)} is not stateless: it defines {', '.join(dict.fromkeys(members))}, and only forward is used"


def _is_allowed(name: str, value: object) -> bool:
    if name in _MEMBERS or name in _WRITTEN_BY_PYTHON:
        return True
    return name.startswith("__") and name.endswith("__") and not callable(value)


def _same_calls(kernel: Any, module: nn.Module) -> str | None:
    return _compared(method_signature(kernel.forward), method_signature(type(module).forward))


def _function_calls(kernel: Any, module: nn.Module) -> str | None:
    return _compared(function_signature(kernel), method_signature(type(module).forward), free_names="all")


def _function_difference(kernel: Any, original: Callable[..., Any]) -> str | None:
    if isinstance(original, nn.Module):  # a function that transformers wrapped into a module
        return _function_calls(kernel, original)
    return _compared(function_signature(kernel), function_signature(original), free_names="all")


def _compared(
    kernel: inspect.Signature | None, original: inspect.Signature | None, free_names: str = "first"
) -> str | None:
    if kernel is None or original is None:
        return f"the signature of the {'kernel' if kernel is None else 'original'} cannot be read"
    return difference(kernel, original, free_names=free_names)


def _is_function(kernel: Any, module: nn.Module) -> str | None:
    return None if callable(kernel) else f"{_name(kernel)} is neither a layer class nor a function"


def _needs_no_state(kernel: Any, module: nn.Module) -> str | None:
    if next(module.parameters(), None) is None and next(module.buffers(), None) is None:
        return None
    return f"{_name(kernel)} is a function, which cannot use the parameters of {type(module).__name__}"


def _kernel_condition(kernel: Any, subject: Any) -> str | None:
    """Ask the kernel: True fits, a text says why not. It is asked about the module, or about the function."""
    condition = getattr(kernel, "kernel_condition", None)
    return None if condition is None else _answer(condition, subject, f"{_name(kernel)}.kernel_condition")


def _module_condition(kernel: Any, module: nn.Module) -> str | None:
    """Ask the class of the module: False means that this module does not want a kernel."""
    condition = getattr(type(module), "kernel_condition", None)
    return None if condition is None else _answer(condition, module, f"{type(module).__name__}.kernel_condition")


def _answer(condition: Callable[[Any], Any], subject: Any, name: str) -> str | None:
    try:
        answer = condition(subject)
    except Exception as error:
        # Foreign code that cannot judge the module does not vouch for it.
        return one_line(f"{name} raised {type(error).__name__}: {error}")
    if isinstance(answer, str):
        return one_line(answer) or f"{name} says no"
    return None if answer else f"{name} says no"


def _name(kernel: Any) -> str:
    return getattr(kernel, "__name__", None) or type(kernel).__name__


_LAYER_CHECKS: tuple[Callable[[Any, nn.Module], str | None], ...] = (
    _is_layer,
    _is_python,
    _is_stateless,
    _same_calls,
    missing_attribute,
    _module_condition,
    _kernel_condition,
)
_FUNCTION_CHECKS: tuple[Callable[[Any, nn.Module], str | None], ...] = (
    _is_function,
    _needs_no_state,
    _function_calls,
    _module_condition,
    _kernel_condition,
)
