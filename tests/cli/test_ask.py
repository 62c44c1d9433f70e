"""explain, versions, variants, info, prefetch and lock over HTTP."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build
from typer.testing import CliRunner, Result

from kernelhub.cli import app
from kernelhub.errors import KernelHubError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub

H200 = "torch=2.13,cuda=13.0,sm=90,cpu=x86_64,os=linux"


@pytest.fixture
def kernelhub(hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line, asking a Hub with a trusted and an untrusted kernel."""
    trust(hub_root, "org")
    for version in ("v1", "v2", "v10"):
        write_build(hub_root, "org/kernel", version, "torch-cpu", {"__init__.py": f"version = {version!r}\n"})
    for minor in range(20):
        name = f"torch2{minor}-cxx11-cu126-x86_64-linux"
        write_build(hub_root, "org/kernel", "v10", name, {"__init__.py": ""}, archs=["9.0"])
    write_build(hub_root, "org/old", "v1", "torch28-cxx11-cpu-x86_64-linux", {"__init__.py": ""})
    write_build(hub_root, "org/old", "v3", "torch-universal", {"__init__.py": ""})
    write_build(hub_root, "stranger/kernel", "v1", "torch-cpu", {"__init__.py": ""})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


def failure(result: Result) -> str:
    assert isinstance(result.exception, KernelHubError)
    return str(result.exception)


def test_explain_shows_the_choice_and_how_to_pin_it(kernelhub: Callable[..., Result]) -> None:
    """REF radixark/miles#2207; NVIDIA-NeMo/Automodel#3426; vllm-project/vllm-omni#4926: what is a version, what a
    commit, and which was taken.
    """
    told = kernelhub("explain", "org/kernel").stdout
    assert "pin it as org/kernel@v1" in told
    assert "choice       torch-cpu, the best of 1 that fit" in told
    assert "trust        publisher org is trusted" in told
    assert "download     2 files" in told


def test_explain_keeps_many_variants_on_one_screen_and_gives_each_reason(kernelhub: Callable[..., Result]) -> None:
    told = kernelhub("explain", "org/kernel@v10").stdout
    assert len(told.splitlines()) < 40
    assert "and 17 more" in told
    reasons = json.loads(kernelhub("explain", "org/kernel@v10", "--json").stdout)["rejected"]
    assert len(reasons) == 20
    assert all(reasons.values())


def test_explain_answers_for_another_machine(kernelhub: Callable[..., Result]) -> None:
    told = json.loads(kernelhub("explain", "org/kernel@v10", "--target", H200, "--json").stdout)
    assert (
        told["verdict"].startswith("no build fits") or told["build"]["variant"] == "torch213-cxx11-cu126-x86_64-linux"
    )


def test_explain_says_which_version_would_fit_when_none_does(kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("explain", "org/old")
    assert result.exit_code == 0
    assert "choice       no build fits" in result.stdout
    assert "ask for 'org/old@v3'" in result.stdout


def test_explain_tells_that_a_publisher_is_not_trusted_and_what_to_pass(kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("explain", "stranger/kernel")
    assert "NOT TRUSTED" in result.stdout
    assert "trust_remote_code=['stranger/kernel']" in result.stdout


def test_explain_downloads_nothing(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    """REF Dao-AILab/flash-attention#847, #2425, #1489: an address was guessed, or an hour-long build begun; here the
    listing is asked first.
    """
    kernelhub("explain", "org/kernel")
    assert list((tmp_path / "store").glob("hubs/*/builds/*")) == []


def test_explain_on_a_repository_with_many_variants_needs_at_most_four_requests(
    kernelhub: Callable[..., Result], hub: LocalHub, hub_root: Path
) -> None:
    for minor in range(5, 25):
        for cuda in ("cu126", "cu128", "cu130"):
            name = f"torch2{minor}-cxx11-{cuda}-x86_64-linux"
            write_build(hub_root, "org/many", "v1", name, {"__init__.py": ""})
    write_build(hub_root, "org/many", "v1", "torch-universal", {"__init__.py": ""})
    hub.clear()
    assert kernelhub("explain", "org/many").exit_code == 0
    asked = [record.path for record in hub.requests if "agent-harnesses" not in record.path]
    assert len(asked) <= 4, asked


def test_versions_are_in_numeric_order_with_the_build_that_fits(kernelhub: Callable[..., Result]) -> None:
    lines = kernelhub("versions", "org/kernel").stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["v1", "v2", "v10"]
    assert all("torch-cpu" in line for line in lines)


def test_variants_are_listed_with_one_reason_each(kernelhub: Callable[..., Result]) -> None:
    """REF huggingface/kernels#595, #685, #674, #412, #420: a command that lists variants with reasons was missing."""
    rows = json.loads(kernelhub("variants", "org/kernel@v10", "--json").stdout)
    assert rows["torch-cpu"] == "fits"
    assert len(rows) == 21


def test_info_shows_license_digest_and_size(kernelhub: Callable[..., Result]) -> None:
    facts = json.loads(kernelhub("info", "org/kernel@v1", "--json").stdout)
    assert facts["license"] == "Apache-2.0"
    assert facts["digest"] == "sha256"
    assert facts["bytes"] > 0


def test_an_unknown_version_is_told_with_those_that_exist(kernelhub: Callable[..., Result]) -> None:
    assert "v1, v2, v10" in failure(kernelhub("explain", "org/kernel@v3"))


def test_prefetch_stores_what_a_later_offline_load_needs(kernelhub: Callable[..., Result], hub: LocalHub) -> None:
    result = kernelhub("prefetch", "org/kernel@v2")
    assert result.exit_code == 0, result.output
    assert "self-attested" in result.stdout
    hub.clear()
    assert "torch-cpu" in kernelhub("explain", "org/kernel@v2", "--offline").stdout
    assert hub.requests == []


def test_prefetch_asks_for_trust_like_every_other_entry(kernelhub: Callable[..., Result]) -> None:
    assert "stranger" in failure(kernelhub("prefetch", "stranger/kernel"))
    assert kernelhub("prefetch", "stranger/kernel", "--trust", "stranger/kernel").exit_code == 0


def test_a_lock_is_written_checked_and_upgraded(kernelhub: Callable[..., Result], hub_root: Path) -> None:
    assert kernelhub("lock", "org/kernel@v1").exit_code == 0
    assert kernelhub("lock", "--check").exit_code == 0
    write_build(hub_root, "org/kernel", "v1", "torch-cpu", {"__init__.py": "changed = True\n"})
    stale = kernelhub("lock", "--check")
    assert stale.exit_code == 1
    assert "stale: org/kernel@v1" in stale.stdout
    assert kernelhub("lock").exit_code == 0
    assert kernelhub("lock", "--check").exit_code == 1  # only an upgrade moves what is locked
    assert kernelhub("lock", "--upgrade", "org/kernel").exit_code == 0
    assert kernelhub("lock", "--check").exit_code == 0


def test_s_30_a_check_names_what_is_missing_and_what_is_extra(kernelhub: Callable[..., Result]) -> None:
    kernelhub("lock", "org/kernel@v1")
    told = kernelhub("lock", "--check", "org/old@v3")
    assert told.exit_code == 1
    assert "missing: " in told.stdout
    assert "extra: org/kernel@v1" in told.stdout


def test_a_lock_without_requests_follows_the_project(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    assert "nothing to lock" in failure(kernelhub("lock"))
    (tmp_path / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"org/kernel" = 2\n')
    assert kernelhub("lock").exit_code == 0
    assert "org/kernel@v2" in (tmp_path / "kernelhub.lock").read_text()
