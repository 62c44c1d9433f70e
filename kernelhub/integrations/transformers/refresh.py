"""Refresh: transformers asks again what it asked when it was imported, and its names lead to the new answers."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from transformers import utils

from kernelhub.integrations.transformers import marks
from kernelhub.integrations.transformers.references import KERNELS, exchange

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import ModuleType

    from kernelhub.integrations.transformers.references import Namespace

# The public questions whose cached answer may change.
_QUESTIONS = (
    "is_kernels_available",
    "is_liger_kernel_available",
    "is_flash_attn_2_available",
    "is_flash_attn_3_available",
)


def ask_again() -> None:
    """Forget whether `kernels` and `liger-kernel` are there."""
    for name in _QUESTIONS:
        question: Any = getattr(utils, name, None)
        if hasattr(question, "cache_clear"):
            question.cache_clear()


def renew(undo: ExitStack) -> None:
    """Import `kernels` anew, and mark the layers of models that were imported while there was none."""
    module = sys.modules.get(KERNELS)
    if module is None:
        return
    before = dict(vars(module))
    run_again()
    undo.callback(_put_back, module, before)
    if "Mode" not in before:  # a name that comes from `kernels`, in every release
        marks.apply(undo)


def run_again() -> None:
    """Run the module that imports `kernels` once more, in place, and let everybody hold its new functions."""
    module = sys.modules.get(KERNELS)
    if module is None:
        return
    before = dict(vars(module))
    kept = {name: value for name, value in before.items() if name.startswith("__")}
    _refill(module, kept)
    try:
        importlib.reload(module)
    except BaseException:
        _refill(module, before)
        raise
    exchange(before, vars(module))


def _put_back(module: ModuleType, before: Namespace) -> None:
    now = dict(vars(module))
    _refill(module, before)
    exchange(now, before)


def _refill(module: ModuleType, names: Namespace) -> None:
    vars(module).clear()
    vars(module).update(names)
