"""Repositories: a layer or function of a kernel, named in a mapping and loaded when a model needs it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from kernelhub.integrations.kernels.dependency import KernelDependency, locks_of, version_of
from kernelhub.integrations.kernels.layer.function import function_layer
from kernelhub.integrations.kernels.locking import locked_entry, read_lock
from kernelhub.integrations.kernels.origin import folder_origin, hub_origin, layer_symbol, locked_origin
from kernelhub.layers.symbol import LoadedSymbol
from kernelhub.loader import symbol
from kernelhub.resolution import DEFAULT_REVISION
from kernelhub.revision import Revision

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from kernelhub.integrations.kernels.origin import Origin
    from kernelhub.verify import VerifiedBuild


class RepositoryProtocol(Protocol):
    """What a mapping holds: anything that loads a layer class."""

    def load(self) -> type[nn.Module]:
        """The layer class."""


class Repository:
    """An origin and a name in it. Equal when both are."""

    _origin: Origin
    layer_name: str
    _kind = "layer"

    @property
    def _named(self) -> str:
        return self.layer_name

    @property
    def mapped(self) -> tuple[str, dict[str, Any]]:
        """The same as a value of a ``KernelConfig``; what a lock pins is named by its commit."""
        request = replace(self._origin.request, symbol=self._named)
        if self._origin.lock is not None and request.repo_id is not None:
            commit = locked_entry(self._origin.lock, request.repo_id).commit
            request = replace(request, revision=Revision.parse(commit))
        trust = self._origin.trust
        return str(request), {"trust_remote_code": list(trust) if isinstance(trust, tuple) else trust}

    def find(self, backend: str | None = None) -> LoadedSymbol:
        """The layer or function itself, for a backend or that of the process, and the build that it is from.

        Raises:
            KernelHubError: as ``load``; also that this process has no such backend.
        """
        build = replace(self._origin, backend=backend).obtain()
        return LoadedSymbol(self._symbol(build), build.kernel, build.variant, self._named)

    def load(self) -> type[nn.Module]:
        """The layer class.

        Raises:
            SymbolNotFound: the kernel does not define it.
            KernelHubError: as ``kernelhub.load_kernel``.
        """
        layer: type[nn.Module] = self.find().value
        return layer

    def _symbol(self, build: VerifiedBuild) -> Any:
        return layer_symbol(build, self._named)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and vars(other) == vars(self)

    def __hash__(self) -> int:
        return hash((type(self), self._origin, self._named))

    def __str__(self) -> str:
        revision = self._origin.revision or (f"v{self._origin.version}" if self._origin.version is not None else "")
        at = f" ({revision})" if revision else ""
        return f"{self._kind} {self._named} of {self._origin.name}{at}"

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self}>"


class _FunctionRepository(Repository):
    """The same for a function of the kernel's top module, which ``load`` wraps into a layer class."""

    func_name: str
    _kind = "function"

    @property
    def _named(self) -> str:
        return self.func_name

    def load(self) -> type[nn.Module]:
        """The function as the ``forward`` of a layer class. Raises as for layers."""
        return function_layer(self.find().value)

    def _symbol(self, build: VerifiedBuild) -> Any:
        return symbol(build, self._named)


class _Locked(Repository):
    """What the lock says: ``kernel_dep`` is the entry of this repository, ``kernel_locks`` holds all of them."""

    def _read(self, repo_id: str, lockfile: Path | None, trust: bool | list[str]) -> None:
        lock = read_lock(lockfile)
        revision = locked_entry(lock, repo_id).request.revision or DEFAULT_REVISION
        self._origin = locked_origin(repo_id, lock, trust=trust)
        self.kernel_dep = KernelDependency(repo_id, version_of(revision))
        self.kernel_locks = locks_of(lock)


class LayerRepository(Repository):
    """A layer of a Hub kernel.

    Args:
        repo_id: the repository on the Hub.
        layer_name: the name of the layer class in the kernel's module ``layers`` (or its top module).
        revision: branch, tag or commit; or
        version: the API version. One of the two has to be given.
        trust_remote_code: as in ``kernelhub.load_kernel``.
        user_agent: taken and not sent.

    Raises:
        InvalidRequest: neither a version nor a revision, or both. Nothing else is looked at before it is loaded.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        layer_name: str,
        revision: str | None = None,
        version: int | None = None,
        trust_remote_code: bool | list[str] = False,
        user_agent: str | dict[str, str] | None = None,
    ) -> None:
        self._origin = hub_origin(repo_id, revision=revision, version=version, trust=trust_remote_code)
        self.layer_name = layer_name


class LocalLayerRepository(Repository):
    """A layer of a kernel in a folder: that of a repository, the one with its builds, or one build."""

    def __init__(self, repo_path: Path, *, layer_name: str) -> None:
        self._origin = folder_origin(repo_path)
        self.layer_name = layer_name


class LockedLayerRepository(_Locked):
    """A layer of a Hub kernel at the commit of a lock, which is read at once.

    Args:
        lockfile: ``kernelhub.lock`` or ``kernels.lock``; None takes the one that was installed with the package of
            the caller.
        repo_id, layer_name, trust_remote_code: as in ``LayerRepository``.

    Raises:
        LockfileNotFound, InvalidLockfile, NotLocked: the lock does not say which commit.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        lockfile: Path | None = None,
        layer_name: str,
        trust_remote_code: bool | list[str] = False,
    ) -> None:
        self._read(repo_id, lockfile, trust_remote_code)
        self.layer_name = layer_name


class FuncRepository(_FunctionRepository):
    """A function of a Hub kernel; arguments and errors as for ``LayerRepository``."""

    def __init__(
        self,
        repo_id: str,
        *,
        func_name: str,
        revision: str | None = None,
        version: int | None = None,
        trust_remote_code: bool | list[str] = False,
    ) -> None:
        self._origin = hub_origin(repo_id, revision=revision, version=version, trust=trust_remote_code)
        self.func_name = func_name


class LocalFuncRepository(_FunctionRepository):
    """A function of a kernel in a folder; arguments as for ``LocalLayerRepository``."""

    def __init__(self, repo_path: Path, *, func_name: str) -> None:
        self._origin = folder_origin(repo_path)
        self.func_name = func_name


class LockedFuncRepository(_FunctionRepository, _Locked):
    """A function of a Hub kernel at the commit of a lock; arguments and errors as for ``LockedLayerRepository``."""

    def __init__(
        self,
        repo_id: str,
        *,
        lockfile: Path | None = None,
        func_name: str,
        trust_remote_code: bool | list[str] = False,
    ) -> None:
        self._read(repo_id, lockfile, trust_remote_code)
        self.func_name = func_name
