"""Metadata: what ``metadata.json`` says about a build, under the names that the package ``kernels`` uses."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from packaging.version import Version

from kernelhub.errors import FolderNotFound, InvalidMetadata
from kernelhub.integrations.kernels.dependency import KernelDependency, version_of
from kernelhub.metadata import Metadata as ParsedMetadata

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class Backend(Enum):
    """What a build computes on."""

    CANN = "cann"
    CPU = "cpu"
    CUDA = "cuda"
    Metal = "metal"
    Neuron = "neuron"
    ROCm = "rocm"
    TPU = "tpu"
    XPU = "xpu"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class BackendInfo:
    """The backend of a build, and the architectures that it has code for (None: it does not say)."""

    backend_type: Backend
    archs: list[str] | None = field(default=None, hash=False)


@dataclass(frozen=True)
class KernelName:
    """The name of a kernel."""

    name: str

    @property
    def python_name(self) -> str:
        """The name as a Python name."""
        return self.name.replace("-", "_")

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Digest:
    """The hashes that a build lists for its files, in base64; ``algorithm`` is ``sha256`` or ``sha512``."""

    algorithm: str
    files: dict[str, str] = field(hash=False)


@dataclass(frozen=True)
class GitStatus:
    """A commit, and whether files were changed beside it."""

    commit: str
    dirty: bool


@dataclass(frozen=True)
class KernelBuilderVersion:
    """The builder that made a build."""

    version: str
    git: GitStatus | None


@dataclass(frozen=True)
class Provenance:
    """What a build was made from and with."""

    kernel_builder: KernelBuilderVersion
    kernel: GitStatus | None

    @property
    def dirty(self) -> bool:
        """Was the builder or the source something else than its commit?"""
        states = (self.kernel_builder.git, self.kernel)
        return any(state is not None and state.dirty for state in states)


@dataclass(frozen=True)
class Metadata:
    """A build's ``metadata.json``, read by ``read_from_file`` or ``from_bytes``.

    Keys that the file does not have are None or empty; without a name it is that of the ``kernel``.
    """

    parsed: ParsedMetadata
    kernel: str = ""

    @staticmethod
    def read_from_file(metadata_path: os.PathLike[str] | str) -> Metadata:
        """Read the file at that path.

        Raises:
            FolderNotFound: there is no such file.
            InvalidMetadata: it cannot be read, or what is wrong in it.
        """
        path = Path(metadata_path)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise FolderNotFound(str(path.parent), "this machine", f"it has no {path.name}") from None
        except OSError as error:
            raise InvalidMetadata(str(path), f"cannot be read ({error.strerror})", "a metadata.json") from error
        return Metadata(ParsedMetadata.parse(data, str(path)))

    @staticmethod
    def from_bytes(bytes: bytes) -> Metadata:
        """Read the contents of the file.

        Raises:
            InvalidMetadata: what is wrong in it.
        """
        return Metadata(ParsedMetadata.parse(bytes))

    @property
    def id(self) -> str:
        """The unique name of this build; its operators are ``torch.ops.<id>``."""
        return self.parsed.id or ""

    @property
    def name(self) -> KernelName:
        return KernelName(self.parsed.name or self.kernel)

    @property
    def version(self) -> int | None:
        return self.parsed.version

    @property
    def kernels_minver(self) -> Version | None:
        """The oldest ``kernels`` that the build says it needs."""
        return None if self.parsed.kernels_minver is None else Version(self.parsed.kernels_minver)

    @property
    def license(self) -> str | None:
        return self.parsed.license

    @property
    def upstream(self) -> str | None:
        return self.parsed.upstream

    @property
    def source(self) -> str | None:
        return self.parsed.source

    @property
    def python_depends(self) -> list[str]:
        return list(self.parsed.python_depends)

    @property
    def kernel_depends(self) -> list[KernelDependency]:
        wanted = self.parsed.kernel_depends
        return [KernelDependency(each.repo_id, version_of(each.revision)) for each in wanted]

    @property
    def backend(self) -> BackendInfo | None:
        """None where the file, an old one, names no backend."""
        if self.parsed.backend is None:
            return None
        return BackendInfo(Backend(self.parsed.backend), list(self.parsed.archs) or None)

    @property
    def digest(self) -> Digest | None:
        digest = self.parsed.digest
        if digest is None:
            return None
        files = {path: base64.b64encode(raw).decode() for path, raw in digest.files.items()}
        return Digest(digest.algorithm, files)

    @property
    def provenance(self) -> Provenance | None:
        builder = _table(self.parsed.provenance, "kernel-builder")
        if builder is None:
            return None
        kernel = _table(self.parsed.provenance, "kernel")
        return Provenance(KernelBuilderVersion(str(builder.get("version", "")), _git(builder)), _git(kernel))

    def __repr__(self) -> str:
        return f"Metadata(name={str(self.name)!r}, id={self.id!r}, version={self.version})"


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    value = data.get(key)
    return value if isinstance(value, dict) else None


def _git(data: Mapping[str, Any] | None) -> GitStatus | None:
    commit = (data or {}).get("commit") or (data or {}).get("sha")
    return GitStatus(str(commit), bool((data or {}).get("dirty", False))) if commit else None
