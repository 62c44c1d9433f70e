"""Loading: a kernel's module, from the Hub, from a folder, or at the commit of a lock."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelhub.errors import NoCompatibleVariant, NotCached
from kernelhub.integrations.kernels.locking import read_lock
from kernelhub.integrations.kernels.origin import folder_origin, hub_origin, locked_origin

if TYPE_CHECKING:
    from pathlib import Path
    from types import ModuleType


def get_kernel(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
    user_agent: str | dict[str, str] | None = None,
    trust_remote_code: bool | list[str] = False,
    check_arch: bool = True,
) -> ModuleType:
    """Load a kernel of the Hub, downloaded once.

    Args:
        repo_id: the repository on the Hub.
        revision: branch, tag or commit; or
        version: the API version. One of the two has to be given.
        backend: ``"cpu"`` asks for CPU builds on a machine with an accelerator.
        user_agent: taken and not sent.
        trust_remote_code: as in ``kernelhub.load_kernel``.
        check_arch: False accepts a build that lists no code for the devices of this machine.

    Raises:
        KernelHubError: as ``kernelhub.load_kernel``.
    """
    conditions = {"backend": backend, "trust": trust_remote_code, "check_arch": check_arch}
    return hub_origin(repo_id, revision=revision, version=version, **conditions).load()


def get_local_kernel(
    repo_path: Path,
    *,
    backend: str | None = None,
    trust_remote_code: bool | list[str] = False,
    user_agent: str | dict[str, str] | None = None,
) -> ModuleType:
    """Load a kernel from a folder: that of a repository, the one with its builds, or one build.

    What it depends on comes from the Hub; arguments as in ``get_kernel``.

    Raises:
        FolderNotFound: there is no build in it.
        KernelHubError: as ``kernelhub.load_kernel``.
    """
    return folder_origin(repo_path, backend=backend, trust=trust_remote_code).load()


def get_locked_kernel(
    repo_id: str,
    *,
    lockfile: Path | None,
    trust_remote_code: bool | list[str] = False,
    user_agent: str | dict[str, str] | None = None,
) -> ModuleType:
    """Load a kernel at the commit of a lock; downloads what is not stored yet.

    Args:
        repo_id: the repository on the Hub.
        lockfile: ``kernelhub.lock`` or ``kernels.lock``; None takes the one that was installed with the package of
            the caller.
        trust_remote_code, user_agent: as in ``get_kernel``.

    Raises:
        LockfileNotFound, InvalidLockfile: there is no lock to read.
        NotLocked: it has no entry for this repository.
        KernelHubError: as ``kernelhub.load_kernel``.
    """
    return locked_origin(repo_id, read_lock(lockfile), trust=trust_remote_code).load()


def load_kernel(repo_id: str, *, lockfile: Path | None, backend: str | None = None) -> ModuleType:
    """Load a kernel at the commit of a lock, from this machine only; arguments as above.

    Raises:
        NotCached: it was not downloaded before.
        KernelHubError: as ``get_locked_kernel``.
    """
    return locked_origin(repo_id, read_lock(lockfile), backend=backend, offline=True).load()


def has_kernel(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
    trust_remote_code: bool | list[str] = False,
    check_arch: bool = True,
) -> bool:
    """Is there a build of a kernel, and of all it depends on, that runs here? Arguments as in ``get_kernel``.

    Raises:
        KernelHubError: as ``get_kernel``, unless it is that no build fits, or that, offline, none is stored.
    """
    conditions = {"backend": backend, "trust": trust_remote_code, "check_arch": check_arch}
    try:
        hub_origin(repo_id, revision=revision, version=version, **conditions).resolve()
    except (NoCompatibleVariant, NotCached):
        return False
    return True
