"""The functions' side of this package: their repositories and their older mark."""

from kernelhub.integrations.kernels.layer.mark import use_kernel_func_from_hub
from kernelhub.integrations.kernels.layer.repository import FuncRepository, LocalFuncRepository, LockedFuncRepository

__all__ = ["FuncRepository", "LocalFuncRepository", "LockedFuncRepository", "use_kernel_func_from_hub"]
