"""Layers: marks, mappings, repositories, and ``kernelize``."""

from kernelhub.integrations.kernels.layer.device import CUDAProperties, Device, ROCMProperties
from kernelhub.integrations.kernels.layer.func import (
    FuncRepository,
    LocalFuncRepository,
    LockedFuncRepository,
    use_kernel_func_from_hub,
)
from kernelhub.integrations.kernels.layer.kernelize import kernelize, register_kernel_mapping, use_kernel_mapping
from kernelhub.integrations.kernels.layer.layer import (
    KernelizeFallback,
    LayerRepository,
    LocalLayerRepository,
    LockedLayerRepository,
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernelized_func,
)
from kernelhub.integrations.kernels.layer.mode import Mode

__all__ = [
    "CUDAProperties",
    "Device",
    "FuncRepository",
    "KernelizeFallback",
    "LayerRepository",
    "LocalFuncRepository",
    "LocalLayerRepository",
    "LockedFuncRepository",
    "LockedLayerRepository",
    "Mode",
    "ROCMProperties",
    "kernelize",
    "register_kernel_mapping",
    "replace_kernel_forward_from_hub",
    "use_kernel_forward_from_hub",
    "use_kernel_func_from_hub",
    "use_kernel_mapping",
    "use_kernelized_func",
]
