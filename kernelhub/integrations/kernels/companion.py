"""What a kernel gets when it imports ``kernels``: the names of that package, answered for this one kernel.

Builds on the Hub are made with the package ``kernels`` in mind and import from it. ``get_kernel_dep`` and the loading
functions hand out the dependencies that were resolved, verified and loaded with the kernel, and nothing else (S-32);
values and marks are those that everybody gets; every other public name can be imported, and says what it is when it
is used.
The module is made for each kernel anew and never put into ``sys.modules``.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn

from kernelhub.integrations.kernels.benchmark import Benchmark
from kernelhub.integrations.kernels.hf_hub import RepoInfo
from kernelhub.integrations.kernels.importer import LoadedKernel
from kernelhub.integrations.kernels.layer.device import CUDAProperties, Device, ROCMProperties
from kernelhub.integrations.kernels.layer.fallback import KernelizeFallback
from kernelhub.integrations.kernels.layer.mark import (
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernelized_func,
)
from kernelhub.integrations.kernels.layer.mode import Mode
from kernelhub.integrations.kernels.metadata import Metadata
from kernelhub.integrations.kernels.release import API_VERSION
from kernelhub.integrations.kernels.variants import VariantAccepted, VariantRejected

if TYPE_CHECKING:
    from collections.abc import Callable

_SUBMODULES = ("benchmark", "deps", "layer", "load")
# Values that mean the same wherever they are made, and marks, which record a name and do nothing else.
_SHARED = (
    Benchmark,
    CUDAProperties,
    Device,
    KernelizeFallback,
    LoadedKernel,
    Metadata,
    Mode,
    ROCMProperties,
    RepoInfo,
    VariantAccepted,
    VariantRejected,
    replace_kernel_forward_from_hub,
    use_kernel_forward_from_hub,
    use_kernelized_func,
)
_NOT_OFFERED = (
    "FuncRepository",
    "LayerRepository",
    "LocalFuncRepository",
    "LocalLayerRepository",
    "LockedFuncRepository",
    "LockedLayerRepository",
    "get_kernel_variants",
    "get_loaded_kernels",
    "install_kernel",
    "kernelize",
    "register_kernel_mapping",
    "use_kernel_mapping",
)


def companion(kernel: str, dependency: Callable[[str], ModuleType], declares: Callable[[str], bool]) -> ModuleType:
    """The module ``kernels`` for one kernel.

    Args:
        kernel: its name, for messages.
        dependency: the loaded dependency of a repository name; it refuses what the kernel does not declare.
        declares: does the kernel declare that repository?
    """
    module = ModuleType("kernels", f"The public names of the package `kernels`, for kernel {kernel}.")

    def get_kernel_dep(repo_id: str) -> ModuleType:
        """The dependency that this kernel declares in its metadata."""
        return dependency(repo_id)

    def get_kernel(repo_id: str, *_: Any, **__: Any) -> ModuleType:
        """As ``get_kernel_dep``: the version is the one that the metadata declares."""
        return dependency(repo_id)

    def has_kernel(repo_id: str, *_: Any, **__: Any) -> bool:
        """Does this kernel declare that dependency?"""
        return declares(repo_id)

    offered: dict[str, Any] = {
        **{shared.__name__: shared for shared in _SHARED},
        "__version__": API_VERSION,
        "get_kernel": get_kernel,
        "get_kernel_dep": get_kernel_dep,
        "get_local_kernel": get_kernel,
        "get_locked_kernel": get_kernel,
        "has_kernel": has_kernel,
        "load_kernel": get_kernel,
        "use_kernel_func_from_hub": _unchanged,
    }
    names = {**{name: _not_offered(name, kernel) for name in _NOT_OFFERED}, **offered}
    vars(module).update(names, **dict.fromkeys(_SUBMODULES, module), __all__=sorted(names), __path__=[])
    return module


def _unchanged(name: str) -> Callable[[Any], Any]:
    """A mark on a function: it stays as it is."""
    return lambda function: function


def _not_offered(name: str, kernel: str) -> type:
    """A stand-in that can be imported and mentioned, and refuses to be used."""

    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(f"kernel {kernel} uses kernels.{name}, which a kernel that is being loaded does not get")

    return type(name, (), {"__init__": refuse, "__module__": "kernels", "__doc__": refuse.__doc__})
