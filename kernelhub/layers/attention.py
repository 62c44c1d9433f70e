"""Attention: a kernel in place of the attention function that the layers of transformers look up by name.

Their forward asks ``ALL_ATTENTION_FUNCTIONS`` for the function of ``config._attn_implementation``. The entry
``{"attention": "org/repo@v1:fn"}`` lets the forwards of one model ask a ``Table`` that answers with the kernel: the
registry of transformers, the config and other models stay as they are.

A function is called as theirs are, ``fn(module, query, key, value, attention_mask, scaling=..., ...)``, and returns the
output and the weights or None. What the mask looks like follows from the implementation that the model is set to. A
kernel takes masks as flash attention does (two dimensions, or None for none but the causal one) unless its attribute
``attention_masks`` names others: ``"sdpa"`` (boolean, four dimensions, or None) or ``"eager"`` (added to the scores).
In a model that makes masks for ``sdpa``, a kernel without these gets the calls without a mask, and the model's own
function the others.

A kernel is refused for a layer that passes it something that it has no parameter for: a sliding window, a soft cap,
dropout, sinks. ``**kwargs`` does not count, as what ends there may be ignored.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import FunctionType
from typing import TYPE_CHECKING, Any

from kernelhub.layers.signature import function_signature

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

LAYER = "attention"
TABLE = "ALL_ATTENTION_FUNCTIONS"
PARTLY = "the model's own function in calls with a mask"
_FLASH = "flash"
_FORMS = ("sdpa", "eager", _FLASH)
_POSITIONAL = ("module", "query", "key", "value", "attention_mask")
_ACCEPTING = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_IN_THE_MASK = "sliding_window"  # masks of four dimensions hold it


class Table:
    """Stands for ``ALL_ATTENTION_FUNCTIONS`` in the forward of a layer, whatever implementation is asked for."""

    def __init__(self, kernel: Callable[..., Any], original: Any) -> None:
        self._kernel = kernel
        self._original = original
        self._forms = mask_forms(kernel)
        self._takes_causal = "is_causal" in inspect.signature(kernel).parameters

    def get_interface(self, name: str, default: Callable[..., Any]) -> Callable[..., Any]:
        """The function for an implementation; ``default`` is that of the layer's own file."""
        return self._answer(name, self._original.get_interface(name, default))

    def get(self, name: str, default: Callable[..., Any] | None = None) -> Callable[..., Any]:
        return self._answer(name, self._original.get(name, default))

    def __getitem__(self, name: str) -> Callable[..., Any]:
        return self._answer(name, self._original[name])

    def __contains__(self, name: object) -> bool:
        return name in self._original

    def _answer(self, name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        form = form_of(name)
        if form in self._forms:
            return self._call
        if form != "sdpa" or _FLASH not in self._forms:
            return own

        def unmasked(
            module: Any, query: Any, key: Any, value: Any, attention_mask: Any = None, *args: Any, **kwargs: Any
        ) -> Any:
            function = self._call if attention_mask is None else own
            return function(module, query, key, value, attention_mask, *args, **kwargs)

        return unmasked

    def _call(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        if self._takes_causal and kwargs.get("is_causal") is None:
            kwargs["is_causal"] = getattr(module, "is_causal", True)
        return self._kernel(module, *args, **kwargs)


def form_of(implementation: str | None) -> str:
    """What the masks for an attention implementation look like; empty for one that is not known."""
    name = implementation or ""
    return next((form for form in _FORMS if name == form or (form == _FLASH and name.startswith(form))), "")


def mask_forms(kernel: Any) -> tuple[str, ...]:
    """The forms of masks that a kernel takes."""
    declared = getattr(kernel, "attention_masks", None)
    return (_FLASH,) if declared is None else (declared,) if isinstance(declared, str) else tuple(declared)


def attention_mismatch(kernel: Any) -> str | None:
    """Why a kernel is no attention function at all, or None."""
    signature = function_signature(kernel) if callable(kernel) and not isinstance(kernel, type) else None
    if signature is None:
        return f"{getattr(kernel, '__name__', type(kernel).__name__)} is no function with a readable signature"
    unknown = [form for form in mask_forms(kernel) if form not in _FORMS]
    if unknown:
        return f"its attention_masks {', '.join(map(repr, unknown))} are not among {', '.join(_FORMS)}"
    parameters = list(signature.parameters.values())
    given = [each.name for each in parameters[: len(_POSITIONAL)] if each.kind in _ACCEPTING]
    needed = [
        each.name for each in parameters[len(_POSITIONAL) :] if each.default is each.empty and each.kind in _ACCEPTING
    ]
    if len(given) < len(_POSITIONAL) or set(needed) - {"scaling"}:
        return f"its signature is {signature}, and an attention function is called with ({', '.join(_POSITIONAL)})"
    if "scaling" not in signature.parameters:
        return f"its signature is {signature}, without the scaling of the scores"
    return None


def layer_mismatch(kernel: Any, module: nn.Module) -> str | None:
    """Why a kernel cannot be the attention function of this layer, or None."""
    implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
    form, forms = form_of(implementation), mask_forms(kernel)
    if form not in forms and not (form == "sdpa" and _FLASH in forms):
        return f"it takes masks for {', '.join(forms)}, and this model makes those for {implementation}"
    taken = inspect.signature(kernel).parameters
    for name, value in _passed(module):
        holds = name == _IN_THE_MASK and form != _FLASH
        if name not in taken and not holds and not _is_idle(value, module):
            return f"it has no parameter {name!r}, which {type(module).__name__} passes"
    if getattr(module, "is_causal", True) is False and "is_causal" not in taken:
        return f"it has no parameter 'is_causal', and this {type(module).__name__} looks at what comes later too"
    return None


def works_partly(kernel: Any, module: nn.Module) -> bool:
    """Does the kernel get only the calls without a mask?"""
    return form_of(getattr(getattr(module, "config", None), "_attn_implementation", None)) not in mask_forms(kernel)


def _passed(module: nn.Module) -> Iterator[tuple[str, ast.expr]]:
    """The keyword arguments that a layer's forward gives to the attention function, with what it writes there."""
    inner = inspect.unwrap(type(module).forward)
    try:
        tree = (
            ast.parse(textwrap.dedent(inspect.getsource(inner)))
            if isinstance(inner, FunctionType)
            else ast.Module([], [])
        )
    except (OSError, SyntaxError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "attention" in node.func.id:
            yield from ((each.arg, each.value) for each in node.keywords if each.arg not in (None, "scaling"))


def _is_idle(value: ast.expr, module: nn.Module) -> bool:
    """Is what is written there nothing for this layer: None, 0, or attributes of the layer that are?"""
    if isinstance(value, ast.Constant):
        return value.value is None or value.value in (0, False)
    if isinstance(value, ast.IfExp):
        return _is_idle(value.body, module) and _is_idle(value.orelse, module)
    if isinstance(value, ast.Attribute) and isinstance(value.value, ast.Name) and value.value.id == "self":
        held = getattr(module, value.attr, True)
        return held is None or (isinstance(held, (int, float)) and held == 0)
    return False
