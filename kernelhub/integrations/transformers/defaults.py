"""Defaults: what transformers and its user have registered with `kernels` for the marked layers of a model."""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Any

from kernelhub.config import KernelConfig
from kernelhub.integrations.kernels.layer.choice import marked_layers
from kernelhub.integrations.kernels.layer.mapping import current_mapping
from kernelhub.integrations.transformers.conversion import written
from kernelhub.integrations.transformers.references import KERNELS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import nn

    from kernelhub.capability import DeviceRange

_logger = logging.getLogger("kernelhub")


def defaults_of(model: nn.Module) -> KernelConfig:
    """The registered kernels for the layers that transformers itself marks; none of them has to fit."""
    importlib.import_module(KERNELS).register_kernel_mapping_transformers()
    mapping = current_mapping()
    found = {layer: _per_device(mapping.find(layer) or {}) for layer in marked_layers(model)}
    return KernelConfig({layer: devices for layer, devices in found.items() if devices})


def _per_device(devices: Mapping[DeviceRange, Mapping[Any, Any]]) -> dict[str, dict[str, Any]]:
    found = {str(device): _per_mode(modes) for device, modes in devices.items()}
    return {device: modes for device, modes in found.items() if modes}


def _per_mode(modes: Mapping[Any, Any]) -> dict[str, Any]:
    found = {}
    for mode, repository in modes.items():
        value = written(repository)
        if isinstance(value, tuple):
            found[mode.served.value] = (value[0], {**value[1], "optional": True})
        else:
            _logger.info("%s is registered, but only kernelize of `kernels` can bind it", repository)
    return found
