"""Contract: may a kernel stand in for the forward of a module, or for a function that a forward calls?

One check is one function with one reason; the tuples of checks are the policy. A kernel layer is used without an
instance of its own: only its ``forward`` runs, with the bound module as ``self``.
"""

from __future__ import annotations

import inspect
from functools import partial
from types import FunctionType, MappingProxyType
from typing import TYPE_CHECKING, Any

from torch import nn

from kernelhub.layers.attribute import lacking, unrenamable
from kernelhub.layers.report import one_line
from kernelhub.layers.signature import difference, function_signature, method_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kernelhub.mode import Mode

STANDARD_LOSS = "ForCausalLMLoss"
_MEMBERS = ("forward", "can_torch_compile", "has_backward", "kernel_condition", "extra_repr")
_WRITTEN_BY_PYTHON = ("__annotate__", "__annotate_func__")  # callable, but not written by the kernel's author


def mismatch(kernel: Any, module: nn.Module, spelled: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """Why ``kernel`` cannot replace the forward of ``module``, or None if it fits.

    ``kernel`` is a layer class, or a function for a module without parameters (an activation, a wrapped function).
    ``spelled`` gives the module's own names of attributes that the kernel calls otherwise.
    """
    return class_mismatch(kernel, module, spelled) or instance_mismatch(kernel, module, spelled)


def class_mismatch(kernel: Any, module: nn.Module, spelled: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """The part of ``mismatch`` that has the same answer for all modules of a class."""
    checks = _LAYER_CHECKS if isinstance(kernel, type) else _FUNCTION_CHECKS
    reason = next((reason for check in checks if (reason := check(kernel, module))), None)
    return reason or _unspellable(kernel, spelled)


def instance_mismatch(kernel: Any, module: nn.Module, spelled: Mapping[str, str] = MappingProxyType({})) -> str | None:
    """The part of ``mismatch`` that depends on the module itself."""
    checks = instance_checks(kernel, type(module), spelled)
    return next((reason for check in checks if (reason := check(module))), None)


def instance_checks(
    kernel: Any, cls: type[nn.Module], spelled: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[nn.Module], str | None], ...]:
    """What there is to ask each module of a class."""
    has_state = lacking(kernel, spelled) if isinstance(kernel, type) else partial(_needs_no_state, kernel)
    checks: list[Callable[[nn.Module], str | None]] = [has_state]
    if getattr(cls, "kernel_condition", None) is not None:
        checks.append(partial(_module_condition, kernel))
    if getattr(kernel, "kernel_condition", None) is not None:
        checks.append(partial(_kernel_condition, kernel))
    return tuple(checks)


def loss_mismatch(kernel: Any, model: nn.Module) -> str | None:
    """Why ``kernel``, a function or a stateless layer, cannot be the loss function of a causal language model."""
    original: Any = model.loss_function
    name = getattr(original, "__name__", type(original).__name__)
    if name != STANDARD_LOSS:
        return f"its loss is {name}, not the standard {STANDARD_LOSS}"
    return _is_function(kernel, model) or _compared(_signature(kernel), function_signature(original))


def is_loss(kernel: Any) -> bool:
    """Does a kernel take logits, as a loss function does, and not what a whole model takes?"""
    signature = _signature(kernel)
    return signature is not None and next(iter(signature.parameters), "") == "logits"


def _signature(kernel: Any) -> inspect.Signature | None:
    return method_signature(kernel.forward) if _is_layer_class(kernel) else function_signature(kernel)


def _is_layer_class(kernel: Any) -> bool:
    return isinstance(kernel, type) and issubclass(kernel, nn.Module)


def function_mismatch(kernel: Any, original: Callable[..., Any]) -> str | None:
    """Why ``kernel`` cannot replace the function ``original`` inside the forward that calls it, or None."""
    if isinstance(kernel, type) or not callable(kernel):
        return f"{_name(kernel)} is no function"
    unwanted = _module_condition(kernel, original) if isinstance(original, nn.Module) else None
    return _function_difference(kernel, original) or unwanted or _kernel_condition(kernel, original)


def mode_mismatch(kernel: Any, mode: Mode) -> str | None:
    """Why ``kernel`` is not used in ``mode``, or None (``has_backward`` is True unless told, compiling False)."""
    if mode.training and not getattr(kernel, "has_backward", True):
        return f"{_name(kernel)} has no backward (has_backward is False)"
    if mode.compile and not getattr(kernel, "can_torch_compile", False):
        return f"{_name(kernel)} does not support torch.compile (can_torch_compile is not True)"
    return None


def _unspellable(kernel: Any, spelled: Mapping[str, str]) -> str | None:
    if spelled and not isinstance(kernel, type):
        return f"{_name(kernel)} is a function, which has no attributes to spell otherwise"
    return next((reason for name in spelled if (reason := unrenamable(kernel.forward, name))), None)


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
)
_FUNCTION_CHECKS: tuple[Callable[[Any, nn.Module], str | None], ...] = (
    _is_function,
    _function_calls,
)
