"""Device: where a layer is, for which its kernel is chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from kernelhub.backend import Release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import nn

NO_WEIGHTS = "on the meta device: it has no weights yet"


def capability_of(device: torch.device) -> Release | None:
    """The compute capability of a CUDA device."""
    if device.type != "cuda":
        return None
    return Release(*torch.cuda.get_device_capability(device))


def first_device(model: nn.Module) -> torch.device:
    """The device of the first tensor of a model; the CPU for one without tensors."""
    return next(_devices([model]), torch.device("cpu"))


def device_of(modules: Sequence[nn.Module], fallback: torch.device) -> torch.device | str:
    """The device of modules, or the reason why they have none to choose a kernel for."""
    devices = {device.type: device for device in _devices(modules)} or {fallback.type: fallback}
    if "meta" in devices:
        return NO_WEIGHTS
    if len(devices) > 1:
        return f"its parameters are on several kinds of device ({', '.join(devices)})"
    return next(iter(devices.values()))


def device_of_leaf(module: nn.Module) -> torch.device | None:
    """The device of a layer without layers inside whose parameters share one; None where it takes a closer look."""
    state = module.__dict__
    if state["_modules"]:
        return None
    found = None
    for parameter in state["_parameters"].values():
        if parameter is not None:
            device = parameter.device
            if found is None:
                found = device
            elif found != device:
                return None
    return found


def _devices(modules: Sequence[nn.Module]) -> Iterator[torch.device]:
    parameters = (parameter.device for module in modules for parameter in module.parameters())
    first = next(parameters, None)
    if first is None:
        yield from (buffer.device for module in modules for buffer in module.buffers())
    else:
        yield first
        yield from parameters
