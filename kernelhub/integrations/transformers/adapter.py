"""Adapter: the public methods of transformers' models, so that kernelhub serves their switches.

``from_pretrained`` and ``set_use_kernels`` take configs of either kind, ``use_kernels = False`` restores a model,
``save_pretrained`` writes the config beside the weights. Each replaced method is put back by the stack that is given.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

from kernelhub import setting
from kernelhub.config import KernelConfig
from kernelhub.integrations.transformers import model_folder, parts
from kernelhub.integrations.transformers.carried import CarriedConfig
from kernelhub.integrations.transformers.conversion import from_transformers, with_trust
from kernelhub.integrations.transformers.defaults import defaults_of
from kernelhub.mode import Mode

if TYPE_CHECKING:
    from contextlib import ExitStack
    from types import ModuleType

_logger = logging.getLogger("kernelhub")


def adapt_model(module: ModuleType, undo: ExitStack, *, alone: bool) -> None:
    """Replace the methods of ``PreTrainedModel`` that have to do with kernels.

    Unless we are ``alone``, another `kernels` is in use, and serves what is not a config of ours.
    """
    cls = module.PreTrainedModel
    methods = Methods(cls, alone)
    for name in ("from_pretrained", "save_pretrained", "set_use_kernels", "use_kernels"):
        undo.callback(setattr, cls, name, vars(cls)[name])
        setattr(cls, name, getattr(methods, name)())


class Methods:
    """Makes the new methods of a model class; ``cls`` still has the original ones."""

    def __init__(self, cls: Any, alone: bool) -> None:
        self._original = dict(vars(cls))
        self._alone = alone

    def from_pretrained(self) -> Any:
        original = self._original["from_pretrained"].__func__

        @functools.wraps(original)
        def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("use_kernels") or kwargs.get("kernel_config") is not None:
                kwargs = self._with_carried(pretrained_model_name_or_path, kwargs)
            return original(cls, pretrained_model_name_or_path, *args, **kwargs)

        return classmethod(from_pretrained)

    def save_pretrained(self) -> Any:
        original = self._original["save_pretrained"]

        @functools.wraps(original)
        def save_pretrained(model: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(model, save_directory, *args, **kwargs)
            config = parts.parts_of(model).get(parts.SWITCH)
            if config and (args[0] if args else kwargs.get("is_main_process", True)):
                model_folder.save_config(config, save_directory)
            return result

        return save_pretrained

    def set_use_kernels(self) -> Any:
        original = self._original["set_use_kernels"]

        @functools.wraps(original)
        def set_use_kernels(model: Any, use_kernels: Any, kernel_config: Any = None, mode: Any = None) -> None:
            if not use_kernels or _switched_off():
                original(model, False)
                if _has_switch(model):
                    parts.unbind(model, parts.SWITCH, parts.DEFAULTS)
            elif self._serves(model, kernel_config):
                self._switch_on(model, kernel_config, mode)
            else:
                original(model, use_kernels, kernel_config, mode)

        return set_use_kernels

    def use_kernels(self) -> Any:
        original: Any = self._original["use_kernels"]

        def value(model: Any) -> bool:
            return _has_switch(model) or bool(original.fget(model))

        def change(model: Any, wanted: bool) -> None:
            if not wanted:
                parts.unbind(model, parts.SWITCH, parts.DEFAULTS)  # also a copy, which has kernels and no switch
            if not (wanted and value(model)):
                model.set_use_kernels(wanted)

        return property(
            value, change, doc="Are there kernels of this switch? True binds them, False restores the model."
        )

    def _serves(self, model: Any, config: Any) -> bool:
        return (
            self._alone or isinstance(config, (KernelConfig, CarriedConfig)) or (config is None and _has_switch(model))
        )

    def _switch_on(self, model: Any, given: Any, mode: Any) -> None:
        if given is None and mode is None and _has_switch(model) and parts.is_current(model):
            return
        if given is not None:
            model.kernel_config = given if isinstance(given, CarriedConfig) else CarriedConfig(_as_ours(given))
        config = model.kernel_config.unpack() if isinstance(model.kernel_config, CarriedConfig) else KernelConfig()
        inherits = self._alone and config.inherit_mapping and not config.use_local_kernel
        found = {parts.SWITCH: config, parts.DEFAULTS: defaults_of(model) if inherits else KernelConfig()}
        parts.bind(model, found, None if mode is None else _mode(mode))

    def _with_carried(self, name: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with a config that we recognise, or without any if kernels are switched off."""
        config = kwargs.get("kernel_config")
        if _switched_off():
            return {key: value for key, value in kwargs.items() if key not in ("use_kernels", "kernel_config")}
        if not self._alone and not isinstance(config, KernelConfig):
            return kwargs
        wanted = model_folder.found_in(name) if config is None else _as_ours(config)
        if wanted is not None and config is not None and kwargs.get("allow_all_kernels"):
            wanted = with_trust(wanted, True)
        carried = None if wanted is None else CarriedConfig(wanted)
        return {**kwargs, "use_kernels": True, "kernel_config": carried}


def _has_switch(model: Any) -> bool:
    return parts.SWITCH in parts.parts_of(model)


def _mode(flags: Any) -> Mode:
    """Our mode for one of `kernels`, be it ours or another."""
    return Mode.of(training="TRAINING" in str(flags), compile="TORCH_COMPILE" in str(flags))


def _as_ours(config: Any) -> KernelConfig:
    if isinstance(config, KernelConfig):
        return config
    return config.config if isinstance(config, CarriedConfig) else from_transformers(config)


def _switched_off() -> bool:
    variable = setting.kernels_switched_off()
    if variable is not None:
        _logger.warning("no kernels are bound: the variable %s switches them off", variable)
    return variable is not None
