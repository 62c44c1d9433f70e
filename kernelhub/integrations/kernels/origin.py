"""Origin: where a kernel comes from and on which conditions, as the arguments of these functions say it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelhub.errors import InvalidRequest, SymbolNotFound
from kernelhub.integrations.kernels.importer import remember
from kernelhub.integrations.kernels.locking import locked_entry
from kernelhub.loader import LAYERS, load, symbol
from kernelhub.request import KernelRequest
from kernelhub.session import Session

if TYPE_CHECKING:
    from types import ModuleType

    from kernelhub.lockfile import Lock
    from kernelhub.resolution import Resolution
    from kernelhub.session import Trust
    from kernelhub.verify import VerifiedBuild


@dataclass(frozen=True)
class Origin:
    """One kernel of the Hub or of a folder. Nothing is read before it is asked for.

    ``trust`` is the argument ``trust_remote_code``; with ``lock`` the lock alone says which commit; ``offline`` True
    opens no socket, None follows the environment; without ``check_arch`` the devices are not compared with the build.
    """

    name: str | Path
    revision: str | None = None
    version: int | None = None
    trust: Trust = False
    backend: str | None = None
    lock: Lock | None = None
    offline: bool | None = None
    check_arch: bool = True

    @property
    def request(self) -> KernelRequest:
        """What is asked for.

        Raises:
            InvalidRequest: it cannot be read.
        """
        if isinstance(self.name, Path):
            return KernelRequest(path=_spelled(self.name))
        return KernelRequest(repo_id=self.name).at(version=self.version, revision=self.revision)

    @property
    def session(self) -> Session:
        session = Session(lockfile=self.lock, offline=self.offline)
        if self.check_arch:
            return session
        blind = replace(session.environment_for(self.backend), gpus=())
        return replace(session, environment=blind)

    def resolve(self) -> Resolution:
        """The build to load; downloads nothing but its metadata. Raises what ``kernelhub.load_kernel`` raises."""
        return self.session.resolve(self.request, backend=self.backend, trust=self.trust)

    def obtain(self) -> VerifiedBuild:
        """The build on this machine, verified. Raises what ``kernelhub.load_kernel`` raises."""
        session = self.session
        resolution = session.resolve(self.request, backend=self.backend, trust=self.trust, ahead=True)
        remember(resolution)
        return session.obtain(resolution)

    def load(self) -> ModuleType:
        """The module of the kernel. Raises what ``kernelhub.load_kernel`` raises."""
        return load(self.obtain())


def hub_origin(repo_id: str, *, revision: str | None, version: int | None, **conditions: Any) -> Origin:
    """A repository of the Hub at a version or a revision, of which one has to be given.

    Raises:
        InvalidRequest: neither or both are given.
    """
    if revision is None and version is None:
        raise InvalidRequest(repo_id, "neither a version nor a revision is given", "version=1, or revision='...'")
    if revision is not None and version is not None:
        raise InvalidRequest(repo_id, "both a version and a revision are given", "one of them")
    return Origin(repo_id, revision, version, **_copied(conditions))


def folder_origin(repo_path: Path | str, **conditions: Any) -> Origin:
    """A folder of builds on this machine."""
    return Origin(Path(repo_path), **_copied(conditions))


def locked_origin(repo_id: str, lock: Lock, **conditions: Any) -> Origin:
    """A repository at the commit that a lock gives it.

    Raises:
        NotLocked: the lock has no entry for it.
    """
    entry = locked_entry(lock, repo_id)
    return Origin(repo_id, str(entry.request.revision), lock=lock, **_copied(conditions))


def layer_symbol(build: VerifiedBuild, name: str) -> Any:
    """A layer of a kernel: from its module ``layers``, else from its top module.

    Raises:
        SymbolNotFound: neither defines it.
    """
    try:
        return symbol(build, f"{LAYERS}.{name}")
    except SymbolNotFound:
        return symbol(build, name)


def _copied(conditions: dict[str, Any]) -> dict[str, Any]:
    """The conditions, with a list of trusted repositories that its owner cannot change afterwards."""
    trust = conditions.get("trust", False)
    return {**conditions, "trust": tuple(trust) if isinstance(trust, list) else trust}


def _spelled(path: Path) -> str:
    """The path as a request takes it: a colon in its last part would read as the start of a symbol."""
    absolute = str(path.expanduser().absolute())
    return f"{absolute}/" if ":" in path.name else absolute
