"""Layer names and module paths: how the key of a config entry is compared with a model."""

from __future__ import annotations

from fnmatch import fnmatchcase
from itertools import takewhile
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

# Classes of activations whose layer name (transformers' own) is not the end of the class name.
_CLASS_NAMES = {
    "SiLU": ("SiLUActivation",),
    "GeLU": ("GELU", "GELUActivation"),
    "GeluTanh": ("GELUTanh", "PytorchGELUTanh"),
    "NewGELU": ("NewGELUActivation",),
    "QuickGELU": ("QuickGELUActivation",),
    "FastGELU": ("FastGELUActivation",),
}


def names_class(key: str, class_name: str) -> bool:
    """Does ``key`` name the class: is it the class name, or its end from a word border on?

    ``RMSNorm`` names ``RMSNorm``, ``Qwen3RMSNorm`` and ``LlamaRMSNorm``; not ``RMSNormGated``, not ``XRMSNorm``.
    """
    if class_name == key or class_name in _CLASS_NAMES.get(key, ()):
        return True
    return class_name.endswith(key) and is_border(class_name, len(class_name) - len(key))


def is_border(name: str, index: int) -> bool:
    """Does a new word start at ``index``: a capital after another kind of letter, or before a small one?"""
    if not 0 < index < len(name) or not name[index].isupper():
        return False
    return not name[index - 1].isupper() or name[index + 1 : index + 2].islower()


def matches_path(pattern: str, path: str) -> bool:
    """Does a path pattern match? ``*`` stands inside one segment, ``**`` for any number of segments.

    ``model.layers.*.mlp`` matches ``model.layers.0.mlp``; ``**.mlp`` matches it too.
    """
    return _matches(pattern.split("."), path.split(".") if path else [])


def _matches(pattern: Sequence[str], path: Sequence[str]) -> bool:
    if not pattern:
        return not path
    if pattern[0] == "**":
        return _matches(pattern[1:], path) or (bool(path) and _matches(pattern, path[1:]))
    return bool(path) and fnmatchcase(path[0], pattern[0]) and _matches(pattern[1:], path[1:])


def short_names(classes: Iterable[type]) -> tuple[str, ...]:
    """Class names without the prefix that the classes of one source file share (``Qwen3`` of ``Qwen3MLP``)."""
    distinct = tuple(dict.fromkeys(classes))
    files: dict[str, list[str]] = {}
    for cls in distinct:
        files.setdefault(cls.__module__, []).append(cls.__name__)
    prefixes = {file: _shared_prefix(names) for file, names in files.items()}
    return tuple(dict.fromkeys(cls.__name__.removeprefix(prefixes[cls.__module__]) for cls in distinct))


def _shared_prefix(names: Sequence[str]) -> str:
    if len(names) < 2:
        return ""
    first, last = min(names), max(names)
    alike = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False)))
    lengths = range(alike, 0, -1)
    return first[: next((size for size in lengths if all(is_border(name, size) for name in names)), 0)]
