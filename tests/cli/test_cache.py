"""kernelhub cache: what is stored, whether it is good, and what may go."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build
from typer.testing import CliRunner, Result

from kernelhub import lease
from kernelhub.cli.cache import app
from kernelhub.errors import InvalidRequest, NotCached
from kernelhub.manifest import MANIFEST
from kernelhub.request import KernelRequest
from kernelhub.store import Store

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kernelhub.session import Session
    from kernelhub.store import StoredBuild

DAY = 24 * 3600


@pytest.fixture(autouse=True)
def no_leases() -> Iterator[None]:
    """What this process obtained is in use until it ends; here it has "ended"."""
    yield
    lease.drop_all()


@pytest.fixture
def builds(session: Session, hub_root: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, StoredBuild]:
    """Three stored builds, last used today, 10 and 40 days ago."""
    trust(hub_root, "org")
    for name, age in {"org/new@v1": 0, "org/new@v2": 10, "org/old@v1": 40}.items():
        repo_id, _, branch = name.partition("@")
        write_build(hub_root, repo_id, branch, "torch-cpu", {"__init__.py": f"NAME = {name!r}\n"})
        session.obtain(session.resolve(KernelRequest.parse(name)))
        [build] = [build for build in session.store.builds() if build.manifest.commit == commit(session, name)]
        os.utime(build.folder / MANIFEST, (0, time.time() - age * DAY))
    lease.drop_all()
    monkeypatch.setenv("KERNELHUB_CACHE", str(session.store.root))
    monkeypatch.setenv("HF_ENDPOINT", session.store.endpoint)
    found = {build.manifest.commit: build for build in session.store.builds()}
    return {name: found[commit(session, name)] for name in ("org/new@v1", "org/new@v2", "org/old@v1")}


def commit(session: Session, name: str) -> str:
    return session.resolve(KernelRequest.parse(name)).commit


@pytest.fixture
def cache(builds: dict[str, StoredBuild]) -> Callable[..., Result]:
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


def left(builds: dict[str, StoredBuild]) -> list[str]:
    return [name for name, build in builds.items() if build.folder.exists()]


def test_ls_tells_sizes_last_use_state_and_origin(
    cache: Callable[..., Result], builds: dict[str, StoredBuild], session: Session
) -> None:
    """REF huggingface/kernels#838, #18: where the cache is, and how to clean it up."""
    told = cache("ls").stdout
    for words in ("org/new", "torch-cpu", "self-attested", session.store.endpoint, "3 builds"):
        assert words in told
    rows = json.loads(cache("ls", "--json").stdout)
    ages = [round((time.time() - time.mktime(time.strptime(row["last_use"], "%Y-%m-%d"))) / DAY) for row in rows]
    assert sorted(ages) == pytest.approx([0, 10, 40], abs=1)
    assert [row["in_use"] for row in rows] == [False] * 3
    assert {row["size"] for row in rows} == {build.manifest.size for build in builds.values()}
    assert len(json.loads(cache("ls", "org/new@v2", "--json").stdout)) == 1


def test_builds_of_every_hub_are_listed(cache: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert len(json.loads(cache("ls", "--json").stdout)) == 3


def test_info_lists_files_and_hashes(cache: Callable[..., Result], builds: dict[str, StoredBuild]) -> None:
    build = builds["org/old@v1"]
    told = cache("info", "org/old").stdout
    assert all(file.sha256 in told and file.path in told for file in build.manifest.files)
    [facts] = json.loads(cache("info", f"org/old@{build.manifest.commit}", "--json").stdout)
    assert facts["digest"] == build.manifest.digest
    assert facts["license"] == "Apache-2.0"


def test_verify_hashes_everything_and_exits_1_on_damage(
    cache: Callable[..., Result], builds: dict[str, StoredBuild]
) -> None:
    result = cache("verify")
    assert (result.exit_code, result.stdout.count("good")) == (0, 3)
    path = builds["org/new@v1"].files_folder / "__init__.py"
    before = path.stat()
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1] + b"#")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    result = cache("verify")
    assert result.exit_code == 1
    assert "damaged  kernel build org/new@" in result.stdout
    assert "file '__init__.py' has changed since it was stored" in result.stdout
    assert "3 builds, 1 damaged" in result.stderr
    assert cache("verify", "org/old").exit_code == 0
    problems = [row["damage"] for row in json.loads(cache("verify", "--json").stdout)]
    assert [problem is None for problem in problems].count(False) == 1


def test_prune_removes_what_was_not_used(cache: Callable[..., Result], builds: dict[str, StoredBuild]) -> None:
    assert "would remove org/old@" in cache("prune", "--older-than", "30", "--dry-run").stdout
    assert len(left(builds)) == 3
    result = cache("prune", "--older-than", "30")
    assert "1 builds" in result.stderr
    assert left(builds) == ["org/new@v1", "org/new@v2"]
    assert not builds["org/old@v1"].folder.parent.parent.exists()
    assert cache("verify").exit_code == 0


def test_prune_keeps_the_newest_of_each_repository(
    cache: Callable[..., Result], builds: dict[str, StoredBuild]
) -> None:
    cache("prune", "--older-than", "5", "--keep-newest")
    assert left(builds) == ["org/new@v1", "org/old@v1"]


def test_prune_asks_what_to_remove(cache: Callable[..., Result]) -> None:
    assert isinstance(cache("prune").exception, InvalidRequest)


def test_prune_breaks_locks_of_other_machines(cache: Callable[..., Result], session: Session) -> None:
    with session.store.lock("org/new", "0" * 40, "torch-cpu"):
        pass
    left = session.store.root / "locks" / "x.lock.held"
    left.write_text(json.dumps([17, "elsewhere", 0]))
    assert (
        "would remove x.lock.held, held by process 17 on elsewhere"
        in cache("prune", "--break-lock", "--dry-run").stderr
    )
    assert left.exists()
    assert "removed x.lock.held" in cache("prune", "--break-lock").stderr
    assert not left.exists()


def test_prune_sweeps_what_dead_processes_left(cache: Callable[..., Result], session: Session) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as dead:
        pass
    with session.store.staging() as mine:
        leftover = mine.with_name(mine.name.replace(f"--{os.getpid()}--", f"--{dead.pid}--"))
        leftover.mkdir()
        cache("prune", "--older-than", "100")
        assert not leftover.exists()
        assert mine.exists()


@pytest.mark.parametrize("command", [("prune", "--older-than", "0"), ("rm", "org/new", "org/old")])
def test_r_51_what_a_process_uses_is_kept(
    cache: Callable[..., Result], builds: dict[str, StoredBuild], session: Session, command: tuple[str, ...]
) -> None:
    code = (
        "import sys; from pathlib import Path; from kernelhub import Session, load_kernel\n"
        f"store, endpoint = Path({str(session.store.root)!r}), {session.store.endpoint!r}\n"
        "session = Session(cache_dir=store, endpoint=endpoint, offline=True)\n"
        "load_kernel('org/old@v1', session=session); print(flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as user:
        assert user.stdout is not None
        assert user.stdout.readline() == b"\n"
        assert [row["in_use"] for row in json.loads(cache("ls", "--json").stdout)].count(True) == 1
        told = cache(*command)
        assert "kept org/old@" in told.stdout
        assert told.exit_code == (1 if command[0] == "rm" else 0)
        assert left(builds) == ["org/old@v1"]
        user.communicate()
    cache(*command[:2] if command[0] == "prune" else ("rm",), *command[2:])
    assert left(builds) == []


def test_where_locks_say_nothing_prune_removes_nothing(
    cache: Callable[..., Result], builds: dict[str, StoredBuild], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert cache("prune", "--older-than", "0").stdout.count("kept") == 3
    assert len(left(builds)) == 3


def test_rm_by_repository_version_and_commit(cache: Callable[..., Result], builds: dict[str, StoredBuild]) -> None:
    cache("rm", "org/new@v2")
    assert left(builds) == ["org/new@v1", "org/old@v1"]
    assert cache("rm", f"org/new@{builds['org/new@v1'].manifest.commit[:8]}", "--json").exit_code == 0
    assert left(builds) == ["org/old@v1"]
    cache("rm", "org/old")
    assert left(builds) == []


def test_what_is_not_stored_is_told(cache: Callable[..., Result]) -> None:
    assert isinstance(cache("rm", "org/none").exception, NotCached)
    assert isinstance(cache("info", "org/new@v9").exception, NotCached)
    assert isinstance(cache("ls", "builtin:RMSNorm").exception, InvalidRequest)


def test_path_shows_the_store_and_folders_in_it(
    cache: Callable[..., Result], builds: dict[str, StoredBuild], session: Session
) -> None:
    assert cache("path").stdout == f"{session.store.root}\n"
    assert cache("path", "org/old").stdout == f"{builds['org/old@v1'].files_folder}\n"


def test_an_empty_store_lists_nothing(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["ls", "--cache-dir", str(tmp_path / "none")])
    assert (result.exit_code, "0 builds" in result.stdout) == (0, True)
    assert not (tmp_path / "none").exists()
    assert list(Store(tmp_path / "none").builds()) == []
