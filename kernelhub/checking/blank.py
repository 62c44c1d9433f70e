"""Blank: a layer described by plain data, and a stand-in made from the description on another machine.

A description holds classes by name, settings, and the names of tensors. No class is imported because a file says so:
a few classes of ``torch.nn`` are known, and everything else becomes a plain container of its parameters and settings,
which is all that a kernel's forward looks at.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional

from kernelhub.errors import InvalidGolden

if TYPE_CHECKING:
    from collections.abc import Callable

    Take = Callable[[Any], torch.Tensor]

_PLAIN = (bool, int, float, str, type(None))
_NOT_KEPT = ("training",)
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,80}|[0-9]{1,4}", re.ASCII)
_DEEPEST = 12
_MOST_PARTS = 500
_KNOWN = {
    f"torch.nn.{cls.__name__}": cls
    for cls in (
        nn.Dropout,
        nn.Embedding,
        nn.GELU,
        nn.Identity,
        nn.LayerNorm,
        nn.Linear,
        nn.Mish,
        nn.ReLU,
        nn.RMSNorm,
        nn.SiLU,
        nn.Sigmoid,
        nn.Tanh,
    )
}
# Activations of transformers, which are those of torch under other names.
_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "SiLUActivation": nn.SiLU,
    "GELUActivation": nn.GELU,
    "GELUTanh": lambda: nn.GELU("tanh"),
    "PytorchGELUTanh": lambda: nn.GELU("tanh"),
    "NewGELUActivation": lambda: nn.GELU("tanh"),
}
_FUNCTIONS: dict[str, Any] = {
    f"torch.nn.functional.{each.__name__}": each for each in (functional.silu, functional.gelu, functional.relu)
}


class Blank(nn.Module):
    """A layer without a forward of its own: parameters, settings and layers inside."""


def described(module: nn.Module, keep: Callable[[str, torch.Tensor], str], path: str = "") -> dict[str, Any]:
    """A module as plain data; ``keep`` stores a tensor under a path and says by what name.

    Raises:
        InvalidGolden: it is too deep.
    """
    if path.count(".") > _DEEPEST:
        raise InvalidGolden(path, "a layer with more layers inside each other", f"at most {_DEEPEST}")
    start = f"{path}." if path else ""
    tensors = {
        kind: {key: keep(start + key, each) for key, each in found.items() if each is not None}
        for kind, found in (("parameters", module._parameters), ("buffers", module._buffers))
    }
    absent = [key for key, each in module._parameters.items() if each is None]
    frozen = [key for key, each in module._parameters.items() if each is not None and not each.requires_grad]
    children = {key: described(child, keep, start + key) for key, child in module._modules.items() if child is not None}
    parts = {**tensors, "absent": absent, "frozen": frozen, "children": children}
    return {"class": _class_name(module), **parts, **_settings(module)}


def rebuilt(description: object, take: Take) -> nn.Module:
    """The stand-in for a description; ``take`` brings a tensor by its name.

    Raises:
        InvalidGolden: the description is not what ``described`` writes.
    """
    budget = [_MOST_PARTS]
    return _rebuilt(description, take, budget, 0)


def _rebuilt(description: object, take: Take, budget: list[int], depth: int) -> nn.Module:
    budget[0] -= 1
    if budget[0] < 0 or depth > _DEEPEST:
        raise InvalidGolden("layer", "too many layers inside", f"at most {_MOST_PARTS}, {_DEEPEST} deep")
    data = _object(description, "a layer")
    module = _new(str(data.get("class")))
    frozen = _names(data.get("frozen"))
    for name, key in _object(data.get("parameters"), "parameters").items():
        tensor = take(key)
        flows = tensor.is_floating_point() and name not in frozen
        module.register_parameter(_name(name), nn.Parameter(tensor, requires_grad=flows))
    for name in _names(data.get("absent")):
        module.register_parameter(name, None)
    for name, key in _object(data.get("buffers"), "buffers").items():
        module.register_buffer(_name(name), take(key))
    for name, child in _object(data.get("children"), "children").items():
        module._modules[_name(name)] = _rebuilt(child, take, budget, depth + 1)
    for name, value in _object(data.get("settings"), "settings").items():
        _set(module, name, _setting(value))
    for name, value in _object(data.get("functions"), "functions").items():
        if value in _FUNCTIONS:
            _set(module, name, _FUNCTIONS[value])
    return module


def _new(name: str) -> nn.Module:
    if name in _ACTIVATIONS:
        return _ACTIVATIONS[name]()
    cls = _KNOWN.get(name, Blank)
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    return module


def _class_name(module: nn.Module) -> str:
    cls = type(module)
    if cls.__module__.startswith("torch.nn.modules."):
        return f"torch.nn.{cls.__name__}"
    return cls.__name__


def _settings(module: nn.Module) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    functions: dict[str, str] = {}
    for key, value in vars(module).items():
        if key.startswith("_") or key in _NOT_KEPT:
            continue
        if isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(isinstance(each, _PLAIN) for each in value)):
            plain[key] = list(value) if isinstance(value, tuple) else value
        for name, function in _FUNCTIONS.items():
            if value is function:
                functions[key] = name
    return {"settings": plain, "functions": functions}


def _setting(value: object) -> Any:
    items = value if isinstance(value, list) else [value]
    if len(items) > 16 or not all(isinstance(each, _PLAIN) for each in items):
        raise InvalidGolden(value, "a setting", "a number, a text, or a few of them")
    return tuple(items) if isinstance(value, list) else value


def _set(module: nn.Module, name: object, value: Any) -> None:
    known = _name(name)
    if known in vars(nn.Module) or known in module._parameters or known in module._modules:
        raise InvalidGolden(name, "a setting that every module has", "a setting of the layer")
    module.__dict__[known] = value


def _names(value: object) -> list[str]:
    if not isinstance(value, list) or len(value) > _MOST_PARTS:
        raise InvalidGolden(value, "not names of parameters", "a list")
    return [_name(name) for name in value]


def _name(name: object) -> str:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidGolden(name, "not the name of an attribute", "letters, digits and underscores")
    return name


def _object(value: object, what: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or len(value) > _MOST_PARTS:
        raise InvalidGolden(value, f"not {what}", "an object")
    return value
