"""Installing: a kernel's files on this machine, without importing them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelhub.integrations.kernels.origin import hub_origin

if TYPE_CHECKING:
    from pathlib import Path


def install_kernel(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
    local_files_only: bool = False,
    user_agent: str | dict[str, str] | None = None,
    trust_remote_code: bool | list[str] = False,
) -> Path:
    """Download the build of a kernel for this machine, with all it depends on, and return its folder.

    Args:
        repo_id: the repository on the Hub.
        revision: branch, tag or commit; or
        version: the API version. One of the two has to be given.
        backend: ``"cpu"`` asks for CPU builds on a machine with an accelerator.
        local_files_only: True opens no socket.
        user_agent: taken and not sent.
        trust_remote_code: as in ``kernelhub.load_kernel``.

    Raises:
        KernelHubError: as ``kernelhub.load_kernel``, but for what an import raises.
    """
    conditions = {"backend": backend, "trust": trust_remote_code, "offline": local_files_only or None}
    return hub_origin(repo_id, revision=revision, version=version, **conditions).obtain().folder
