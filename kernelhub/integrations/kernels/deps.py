"""Dependency of a kernel, asked for outside of any kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelhub.errors import KernelDependencyError

if TYPE_CHECKING:
    from types import ModuleType


def get_kernel_dep(repo_id: str) -> ModuleType:
    """The dependency of the kernel that is being loaded: kernels get their own function of this name (companion.py).

    Raises:
        KernelDependencyError: always, as it was not called by a kernel.
    """
    raise KernelDependencyError("get_kernel_dep is there for kernels, which get it while they load", (str(repo_id),))
