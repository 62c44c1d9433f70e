"""kernelhub: a mapping string becomes a faster layer in a live torch model, and every decision can be explained.

Importing this package imports neither torch nor transformers nor huggingface_hub; the names below are loaded when
they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kernelhub.api import (
        check,
        explain,
        kernelize,
        kernelized,
        load_kernel,
        plan,
        report,
        tune,
        unkernelize,
        versions,
    )
    from kernelhub.config import KernelConfig
    from kernelhub.environment import Environment
    from kernelhub.errors import KernelHubError
    from kernelhub.layers.marker import use_kernel
    from kernelhub.loader import loaded_kernels
    from kernelhub.mode import Mode
    from kernelhub.request import KernelRequest
    from kernelhub.session import Session

__version__ = "0.1.0"

__all__ = [
    "Environment",
    "KernelConfig",
    "KernelHubError",
    "KernelRequest",
    "Mode",
    "Session",
    "__version__",
    "check",
    "explain",
    "kernelize",
    "kernelized",
    "load_kernel",
    "loaded_kernels",
    "plan",
    "report",
    "tune",
    "unkernelize",
    "use_kernel",
    "versions",
]

_HOMES = {
    "Environment": "environment",
    "KernelConfig": "config",
    "KernelHubError": "errors",
    "KernelRequest": "request",
    "Mode": "mode",
    "Session": "session",
    "check": "api",
    "explain": "api",
    "kernelize": "api",
    "kernelized": "api",
    "load_kernel": "api",
    "loaded_kernels": "loader",
    "plan": "api",
    "report": "api",
    "tune": "api",
    "unkernelize": "api",
    "use_kernel": "layers.marker",
    "versions": "api",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kernelhub' has no attribute {name!r}")
    return getattr(importlib.import_module(f"kernelhub.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
