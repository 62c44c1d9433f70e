"""The layers' side of this package: their repositories, their marks, and when they may stay as they are."""

from kernelhub.integrations.kernels.layer.fallback import KernelizeFallback
from kernelhub.integrations.kernels.layer.mark import (
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernelized_func,
)
from kernelhub.integrations.kernels.layer.repository import (
    LayerRepository,
    LocalLayerRepository,
    LockedLayerRepository,
)

__all__ = [
    "KernelizeFallback",
    "LayerRepository",
    "LocalLayerRepository",
    "LockedLayerRepository",
    "replace_kernel_forward_from_hub",
    "use_kernel_forward_from_hub",
    "use_kernelized_func",
]
