"""Choosing: forwards that pick what runs, at each call, and only where there is something to pick.

A layer with one kernel for everything gets that kernel's forward itself. These small functions are put around it:

- ``by_mode``: where evaluation and training differ (``module.training`` is read, which torch.compile guards), or where
  a kernel must not be traced (torch.compile and torch.export see a constant there);
- ``when_whole``: in distributed runs, where a weight may be sharded (DTensor, or empty as ZeRO-3 leaves it);
- ``on_device_of_tensors``: where several CUDA devices are visible, as Triton launches on the current one.

Their cells hold the functions, so all modules with the same kernels share one function and one compiled graph.
"""

from __future__ import annotations

import functools
import os
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_compiling

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    Forward = Callable[..., Any]

_HEAD = "lm_head"
_PARAMETER = nn.Parameter
_TENSOR = torch.Tensor


def by_mode(inference: Forward, training: Forward, inference_compiled: Forward, training_compiled: Forward) -> Forward:
    """A forward that follows ``module.train()`` and ``eval()``, and whether torch.compile or torch.export traces it."""
    if (inference, training) == (inference_compiled, training_compiled):
        return _by_training(inference, training)
    compiled = _by_training(inference_compiled, training_compiled)
    if inference is training:
        return _by_compiling(training, compiled)

    @functools.wraps(training)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return compiled(self, *args, **kwargs)
        if self.training:
            return training(self, *args, **kwargs)
        return inference(self, *args, **kwargs)

    return forward


def _by_training(inference: Forward, training: Forward) -> Forward:
    if inference is training:
        return training

    @functools.wraps(training)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self.training:
            return training(self, *args, **kwargs)
        return inference(self, *args, **kwargs)

    return forward


def _by_compiling(eager: Forward, compiled: Forward) -> Forward:
    @functools.wraps(eager)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return compiled(self, *args, **kwargs)
        return eager(self, *args, **kwargs)

    return forward


def when_whole(kernel: Forward, own: Forward) -> Forward:
    """A forward that runs ``own`` while a tensor that the kernel would take is sharded or empty."""

    @functools.wraps(kernel)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        # Written out, as it runs at every call: most values are plain tensors, and most layers have no layers inside.
        for value in args:
            if type(value) is not _TENSOR and is_split(value):
                return own(self, *args, **kwargs)
        if kwargs and any(map(is_split, kwargs.values())):
            return own(self, *args, **kwargs)
        for weight in self._parameters.values():
            if weight is not None and is_split(weight):
                return own(self, *args, **kwargs)
        if self._modules and _has_split_head(self):
            return own(self, *args, **kwargs)
        return kernel(self, *args, **kwargs)

    return forward


def on_device_of_tensors(kernel: Forward) -> Forward:
    """A forward that makes the CUDA device of its tensors the current one."""

    @functools.wraps(kernel)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        device = None if is_compiling() else _cuda_device(self, args, kwargs)
        if device is None:
            return kernel(self, *args, **kwargs)
        with torch.cuda.device(device):
            return kernel(self, *args, **kwargs)

    return forward


def among_processes() -> bool:
    """Is this process one of several, among which weights may be shared out?"""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return True
    return os.environ.get("WORLD_SIZE", "1") not in ("", "1")


def has_split_weight(module: nn.Module) -> bool:
    """Is a weight sharded or empty already?"""
    for weight in module._parameters.values():
        if weight is not None and (type(weight) is not _PARAMETER or weight.numel() == 0) and is_split(weight):
            return True
    return False


def several_cuda_devices() -> bool:
    return torch.cuda.device_count() > 1


def is_split(value: object) -> bool:
    """Is this a tensor of which the process holds only a part?

    ZeRO-3 keeps a weight empty outside the call of its module; a DTensor computes by its own rules.
    """
    if type(value) is nn.Parameter:
        return value.numel() == 0
    return isinstance(value, torch.Tensor) and hasattr(value, "placements")


def _has_split_head(module: nn.Module) -> bool:
    head = module._modules.get(_HEAD)
    return head is not None and any(is_split(weight) for weight in head._parameters.values())


def _cuda_device(module: nn.Module, args: Iterable[object], kwargs: dict[str, object]) -> torch.device | None:
    """The device to launch on: that of the head for a language model spread over devices, else of the first tensor."""
    head = module._modules.get(_HEAD)
    tensors = (*(head._parameters.values() if head is not None else ()), *args, *kwargs.values())
    found = (value.device for value in tensors if isinstance(value, torch.Tensor))
    device = next(found, None)
    return device if device is not None and device.type == "cuda" else None
