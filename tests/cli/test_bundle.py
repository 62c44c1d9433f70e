"""``kernelhub bundle``: create here, carry over, inspect and install there."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build
from typer.testing import CliRunner, Result

from kernelhub.cli import app
from kernelhub.errors import InvalidBundle, InvalidLockfile, KernelHubError, PrefetchFailed, UntrustedPublisher

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub


@pytest.fixture
def kernelhub(hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    trust(hub_root, "org")
    for version in ("v1", "v2"):
        write_build(hub_root, "org/norm", version, "torch-cpu", {"__init__.py": f"VERSION = {version!r}\n"})
    write_build(hub_root, "org/norm", "v1", "torch-cuda", {"__init__.py": ""})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


@pytest.fixture
def island(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on this is another machine, without network."""

    def move() -> None:
        monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "island"))
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")

    return move


def test_from_one_machine_to_another(
    kernelhub: Callable[..., Result], island: Callable[[], None], hub: LocalHub, tmp_path: Path
) -> None:
    created = kernelhub("bundle", "create", "org/norm@v1", "--all-variants", "-o", "kernels.tar.gz")
    assert created.exit_code == 0, created.output
    assert "2 builds" in created.stdout
    assert "written   kernels.tar.gz" in created.stdout
    island()
    hub.clear()
    looked = kernelhub("bundle", "inspect", "kernels.tar.gz", "--json")
    digest = json.loads(looked.stdout)["digest"]
    assert not (tmp_path / "island").exists()
    arguments = ["--trust", "org/norm", "--digest", f"sha256:{digest}", "--write-lock", "kernelhub.lock"]
    installed = kernelhub("bundle", "install", "kernels.tar.gz", *arguments)
    assert installed.exit_code == 0, installed.output
    assert installed.stdout.count("installed (self-attested)") == 2
    assert "org/norm@v1" in (tmp_path / "kernelhub.lock").read_text()
    told = kernelhub("explain", "org/norm@v1", "--offline", "--trust", "org/norm")
    assert "torch-cpu, the best of 1" in told.stdout
    again = kernelhub("bundle", "install", "kernels.tar.gz", "--trust", "org/norm", "--json")
    assert {build["is_new"] for build in json.loads(again.stdout)["builds"]} == {False}
    assert hub.requests == []


def test_installing_asks_for_trust(kernelhub: Callable[..., Result], island: Callable[[], None]) -> None:
    kernelhub("bundle", "create", "org/norm@v1", "-o", "kernels.tar.gz")
    island()
    result = kernelhub("bundle", "install", "kernels.tar.gz")
    assert isinstance(result.exception, UntrustedPublisher)


def test_nothing_is_written_when_something_could_not_be_fetched(
    kernelhub: Callable[..., Result], tmp_path: Path
) -> None:
    result = kernelhub("bundle", "create", "org/norm", "org/nothing", "-o", "kernels.tar.gz")
    assert isinstance(result.exception, PrefetchFailed)
    assert not list(tmp_path.glob("*kernels.tar.gz*"))


def test_a_lock_that_is_not_there_or_in_the_way_is_told(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    kernelhub("bundle", "create", "org/norm@v1", "org/norm@v2", "-o", "both.tar.gz")
    arguments = ["bundle", "install", "both.tar.gz", "--trust", "org/norm", "--write-lock"]
    result = kernelhub(*arguments, "new.lock")
    assert isinstance(result.exception, InvalidLockfile)
    assert "two versions of one kernel" in str(result.exception)
    (tmp_path / "old.lock").write_text("")
    assert kernelhub(*arguments, "old.lock").exit_code == 2


def test_what_is_no_bundle_is_told(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "no.tar.gz").write_bytes(b"no")
    for command in ("inspect", "install"):
        result = kernelhub("bundle", command, "no.tar.gz")
        assert isinstance(result.exception, InvalidBundle)
        assert isinstance(result.exception, KernelHubError)
