"""KernelChoice and LayerEntry: what a config says about one kernel, and about one layer name, path or fusion."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kernelhub.capability import device_range

if TYPE_CHECKING:
    from kernelhub.backend import Release
    from kernelhub.fusion import Fusion
    from kernelhub.mode import Mode
    from kernelhub.request import KernelRequest

ANY_DEVICE = ""

_LAYER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)


def is_layer_name(key: str) -> bool:
    """Is a key a layer name (``RMSNorm``), which has neither dots nor stars?"""
    return _LAYER_NAME.fullmatch(key) is not None


@dataclass(frozen=True)
class KernelChoice:
    """One mapped kernel and the options given with it; ``request.symbol`` is always set.

    ``attributes`` are pairs: an attribute's name in the kernel, and its name in the layers of the model. ``others`` are
    further candidates for the same layers, in order.
    """

    request: KernelRequest
    trust_remote_code: bool | tuple[str, ...] = False
    attributes: tuple[tuple[str, str], ...] = ()
    optional: bool = False
    others: tuple[KernelChoice, ...] = ()

    @property
    def candidates(self) -> tuple[KernelChoice, ...]:
        """The choice by itself, and each of the others."""
        return (replace(self, others=()), *self.others)

    def __str__(self) -> str:
        return str(self.request)


@dataclass(frozen=True)
class LayerEntry:
    """The choices for one layer name, module path pattern or fusion; ``layer`` is the key as text.

    ``choices`` maps (device key or ``ANY_DEVICE``, mode) to a choice; None means "leave this layer alone". A device key
    is the text of a ``DeviceRange``.
    """

    layer: str
    choices: tuple[tuple[tuple[str, Mode], KernelChoice | None], ...]
    fusion: Fusion | None = None

    @property
    def is_path(self) -> bool:
        """Does the key name modules by their paths (``model.layers.*.mlp``, or a fusion) rather than a layer name?"""
        return not is_layer_name(self.layer)

    @property
    def is_optional(self) -> bool:
        """May a model have no such layer?"""
        given = [choice for _, choice in self.choices if choice is not None]
        return bool(given) and all(choice.optional for choice in given)

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device for (device, _), _ in self.choices))

    @property
    def has_ranges(self) -> bool:
        return any(device and device_range(device).is_range for device in self.devices)

    def candidate(self, index: int) -> LayerEntry | None:
        """The entry with the candidate of that index in each of its cases; None when no case has so many."""
        cases = [
            (key, choice if choice is None else choice.candidates[min(index, len(choice.others))])
            for key, choice in self.choices
        ]
        known = index == 0 or any(choice is not None and len(choice.others) >= index for _, choice in self.choices)
        return replace(self, choices=tuple(cases)) if known else None

    def devices_for(self, backend: str, capability: Release | None = None) -> tuple[str, ...]:
        """The device keys that hold a device, the narrowest first."""
        if self.devices == (ANY_DEVICE,):
            return self.devices
        holding = (device for device in self.devices if device_range(device).holds(backend, capability))
        return tuple(sorted(holding, key=lambda device: device_range(device).width))

    def find(
        self, backend: str, mode: Mode, capability: Release | None = None
    ) -> tuple[KernelChoice | None] | tuple[()]:
        """The choice for a device in a mode, in a tuple; empty when the entry has none."""
        table = dict(self.choices)
        for device in self.devices_for(backend, capability):
            for step in mode.lookup:
                if (device, step) in table:
                    return (table[device, step],)
        return ()

    def choose(self, backend: str, mode: Mode, capability: Release | None = None) -> KernelChoice | None:
        """The kernel for a layer on ``backend`` in ``mode``; None leaves the layer alone."""
        return next(iter(self.find(backend, mode, capability)), None)
