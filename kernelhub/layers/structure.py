"""Layers told by what they are made of, for layer names that are no class name in the model.

A recogniser answers True (this is such a layer), False, or a text: nearly, and why it is not.
"""

from __future__ import annotations

import functools
import inspect
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

from torch import nn

from kernelhub.layers import attention

if TYPE_CHECKING:
    from collections.abc import Callable

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")

# Activations by the name of their class (torch.nn, transformers.activations) or function (torch.nn.functional).
_SILU = ("SiLU", "SiLUActivation", "silu")
_GELU = (
    "GELU",
    "GELUActivation",
    "GELUTanh",
    "PytorchGELUTanh",
    "NewGELUActivation",
    "FastGELUActivation",
    "AccurateGELUActivation",
    "gelu",
)


def _gated_mlp(module: nn.Module, activations: tuple[str, ...]) -> bool | str:
    act_fn = getattr(module, "act_fn", None)
    if act_fn is None or not all(isinstance(getattr(module, name, None), nn.Module) for name in _PROJECTIONS):
        return False
    name = _activation_name(act_fn)
    return name in activations or f"its activation is {name}, not {activations[0]}"


def _activation_name(act_fn: Any) -> str:
    while isinstance(act_fn, functools.partial):
        act_fn = act_fn.func
    return type(act_fn).__name__ if isinstance(act_fn, nn.Module) else getattr(act_fn, "__name__", repr(act_fn))


def _is_swiglu(module: nn.Module) -> bool | str:
    return _gated_mlp(module, _SILU)


def _is_geglu(module: nn.Module) -> bool | str:
    return _gated_mlp(module, _GELU)


def _is_causal_lm(module: nn.Module) -> bool | str:
    base = getattr(module, "base_model_prefix", None)
    parts = module._modules
    return type(module).__name__.endswith("ForCausalLM") and "lm_head" in parts and base in parts


STRUCTURES: dict[str, Callable[[nn.Module], bool | str]] = {
    "SwiGLUMLP": _is_swiglu,
    "GeGLUMLP": _is_geglu,
    "ForCausalLM": _is_causal_lm,
    "ForCausalLMLoss": _is_causal_lm,
    "FusedLinearCrossEntropy": _is_causal_lm,
}

# Layer names that stand for a function which the forward of a layer calls, with the function's name there; for
# attention it is the table in which the forward looks the function up.
FUNCTIONS = {"rotary_pos_emb": "apply_rotary_pos_emb", attention.LAYER: attention.TABLE}


def calls_function(module: nn.Module, name: str) -> bool | str:
    """Does the own forward of the module's class load the global function ``name``?"""
    forward = type(module).forward
    inner = inspect.unwrap(forward)
    if not isinstance(inner, FunctionType) or name not in inner.__code__.co_names or name not in inner.__globals__:
        return False
    hidden = f"{type(module).__name__}.forward is wrapped by a decorator, which hides {name}"
    return hidden if rewrappable(forward) is None else True


def global_name(module: nn.Module, value: object) -> str | None:
    """The name under which the own forward of the module's class loads ``value``, or None."""
    forward = rewrappable(type(module).forward)
    if forward is None:
        return None
    return next((name for name in forward.__code__.co_names if forward.__globals__.get(name) is value), None)


def rewrappable(forward: Any) -> FunctionType | None:
    """The innermost function of ``forward`` if every decorator around it can be rebuilt around a copy, else None.

    A decorator can be when it is a plain function that holds what it wraps in its closure (``functools.wraps``).
    """
    if not isinstance(forward, FunctionType):
        return None
    if not hasattr(forward, "__wrapped__"):
        return forward
    inner = forward.__wrapped__
    held = any(cell.cell_contents is inner for cell in forward.__closure__ or () if _is_filled(cell))
    return rewrappable(inner) if held else None


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018  # reading an empty cell is what raises
    except ValueError:
        return False
    return True
