"""Fitting: what has to be asked about a kernel and a target, be that a layer, a function, a loss or a fusion."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

from kernelhub.layers import attention
from kernelhub.layers.companion import SUFFIX, companion, lay_out
from kernelhub.layers.contract import (
    STANDARD_LOSS,
    class_mismatch,
    function_mismatch,
    instance_checks,
    is_loss,
    loss_mismatch,
)
from kernelhub.layers.conversion import Conversion, NotConvertible
from kernelhub.layers.signature import method_signature

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import nn

    from kernelhub.layers.discovery import Target
    from kernelhub.layers.layout import Layout
    from kernelhub.layers.outcome import Kernel


def is_loss_of(target: Target, value: Any) -> bool:
    """Does this kernel replace the loss function of a model, and not a forward?"""
    return target.layer == STANDARD_LOSS and not target.function and is_loss(value)


def original_of(target: Target) -> Any:
    """The function that a function target replaces."""
    return inspect.unwrap(type(target.module).forward).__globals__[target.function]


def is_attention(target: Target) -> bool:
    """Is it the attention function that is replaced, by the table that the layer looks it up in?"""
    return target.function == attention.TABLE


def replacement(target: Target, kernel: Kernel) -> Any:
    """What stands for the function of a target in the forward that calls it."""
    return attention.Table(kernel.value, original_of(target)) if is_attention(target) else kernel.value


def remark_on(target: Target, kernel: Kernel) -> str:
    """What else a report has to tell about a kernel that is bound."""
    return attention.PARTLY if is_attention(target) and attention.works_partly(kernel.value, target.module) else ""


def has_layout(target: Target, kernel: Kernel) -> bool:
    """Does the kernel run on a layout of its own instead of the layer?"""
    return not target.function and companion(kernel.value) is not None


def class_misfit(target: Target, kernel: Kernel) -> str | None:
    """Why a kernel cannot replace any layer of this class, or None."""
    if is_attention(target):
        return attention.attention_mismatch(kernel.value)
    if target.function:
        return function_mismatch(kernel.value, original_of(target))
    if is_loss_of(target, kernel.value):
        return None
    if target.siblings is not None:
        if not has_layout(target, kernel):
            name = getattr(kernel.value, "__name__", type(kernel.value).__name__)
            return f"a kernel for a fusion comes with a layout class, and there is no {name}{SUFFIX} beside it"
        if reason := next(filter(None, map(_takes_more, target.modules[1:])), None):
            return reason
    return class_mismatch(kernel.value, target.module, dict(kernel.spelled))


def module_checks(
    target: Target, kernel: Kernel, cls: type[nn.Module]
) -> tuple[Callable[[nn.Module], str | None], ...]:
    """What there is to ask each module of a class, which is that of the layer or of the kernel's layout."""
    if is_attention(target):
        return (partial(attention.layer_mismatch, kernel.value),)
    if target.function:
        return ()
    if is_loss_of(target, kernel.value):
        return (partial(loss_mismatch, kernel.value),)
    return instance_checks(kernel.value, cls, dict(kernel.spelled))


def layout_for(
    target: Target, kernel: Kernel, conversions: dict[type[nn.Module], Conversion], config: Any
) -> Layout | None:
    """What the kernel runs on in place of the target's layers; None if that is the layer itself.

    ``conversions`` remembers those of each layout class.

    Raises:
        NotConvertible: the kernel's layout does not fit these layers.
    """
    cls = companion(kernel.value)
    if cls is None:
        return None
    if cls not in conversions:
        conversions[cls] = Conversion(_rules(cls), config)
    if target.siblings is None:
        return lay_out(cls, {target.path: target.module}, conversions[cls], fused=False)
    paths = [f"{target.siblings.path}.{name}".lstrip(".") for name in target.siblings.names]
    return lay_out(cls, dict(zip(paths, target.modules, strict=True)), conversions[cls], fused=True)


def _rules(layout: type[nn.Module]) -> list[Any]:
    declared = getattr(layout, "conversion_mapping", None) or ()
    if not isinstance(declared, (list, tuple)):
        raise NotConvertible(f"{layout.__name__}.conversion_mapping is a {type(declared).__name__}, not a list")
    return list(declared)


def _takes_more(module: nn.Module) -> str | None:
    """Why a layer after the first cannot just pass on what it is given, or None."""
    signature = method_signature(type(module).forward)
    if signature is None:
        return f"the signature of {type(module).__name__} cannot be read"
    needed = [each.name for each in signature.parameters.values() if each.default is each.empty]
    needed = [name for name in needed if signature.parameters[name].kind not in _STARRED]
    return (
        None if len(needed) == 1 else f"{type(module).__name__} takes {', '.join(needed)}, not the result before alone"
    )


_STARRED = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
