"""Liger's switches on one model: ``TrainingArguments(use_liger_kernel=True, liger_kernel_config={...})``."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from kernelhub import setting
from kernelhub.config import KernelConfig
from kernelhub.integrations.transformers import parts
from kernelhub.layers.discovery import discover
from kernelhub.liger import DEFAULT_SOURCE

if TYPE_CHECKING:
    from torch import nn

__all__ = ["_apply_liger_kernel_to_instance"]

_logger = logging.getLogger("kernelhub")


def _apply_liger_kernel_to_instance(model: nn.Module, **kwargs: Any) -> None:
    """Bind the kernels that the switches mean, as ``KernelConfig.from_liger`` reads them; Trainer calls this.

    They come from ``kernels-community/liger-kernels``, or from where ``KERNELHUB_LIGER_SOURCE`` says. A switch for
    layers that the model does not have is passed over with a note, so a model without any passes unchanged.

    Raises:
        InvalidConfig: an unknown switch, or two that exclude each other.
        KernelHubError: the kernels for a switch that is given as True cannot be loaded.
    """
    config = KernelConfig.from_liger(**kwargs, source=setting.liger_source() or DEFAULT_SOURCE)
    targets = discover(model, config.entries).targets
    fitting = {layer for layer, found in targets.items() if any(not target.misfit for target in found)}
    for entry in config.entries:
        if entry.layer not in fitting and not entry.is_optional:
            _logger.warning("%s has no layer for Liger's switch %s", type(model).__name__, entry.layer)
    parts.bind(
        model, {parts.LIGER: KernelConfig.of_entries(entry for entry in config.entries if entry.layer in fitting)}
    )
