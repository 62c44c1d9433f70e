"""Nest: the tensors inside nested arguments and results, by name; everything else passes through untouched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_PLAIN = (bool, int, float, str)


def tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor in tuples, lists and mappings, by its place: ``[0]``, ``hidden_states``, ``[1].cos``."""
    if isinstance(value, torch.Tensor):
        return {name or "output": value}
    found: dict[str, torch.Tensor] = {}
    for key, item in _items(value):
        found.update(tensors(item, f"{name}.{key}" if name and not key.startswith("[") else f"{name}{key}"))
    return found


def settings(value: Any, name: str = "") -> dict[str, Any]:
    """Every plain value beside the tensors, by its place."""
    if isinstance(value, _PLAIN):
        return {name: value}
    found: dict[str, Any] = {}
    for key, item in _items(value):
        found.update(settings(item, f"{name}.{key}"))
    return found


def replaced(value: Any, change: Callable[[str, torch.Tensor], Any], name: str = "") -> Any:
    """The same structure with ``change(place, tensor)`` in the place of each tensor."""
    if isinstance(value, torch.Tensor):
        return change(name or "output", value)
    items = {
        key: replaced(item, change, f"{name}.{key}" if name and not key.startswith("[") else f"{name}{key}")
        for key, item in _items(value)
    }
    if not items:
        return value
    if isinstance(value, Mapping):
        return type(value)(**items) if type(value) is not dict else items
    if hasattr(value, "_fields"):
        return type(value)(*items.values())
    return type(value)(items.values())


def _items(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, Mapping):
        return list(value.items()) if all(isinstance(key, str) for key in value) else []
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return [(f"[{index}]", item) for index, item in enumerate(value)]
    return []
