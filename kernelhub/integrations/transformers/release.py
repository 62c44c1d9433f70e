"""Release: the version that a stand-in has to tell, so that the installed transformers accepts it."""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING

from packaging.requirements import Requirement
from packaging.version import Version

if TYPE_CHECKING:
    from packaging.specifiers import SpecifierSet

KERNELS_API = "0.17.2"
"""The version of `kernels` whose interface is provided."""

LIGER_API = "0.8.5"
"""The version of `liger-kernel` whose switches are provided; Trainer asks for 0.3.0 or newer."""

_LOWER_BOUNDS = (">=", "==", "~=")


def kernels_version() -> str:
    """Our interface's own version if transformers' requirement allows it, else the lowest that it names."""
    for line in _requirements("transformers"):
        requirement = Requirement(line) if line.startswith("kernels") else None
        if requirement is not None and requirement.name == "kernels":
            return _fitting(requirement.specifier)
    return KERNELS_API


def _fitting(specifier: SpecifierSet) -> str:
    if specifier.contains(KERNELS_API):
        return KERNELS_API
    bounds = [spec.version.removesuffix(".*") for spec in specifier if spec.operator in _LOWER_BOUNDS]
    return max(bounds, key=Version, default=KERNELS_API)


def _requirements(distribution: str) -> list[str]:
    try:
        return importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return []
