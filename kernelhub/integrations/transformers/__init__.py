"""transformers with kernels from kernelhub: its own switches, Trainer and Liger's options, on our engine.

``enable()`` once, before or after transformers is imported, or ``python -m kernelhub run script.py``; ``disable()``
takes everything back. Importing this package imports neither transformers nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from kernelhub.integrations.transformers.switch import disable, enable, is_enabled

if TYPE_CHECKING:
    from kernelhub.integrations.transformers.callback import KernelTrainerCallback
    from kernelhub.integrations.transformers.conversion import from_transformers, to_transformers
    from kernelhub.integrations.transformers.model_folder import load_config, save_config

__all__ = [
    "KernelTrainerCallback",
    "disable",
    "enable",
    "from_transformers",
    "is_enabled",
    "load_config",
    "save_config",
    "to_transformers",
]

_HOMES = {
    "KernelTrainerCallback": "callback",
    "from_transformers": "conversion",
    "load_config": "model_folder",
    "save_config": "model_folder",
    "to_transformers": "conversion",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
