"""Variants: the builds of a kernel, each with the decision whether it runs here."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.version import Version

from kernelhub import variant as variants
from kernelhub.integrations.kernels.backends import Backend, as_backend
from kernelhub.integrations.kernels.origin import hub_origin


@dataclass(unsafe_hash=True)
class Torch:
    """Built for one version of Torch, with a C++ ABI where the name tells one."""

    version: Version
    cxx11_abi: bool | None

    @property
    def variant_str(self) -> str:
        abi = {None: "", True: "-cxx11", False: "-cxx98"}[self.cxx11_abi]
        return f"torch{self.version.major}{self.version.minor}{abi}"


@dataclass(unsafe_hash=True)
class TorchStableAbi:
    """Built for the stable ABI of this version of Torch, and newer ones."""

    version: Version

    @property
    def variant_str(self) -> str:
        return f"torch-stable-abi{self.version.major}{self.version.minor}"


@dataclass(unsafe_hash=True)
class TvmFfi:
    """Built for one version of tvm-ffi."""

    version: Version

    @property
    def variant_str(self) -> str:
        return f"tvm-ffi{self.version.major}{self.version.minor}"


@dataclass(unsafe_hash=True)
class TorchNoarch:
    """Written in Python for any Torch."""

    @property
    def variant_str(self) -> str:
        return "torch"


@dataclass(unsafe_hash=True)
class Arch:
    """What a compiled build runs on."""

    backend: Backend
    platform: str
    os: str

    @property
    def variant_str(self) -> str:
        return f"{self.backend.variant_str}-{self.platform}-{self.os}"


@dataclass(unsafe_hash=True)
class Noarch:
    """The backend that a build in Python is for; ``universal`` is any."""

    backend_name: str

    @property
    def variant_str(self) -> str:
        return self.backend_name


@dataclass(unsafe_hash=True)
class ArchVariant:
    """A compiled build."""

    framework: Torch | TorchStableAbi | TvmFfi
    arch: Arch

    @property
    def variant_str(self) -> str:
        return f"{self.framework.variant_str}-{self.arch.variant_str}"


@dataclass(unsafe_hash=True)
class NoarchVariant:
    """A build in Python."""

    framework: TorchNoarch
    arch: Noarch

    @property
    def variant_str(self) -> str:
        return f"{self.framework.variant_str}-{self.arch.variant_str}"


Variant = ArchVariant | NoarchVariant


@dataclass(unsafe_hash=True)
class VariantAccepted:
    """A build that runs on this machine."""

    variant: Variant


@dataclass(unsafe_hash=True)
class VariantRejected:
    """A build that does not run on this machine, and why."""

    variant: Variant
    reason: str


Decision = VariantAccepted | VariantRejected


def get_kernel_variants(
    repo_id: str,
    *,
    revision: str | None = None,
    version: int | None = None,
    backend: str | None = None,
) -> list[Decision]:
    """All builds of a kernel: those that run here first, the best of them leading; then the others, with reasons.

    Args:
        repo_id: the repository on the Hub.
        revision: branch, tag or commit; or
        version: the API version. One of the two has to be given.
        backend: ``"cpu"`` asks for CPU builds on a machine with an accelerator.

    Raises:
        InvalidRequest, InvalidBackend: an argument cannot be read.
        RepositoryNotFound, RevisionNotFound: told with the versions that exist.
        FetchError: the Hub or the store cannot be asked.
    """
    origin = hub_origin(repo_id, revision=revision, version=version)
    selection = origin.session.selection(origin.request, backend=backend)
    accepted = [VariantAccepted(_as_variant(each)) for each in selection.accepted]
    rejected = [VariantRejected(_as_variant(each.variant), each.reason) for each in selection.rejected]
    return [*accepted, *rejected]


def parse_variant(variant_str: str) -> Variant:
    """Read the name of a build.

    Raises:
        InvalidVariant: which part is wrong.
    """
    return _as_variant(variants.Variant.parse(variant_str))


def _as_variant(found: variants.Variant) -> Variant:
    if found.noarch is not None:
        return NoarchVariant(TorchNoarch(), Noarch(found.noarch))
    assert found.backend is not None
    arch = Arch(as_backend(found.backend), str(found.cpu), str(found.os))
    return ArchVariant(_framework(found), arch)


def _framework(found: variants.Variant) -> Torch | TorchStableAbi | TvmFfi:
    version = Version(str(found.release))
    if found.framework == variants.STABLE_ABI:
        return TorchStableAbi(version)
    if found.framework == variants.TVM_FFI:
        return TvmFfi(version)
    return Torch(version, None if found.abi is None else found.abi == "cxx11")
