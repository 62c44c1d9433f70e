"""LoadedKernel: the kernels of this process, with their metadata and where they came from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernelhub.integrations.kernels.hf_hub import RepoInfo
from kernelhub.integrations.kernels.metadata import Metadata
from kernelhub.loader import loaded_kernels
from kernelhub.metadata import Metadata as ParsedMetadata

if TYPE_CHECKING:
    from types import ModuleType

    from kernelhub import loader
    from kernelhub.resolution import Resolution

_COMMIT_DIGITS = 40
_commits: dict[str, str] = {}  # "org/repo@<first digits>", as the loader knows a kernel, to its whole commit


@dataclass(frozen=True)
class LoadedKernel:
    """One kernel of this process; ``repo_info`` is None for one that was read from a folder."""

    metadata: Metadata
    module: ModuleType
    repo_info: RepoInfo | None


def get_loaded_kernels() -> list[LoadedKernel]:
    """Every kernel that this process has loaded, through these functions or others of kernelhub, in order."""
    return [_described(kernel) for kernel in loaded_kernels()]


def remember(resolution: Resolution) -> None:
    """Keep the whole commits of a kernel and of all that it depends on."""
    _commits.update((each.kernel, each.commit) for each in resolution.tree() if len(each.commit) == _COMMIT_DIGITS)


def _described(kernel: loader.LoadedKernel) -> LoadedKernel:
    metadata = Metadata(kernel.metadata or ParsedMetadata(), kernel.module.__name__.rpartition(".")[2])
    is_on_hub = bool(kernel.commit) and kernel.origin.count("/") == 1
    commit = _commits.get(f"{kernel.origin}@{kernel.commit}", kernel.commit)
    return LoadedKernel(metadata, kernel.module, RepoInfo(kernel.origin, commit) if is_on_hub else None)
