"""A clock that jumps: what was stored stays right, whatever year it is."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build
from typer.testing import CliRunner

from kernelhub import load_kernel
from kernelhub.cli import app
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.session import Session

TEN_YEARS = 10 * 365 * 86_400
REPO = "acme/relu"


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "acme")
    for version in (1, 2):
        files = {"__init__.py": f"VERSION = {version}\n"}
        write_build(hub_root, REPO, f"v{version}", "torch-cpu", files, version=version)
    return hub_root


@pytest.fixture
def jump(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Set the clock of this process so many seconds off."""
    real = time.time
    return lambda seconds: monkeypatch.setattr(time, "time", lambda: real() + seconds)


@pytest.mark.parametrize("seconds", [-TEN_YEARS, TEN_YEARS])
def test_r_38_loads_do_not_depend_on_the_clock(
    seconds: float,
    root: Path,
    session: Session,
    reporter: Recorder,
    jump: Callable[[float], None],
    forget_kernels: Callable[[], None],
) -> None:
    request = KernelRequest.parse(f"{REPO}@v1")
    lock = session.make_lock([request])
    assert load_kernel(REPO, session=session).VERSION == 1
    for shift in (seconds, 0.0, -seconds, seconds):
        jump(shift)
        for asked in (f"{REPO}@v1", f"{REPO}@{lock.kernels[0].commit}", f"{REPO}@v2"):
            forget_kernels()
            assert 1 + asked.endswith("v2") == load_kernel(asked, session=replace(session)).VERSION
            forget_kernels()
            assert 1 + asked.endswith("v2") == load_kernel(asked, session=replace(session, offline=True)).VERSION
        assert load_kernel(REPO, session=replace(session, lockfile=lock, offline=True)).VERSION == 1
    assert reporter.warnings == []


@pytest.mark.parametrize("seconds", [-TEN_YEARS, TEN_YEARS])
def test_r_38_what_is_in_use_is_not_pruned_for_its_age(
    seconds: float, root: Path, session: Session, jump: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernel(REPO, session=session)
    jump(seconds)
    monkeypatch.setenv("KERNELHUB_CACHE", str(session.store.root))
    result = CliRunner().invoke(app, ["cache", "prune", "--older-than", "30"])
    assert result.exit_code == 0, result.output
    assert len(list(session.store.builds())) == 1
