"""Switch: kernelhub as the loader of transformers, on and off.

On, importlib finds a package ``kernels`` of ours (and ``liger_kernel``) where none is installed; what transformers
found out before is asked again; its model and config classes take our configs. Each step has its inverse on one
stack, which ``disable`` runs.
"""

from __future__ import annotations

import importlib
import logging
import sys
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kernelhub.integrations.finder import Finder, StandIn, installed
from kernelhub.integrations.transformers.devices import allow_cpu
from kernelhub.integrations.transformers.references import KERNELS

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

_STAND_INS = (
    StandIn("kernels", "kernelhub.integrations.kernels", "kernels", lambda: _release().kernels_version()),
    StandIn("liger_kernel", "kernelhub.integrations.liger_kernel", "liger-kernel", lambda: _release().LIGER_API),
)
_CONFIG = "transformers.utils.kernel_config"
_MODEL = "transformers.modeling_utils"

_logger = logging.getLogger("kernelhub")
_lock = threading.RLock()
_active: Switch | None = None


def enable(*, shadow: bool = False) -> None:
    """Let transformers load and bind its kernels through kernelhub, from now on, in this process.

    Call it before or after transformers is imported, as often as you like. Models that exist already can be switched
    with ``model.use_kernels = True``.

    Args:
        shadow: False leaves an installed ``kernels`` or ``liger-kernel`` in use, and says so; True hides them until
            ``disable``.

    Example:
        >>> from kernelhub.integrations.transformers import enable
        >>> enable()
        >>> from transformers import AutoModelForCausalLM
        >>> model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True)
    """
    global _active
    with _lock:
        if _active is not None and _active.shadow == shadow:
            return
        disable()
        _active = Switch(shadow)
        _active.turn_on()


def disable() -> None:
    """Undo ``enable`` exactly. Models that have kernels keep them; ``kernelhub.unkernelize`` restores those."""
    global _active
    with _lock:
        if _active is not None:
            _active.turn_off()
            _active = None


def is_enabled() -> bool:
    """Is transformers switched to kernelhub in this process?"""
    return _active is not None


class Switch:
    """What one ``enable`` changed."""

    def __init__(self, shadow: bool) -> None:
        self.shadow = shadow
        self._undo = ExitStack()
        self._stand_ins: list[StandIn] = []
        self._renewed = False

    def turn_on(self) -> None:
        with ExitStack() as undo:
            self._undo = undo
            undo.callback(self._settle)  # the last thing to happen
            self._stand_ins = [each for each in _STAND_INS if self._wanted(each)]
            for stand_in in self._stand_ins:
                self._set_aside(stand_in.name)
            finder = Finder(self._stand_ins, self._adapted())
            sys.meta_path.insert(0, finder)
            undo.callback(sys.meta_path.remove, finder)
            self._tell_loaded_modules()
            self._undo = undo.pop_all()  # nothing failed: keep it all

    def turn_off(self) -> None:
        self._undo.close()

    def _wanted(self, stand_in: StandIn) -> bool:
        found = installed(stand_in.name)
        if found is None or self.shadow:
            return True
        _logger.info("%s stays in use as %s; enable(shadow=True) replaces it", found, stand_in.name)
        return False

    def _set_aside(self, name: str) -> None:
        """Take the loaded modules of a package away until the end, when ours are thrown away."""
        aside = {key: sys.modules.pop(key) for key in _modules_of(name)}

        def put_back() -> None:
            for key in _modules_of(name):
                del sys.modules[key]
            sys.modules.update(aside)

        self._undo.callback(put_back)

    def _tell_loaded_modules(self) -> None:
        """Bring what was imported of transformers before up to date."""
        if "transformers" not in sys.modules:
            return
        _refresh().ask_again()
        if self._provides("kernels"):
            self._renewed = KERNELS in sys.modules
            _refresh().renew(self._undo)
        for name, adapt in self._adapted().items():
            if name in sys.modules:
                adapt(sys.modules[name])

    def _settle(self) -> None:
        """Bring transformers up to date once nothing of ours is there any more."""
        if "transformers" in sys.modules:
            _refresh().ask_again()
            if self._provides("kernels") and not self._renewed:
                _refresh().run_again()

    def _provides(self, name: str) -> bool:
        return any(each.name == name for each in self._stand_ins)

    def _adapted(self) -> dict[str, Callable[[ModuleType], None]]:
        """What to do in a module of transformers right after it was imported."""
        return {_CONFIG: lambda module: allow_cpu(module, self._undo), _MODEL: self._adapt_model}

    def _adapt_model(self, module: ModuleType) -> None:
        # By name: it needs torch, which is there now.
        adapter = importlib.import_module("kernelhub.integrations.transformers.adapter")
        adapter.adapt_model(module, self._undo, alone=self._provides("kernels"))


def _modules_of(name: str) -> list[str]:
    return [key for key in sys.modules if f"{key}.".startswith(f"{name}.")]


def _release() -> ModuleType:
    # By name: most processes never ask for a version.
    return importlib.import_module("kernelhub.integrations.transformers.release")


def _refresh() -> ModuleType:
    # By name: it imports transformers, which is left to those who use it.
    return importlib.import_module("kernelhub.integrations.transformers.refresh")
