"""Print the public names of a package with the API of ``kernels``, as JSON: ``python names.py PACKAGE``.

For each module: name to kind, signature (parameter, kind, default) and, of a class, its public members.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import sys
from typing import Any

# The modules whose names users import, and which of these names when it is not all that the module defines.
MODULES: dict[str, tuple[str, ...]] = {
    "": (),
    "backends": ("CANN", "CPU", "CUDA", "Metal", "Neuron", "ROCm", "TPU", "XPU", "parse_backend"),
    "benchmark": (),
    "deps": ("get_kernel_dep",),
    "hf_hub": (),
    "importer": (),
    "install": ("install_kernel",),
    "layer": (),
    "layer.device": (),
    "layer.func": ("FuncRepository", "LocalFuncRepository", "LockedFuncRepository", "use_kernel_func_from_hub"),
    "layer.kernelize": (),
    "layer.layer": (
        "KernelizeFallback",
        "LayerRepository",
        "LocalLayerRepository",
        "LockedLayerRepository",
        "replace_kernel_forward_from_hub",
        "use_kernel_forward_from_hub",
        "use_kernelized_func",
    ),
    "layer.mode": (),
    "load": ("get_kernel", "get_local_kernel", "get_locked_kernel", "has_kernel", "load_kernel"),
    "variants": ("VariantAccepted", "VariantRejected", "get_kernel_variants", "parse_variant"),
}


def main(package: str) -> None:
    found = {name: _names(importlib.import_module(f"{package}.{name}".rstrip(".")), MODULES[name]) for name in MODULES}
    json.dump(found, sys.stdout, indent=1, sort_keys=True)


def _names(module: Any, wanted: tuple[str, ...]) -> dict[str, Any]:
    listed = wanted or getattr(module, "__all__", None) or _defined(module)
    return {name: _described(getattr(module, name)) for name in listed if name != "__version__"}


def _defined(module: Any) -> list[str]:
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__ and callable(value)
    ]


def _described(value: Any) -> dict[str, Any]:
    if not inspect.isclass(value):
        return {"kind": "function", "signature": _signature(value)}
    if issubclass(value, enum.Enum):
        members = {name: member.value for name, member in value.__members__.items()}
        return {"kind": "enum", "values": members}
    return {"kind": "class", "signature": _signature(value), "members": _members(value)}


def _signature(value: Any) -> list[list[str]] | None:
    """Parameters as name, kind and default; None where there is nothing to read (a class written in Rust)."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except ValueError:
        return None
    return [[each.name, each.kind.name, _default(each.default)] for each in parameters]


def _default(default: Any) -> str:
    return "required" if default is inspect.Parameter.empty else repr(default)


def _members(cls: type) -> list[str]:
    """Public attributes of a class, fields included; without what huggingface_hub's ``strict`` adds to dataclasses."""
    annotated = [name for each in cls.__mro__ for name in vars(each).get("__annotations__", {})]
    return sorted({name for name in [*dir(cls), *annotated] if not name.startswith(("_", "validate"))})


if __name__ == "__main__":
    main(sys.argv[1])
