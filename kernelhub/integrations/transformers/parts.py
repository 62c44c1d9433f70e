"""Parts: the configs that together say which kernels a model has, by where they come from.

A model may get kernels from its switch (``use_kernels``), from the defaults of transformers, and from Liger's
switches. All of them are bound together, so that none takes the others away.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import kernelhub
from kernelhub.config import KernelConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from kernelhub.config import LayerEntry
    from kernelhub.mode import Mode

SWITCH = "use_kernels"
LIGER = "liger"
DEFAULTS = "defaults"
_PRECEDENCE = (SWITCH, LIGER, DEFAULTS)  # for layers that several of them name


@dataclass
class Parts:
    """The configs of one model, for which mode (None: each call finds its own) and devices they were bound."""

    configs: dict[str, KernelConfig]
    mode: Mode | None
    devices: frozenset[torch.device]

    @property
    def whole(self) -> KernelConfig:
        """All of them as one config."""
        found: dict[str, LayerEntry] = {}
        for name in _PRECEDENCE:
            for entry in self.configs[name].entries if name in self.configs else ():
                found.setdefault(entry.layer, entry)
        return KernelConfig.of_entries(found.values())


# Models do not carry this themselves: it must not be pickled or copied with them.
_parts: WeakKeyDictionary[nn.Module, Parts] = WeakKeyDictionary()


def parts_of(model: nn.Module) -> dict[str, KernelConfig]:
    """The configs that the kernels of a model come from."""
    return dict(_parts[model].configs) if model in _parts else {}


def is_current(model: nn.Module) -> bool:
    """Would binding the model again bring nothing new? Its kernels follow its mode; its devices may have changed."""
    parts = _parts.get(model)
    return parts is not None and parts.mode is None and parts.devices == _devices(model)


def bind(model: nn.Module, configs: dict[str, KernelConfig], mode: Mode | None = None) -> None:
    """Bind these parts and those that the model has already. Raises what ``kernelhub.kernelize`` does."""
    parts = Parts({**parts_of(model), **configs}, mode, _devices(model))
    kernelhub.kernelize(model, parts.whole, mode)
    _parts[model] = parts


def unbind(model: nn.Module, *names: str) -> None:
    """Take parts away; without any left the model is as it was."""
    left = {name: config for name, config in parts_of(model).items() if name not in names}
    with suppress(KeyError):
        del _parts[model]
    if any(left.values()):
        bind(model, left)
    else:
        kernelhub.unkernelize(model)


def _devices(model: nn.Module) -> frozenset[torch.device]:
    return frozenset(parameter.device for parameter in model.parameters())
