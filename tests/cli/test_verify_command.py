"""kernelhub verify: a state for each build on this machine, and nothing is imported."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build
from typer.testing import CliRunner, Result

from kernelhub.cli import app
from kernelhub.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub

BODY = "raise RuntimeError('imported')\n"


@pytest.fixture
def kernelhub(hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    trust(hub_root, "org")
    for version in (1, 2):
        files: dict[str, str | bytes] = {"__init__.py": BODY, "part.py": f"N = {version}\n"}
        write_build(hub_root, "org/kernel", f"v{version}", "torch-cpu", files, version=version)
    write_build(hub_root, "org/old", "v1", "torch-cpu", {"__init__.py": BODY}, digest=False)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


def stored_file(tmp_path: Path, name: str) -> Path:
    return next((tmp_path / "store").rglob(name))


def test_stored_builds_are_told_with_their_state(
    kernelhub: Callable[..., Result], imported: Callable[[], list[str]]
) -> None:
    assert kernelhub("verify", "org/kernel").exit_code == 1  # there is none yet
    assert kernelhub("prefetch", "org/kernel@v1", "org/kernel@v2", "org/old").exit_code == 0
    rows = json.loads(kernelhub("verify", "--all", "--json").stdout)
    assert [(row["build"].split("@")[0], row["state"], row["problem"]) for row in rows] == [
        ("org/kernel", "self-attested", ""),
        ("org/kernel", "self-attested", ""),
        ("org/old", "unverified", ""),
    ]
    assert len(kernelhub("verify", "org/kernel").stdout.splitlines()) == 2
    assert len(kernelhub("verify", "org/kernel@v2").stdout.splitlines()) == 1
    assert not imported()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [("changed", "has changed since it was stored"), ("extra", "is not listed"), ("bytecode", "Python bytecode")],
)
def test_a_damaged_build_is_bad(kernelhub: Callable[..., Result], tmp_path: Path, damage: str, problem: str) -> None:
    """REF huggingface/kernels#635, #644, #649, #828: nobody could ask whether a cached kernel is what was published."""
    kernelhub("prefetch", "org/kernel")
    path = stored_file(tmp_path, "part.py")
    if damage == "changed":
        before = path.stat()
        path.chmod(0o644)
        path.write_text("N = 7\n")
        import os

        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        path.with_name("more.py" if damage == "extra" else "part.pyc").write_text("")
    result = kernelhub("verify", "org/kernel")
    assert result.exit_code == 1
    assert ": bad: " in result.stdout
    assert problem in result.stdout


def test_in_the_strict_mode_a_build_has_to_prove_what_it_is(
    kernelhub: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernelhub("prefetch", "org/old")
    assert kernelhub("verify", "org/old").exit_code == 0
    monkeypatch.setenv("KERNELHUB_STRICT", "1")
    assert kernelhub("verify", "org/old").exit_code == 1


def test_every_variant_of_a_folder_is_judged_also_those_for_other_machines(
    kernelhub: Callable[..., Result], tmp_path: Path
) -> None:
    for variant in ("torch-cpu", "torch-cuda", "torch29-cxx11-cu130-aarch64-linux"):
        write_build(tmp_path, "me/mine", "main", variant, {"__init__.py": BODY})
    folder = tmp_path / "me/mine/main"
    (folder / "build/torch-cuda/__init__.py").write_text("")
    (folder / "build/torch-cpu/metadata.json").write_text("{")
    rows = {row["build"].split()[-1]: row for row in json.loads(kernelhub("verify", str(folder), "--json").stdout)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "torch-cpu": "bad",
        "torch-cuda": "bad",
        "torch29-cxx11-cu130-aarch64-linux": "self-attested",
    }
    assert "1:2" in rows["torch-cpu"]["problem"]
    assert "'__init__.py' does not match the sha256" in rows["torch-cuda"]["problem"]


@pytest.mark.parametrize("kind", ["folder", "fifo", "link", "nothing"])
def test_metadata_that_is_no_file_is_bad_and_nobody_waits(
    kernelhub: Callable[..., Result], tmp_path: Path, kind: str
) -> None:
    import os

    path = write_build(tmp_path, "me/mine", "main", "torch-cpu", {"__init__.py": ""}) / "metadata.json"
    path.rename(tmp_path / "moved")
    if kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "moved")
    else:
        path.write_bytes(b"")
    result = kernelhub("verify", str(path.parent))
    assert result.exit_code == 1
    assert ": bad: invalid kernel metadata" in result.stdout


def test_a_folder_without_metadata_is_unverified(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    (tmp_path / "plain/__init__.py").write_text(BODY)
    result = kernelhub("verify", str(tmp_path / "plain"))
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path / 'plain'} plain: unverified\n")


def test_what_is_shipped_proves_itself(kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("verify", "builtin:RMSNorm")
    assert result.exit_code == 0
    assert "torch-cuda: self-attested" in result.stdout


def test_one_thing_is_asked_for(kernelhub: Callable[..., Result]) -> None:
    assert isinstance(kernelhub("verify").exception, InvalidRequest)
    assert isinstance(kernelhub("verify", "org/kernel", "--all").exception, InvalidRequest)
    assert kernelhub("verify", "--all").exit_code == 0
