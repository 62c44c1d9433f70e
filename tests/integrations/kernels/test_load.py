"""Kernels by the functions of the package `kernels`: what they return, and what their callers can catch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

import kernelhub.integrations.kernels as api
from kernelhub import errors
from kernelhub.hub import HubIndex
from kernelhub.integrations.kernels.origin import folder_origin, hub_origin

if TYPE_CHECKING:
    from kernelhub.serve import LocalHub

DATA = Path(__file__).parents[2] / "data"


@pytest.fixture
def published(hub_root: Path, online: LocalHub) -> Path:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": "VALUE = 1\n"})
    write_build(hub_root, "acme/gpu", "v1", "torch-cuda", {"__init__.py": "VALUE = 1\n"})
    return hub_root


def commit_of(hub: LocalHub, repo_id: str) -> str:
    return HubIndex(hub.url, False).refs(repo_id).branches["v1"]


# Repositories as they were made before


def test_a_package_inside_of_the_build_loads(published: Path) -> None:
    write_build(published, "acme/old-norm", "v1", "torch-cpu", {"old_norm/__init__.py": "VALUE = 'nested'\n"})
    assert api.get_kernel("acme/old-norm", version=1).VALUE == "nested"


def test_a_build_without_metadata_loads_and_says_so(published: Path, caplog: pytest.LogCaptureFixture) -> None:
    (
        write_build(published, "acme/bare", "v1", "torch-cpu", {"__init__.py": "VALUE = 'bare'\n"}) / "metadata.json"
    ).unlink()
    assert api.get_kernel("acme/bare", version=1).VALUE == "bare"
    assert "unverified" in caplog.text
    metadata = api.get_loaded_kernels()[-1].metadata
    assert (str(metadata.name), metadata.version, metadata.backend) == ("bare", None, None)


def test_a_repository_of_type_model_loads(published: Path) -> None:
    write_build(published, "acme/model", "v1", "torch-cpu", {"__init__.py": "VALUE = 'model'\n"})
    (published / "acme/model/repository.json").write_text('{"type": "model"}')
    assert api.get_kernel("acme/model", version=1).VALUE == "model"
    assert api.has_kernel("acme/model", version=1)


def test_a_lock_of_the_first_format_is_followed(published: Path, online: LocalHub, tmp_path: Path) -> None:
    """The sample of that format, for a repository that is there, while its branch has moved on."""
    sample = json.loads((DATA / "kernels-legacy.lock").read_text(encoding="utf-8"))[0]
    lock = tmp_path / "kernels.lock"
    lock.write_text(json.dumps([{**sample, "repo_id": "acme/relu", "sha": commit_of(online, "acme/relu")}]))
    write_build(published, "acme/relu", "v1", "torch-cpu", {"__init__.py": "VALUE = 'moved'\n"})
    assert api.get_locked_kernel("acme/relu", lockfile=lock).VALUE == 1
    assert api.load_kernel("acme/relu", lockfile=lock).VALUE == 1
    layer = api.LockedFuncRepository("acme/relu", lockfile=lock, func_name="relu")
    assert [each.commit for each in layer.kernel_locks.values()] == [commit_of_lock(lock)]


def commit_of_lock(lock: Path) -> str:
    return str(json.loads(lock.read_text())[0]["sha"])


def test_a_kernel_that_uses_the_package_loads(published: Path) -> None:
    source = "from kernels import get_kernel, get_kernel_dep\nVALUE = get_kernel_dep('acme/relu').VALUE + 1\n"
    needs = {"kernel-depends": [{"repo-id": "acme/relu", "version": 1}]}
    write_build(published, "acme/user", "v1", "torch-cpu", {"__init__.py": source}, metadata_overrides=needs)
    assert api.get_kernel("acme/user", version=1).VALUE == 2
    assert "kernels" not in sys.modules


# What is known about a kernel


def test_a_loaded_kernel_tells_its_whole_commit(published: Path, online: LocalHub) -> None:
    module = api.get_kernel("acme/relu", version=1)
    found = api.get_loaded_kernels()[-1]
    assert found.module is module
    assert found.repo_info == api.RepoInfo("acme/relu", commit_of(online, "acme/relu"))
    assert found.metadata.digest is not None
    assert repr(found.metadata) == f"Metadata(name='relu', id={found.metadata.id!r}, version=1)"


def test_a_loaded_kernel_of_a_folder_has_no_repository(tmp_path: Path, online: LocalHub) -> None:
    write_build(tmp_path, "acme/own", "v1", "torch-cpu", {"__init__.py": "VALUE = 'own'\n"})
    module = api.get_local_kernel(tmp_path / "acme/own/v1")
    assert (api.get_loaded_kernels()[-1].module, api.get_loaded_kernels()[-1].repo_info) == (module, None)


def test_installing_imports_nothing(published: Path) -> None:
    write_build(published, "acme/raises", "v1", "torch-cpu", {"__init__.py": "raise RuntimeError('imported')\n"})
    folder = api.install_kernel("acme/raises", version=1)
    assert (folder / "__init__.py").read_text() == "raise RuntimeError('imported')\n"


def test_the_devices_are_compared_unless_they_shall_not_be(published: Path) -> None:
    """On a machine with a GPU: that of the session that would be asked."""
    watching, blind = (
        hub_origin("acme/relu", revision=None, version=1, check_arch=check, backend="cpu") for check in (True, False)
    )
    assert watching.session.environment is None
    assert blind.session.environment is not None
    assert blind.session.environment.gpus == ()
    assert blind.load().VALUE == 1


@pytest.mark.parametrize("name", ["with:colon", "with space", "plain"])
def test_a_folder_may_have_any_name(published: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    (published / "acme/relu/v1").rename(folder)
    assert api.get_local_kernel(folder).VALUE == 1
    assert api.get_local_kernel(str(folder)).VALUE == 1  # type: ignore[arg-type]  # scripts pass strings too
    assert folder_origin(folder).request.folder == folder


# The lock of the package that calls


def install_package(folder: Path, name: str, lock: str | None) -> None:
    """What pip leaves of a package whose code asks for its locked kernel."""
    source = (
        "from kernelhub.integrations import kernels\n"
        "def value():\n    return kernels.get_locked_kernel('acme/relu', lockfile=None).VALUE\n"
        "def layer():\n    return kernels.LockedLayerRepository('acme/relu', layer_name='Relu')\n"
    )
    metadata = folder / f"{name}-1.0.dist-info"
    for path, text in {
        folder / name / "__init__.py": source,
        metadata / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n",
        metadata / "top_level.txt": f"{name}\n",
        **({} if lock is None else {metadata / "kernels.lock": lock}),
    }.items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def test_the_lock_that_was_installed_with_the_caller_is_followed(
    published: Path, online: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"dependency": {"repo-id": "acme/relu", "version": 1}, "lock": {"commit": commit_of(online, "acme/relu")}}
    install_package(tmp_path, "locked_app", json.dumps([entry]))
    install_package(tmp_path, "open_app", None)
    monkeypatch.syspath_prepend(tmp_path)
    locked, open_ = __import__("locked_app"), __import__("open_app")
    try:
        assert locked.value() == 1
        assert locked.layer().kernel_dep.repo_id == "acme/relu"
        with pytest.raises(
            errors.LockfileNotFound, match=r"'open_app': this package, which calls, .* without kernels\.lock"
        ):
            open_.value()
    finally:
        del sys.modules["locked_app"], sys.modules["open_app"]


# What callers catch


def lock_with(folder: Path, text: str) -> Path:
    path = folder / "some.lock"
    path.write_text(text)
    return path


CATCHES: dict[str, tuple[Any, type[errors.KernelHubError], tuple[type[Exception], ...]]] = {
    "no build": (lambda _: api.get_kernel("acme/gpu", version=1), errors.NoCompatibleVariant, (FileNotFoundError,)),
    "no version": (lambda _: api.get_kernel("acme/relu"), errors.InvalidRequest, (ValueError,)),
    "missing version": (lambda _: api.get_kernel("acme/relu", version=9), errors.RevisionNotFound, (ValueError,)),
    "missing revision": (lambda _: api.get_kernel("acme/relu", revision="x"), errors.RevisionNotFound, (OSError,)),
    "missing": (lambda _: api.get_kernel("acme/none", version=1), errors.RepositoryNotFound, (OSError, LookupError)),
    "untrusted": (lambda _: api.get_kernel("evil/relu", version=1), errors.UntrustedPublisher, (ValueError,)),
    "no folder": (lambda tmp: api.get_local_kernel(tmp / "x"), errors.FolderNotFound, (FileNotFoundError,)),
    "not stored": (
        lambda _: api.install_kernel("acme/relu", version=1, local_files_only=True),
        errors.NotCached,
        (FileNotFoundError, ValueError),
    ),
    "no lock": (
        lambda tmp: api.get_locked_kernel("acme/relu", lockfile=tmp / "x.lock"),
        errors.LockfileNotFound,
        (FileNotFoundError, ValueError),
    ),
    "not locked": (
        lambda tmp: api.get_locked_kernel("acme/relu", lockfile=lock_with(tmp, "[]")),
        errors.NotLocked,
        (ValueError,),
    ),
    "no layer": (
        lambda _: api.LayerRepository("acme/relu", layer_name="Relu", version=1).load(),
        errors.SymbolNotFound,
        (ValueError, ImportError),
    ),
    "outside": (lambda _: api.get_kernel_dep("acme/relu"), errors.KernelDependencyError, (RuntimeError,)),
    "metadata": (lambda tmp: api.Metadata.read_from_file(tmp), errors.InvalidMetadata, (ValueError,)),
}


@pytest.mark.parametrize("case", CATCHES)
def test_an_error_is_ours_and_one_that_callers_catch(published: Path, tmp_path: Path, case: str) -> None:
    call, ours, theirs = CATCHES[case]
    with pytest.raises(ours) as raised:
        call(tmp_path)
    assert all(isinstance(raised.value, cls) for cls in theirs)
    assert str(raised.value)


def test_what_an_import_raises_is_the_cause(published: Path) -> None:
    write_build(published, "acme/raises", "v1", "torch-cpu", {"__init__.py": "raise RuntimeError('boom')\n"})
    with pytest.raises(errors.ImportFailed, match="RuntimeError: boom") as raised:
        api.get_kernel("acme/raises", version=1)
    assert isinstance(raised.value.__cause__, RuntimeError)


def test_a_list_of_trusted_repositories_is_copied(published: Path) -> None:
    write_build(published, "evil/relu", "v1", "torch-cpu", {"__init__.py": "VALUE = 1\n", "layers.py": "Relu = int\n"})
    trusted: list[str] = []
    repository = api.LayerRepository("evil/relu", layer_name="Relu", version=1, trust_remote_code=trusted)
    trusted.append("evil/relu")
    with pytest.raises(errors.UntrustedPublisher):
        repository.load()
