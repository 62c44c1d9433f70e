"""The public API of the package ``kernels`` on kernelhub's parts: same names, arguments and results.

``docs/migrating.md`` shows the calls side by side, ``docs/differences.md`` says where kernelhub decides otherwise on
purpose. Submodules are called as there (``layer``, ``load``, ...). Every error is a ``KernelHubError``, and of the
built-in class that the callers of that package catch: ValueError, FileNotFoundError, ImportError.
"""

from kernelhub.integrations.kernels.benchmark import Benchmark
from kernelhub.integrations.kernels.deps import get_kernel_dep
from kernelhub.integrations.kernels.hf_hub import RepoInfo
from kernelhub.integrations.kernels.importer import LoadedKernel, get_loaded_kernels
from kernelhub.integrations.kernels.install import install_kernel
from kernelhub.integrations.kernels.layer import (
    CUDAProperties,
    Device,
    FuncRepository,
    KernelizeFallback,
    LayerRepository,
    LocalFuncRepository,
    LocalLayerRepository,
    LockedFuncRepository,
    LockedLayerRepository,
    Mode,
    ROCMProperties,
    kernelize,
    register_kernel_mapping,
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernel_func_from_hub,
    use_kernel_mapping,
    use_kernelized_func,
)
from kernelhub.integrations.kernels.load import (
    get_kernel,
    get_local_kernel,
    get_locked_kernel,
    has_kernel,
    load_kernel,
)
from kernelhub.integrations.kernels.metadata import Metadata
from kernelhub.integrations.kernels.release import API_VERSION
from kernelhub.integrations.kernels.variants import VariantAccepted, VariantRejected, get_kernel_variants

__version__ = API_VERSION

__all__ = [
    "Benchmark",
    "CUDAProperties",
    "Device",
    "FuncRepository",
    "KernelizeFallback",
    "LayerRepository",
    "LoadedKernel",
    "LocalFuncRepository",
    "LocalLayerRepository",
    "LockedFuncRepository",
    "LockedLayerRepository",
    "Metadata",
    "Mode",
    "ROCMProperties",
    "RepoInfo",
    "VariantAccepted",
    "VariantRejected",
    "__version__",
    "get_kernel",
    "get_kernel_dep",
    "get_kernel_variants",
    "get_loaded_kernels",
    "get_local_kernel",
    "get_locked_kernel",
    "has_kernel",
    "install_kernel",
    "kernelize",
    "load_kernel",
    "register_kernel_mapping",
    "replace_kernel_forward_from_hub",
    "use_kernel_forward_from_hub",
    "use_kernel_func_from_hub",
    "use_kernel_mapping",
    "use_kernelized_func",
]
