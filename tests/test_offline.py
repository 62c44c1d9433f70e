"""A store that was filled once serves without any network: at its place, elsewhere, read-only, and for others."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest
from conftest import let_others_in
from kernel_repository import trust, write_build

from kernelhub.prefetch import prefetch
from kernelhub.request import KernelRequest
from kernelhub.serve import LocalHub
from kernelhub.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator

REPO = "acme/norm"
NORM = "from torch import nn\n\nclass Norm(nn.Module):\n    def forward(self, x):\n        return 7 * x\n"
SERVED = [f"{way} 7.0" for way in ("version", "revision", "lock", "mapping")]
PROGRAM = Path(__file__).parent / "offline_process.py"


class Offline(NamedTuple):
    """What the loads of one process printed for each name of a place, and what the Hub heard of them."""

    printed: dict[str, list[str]]
    requests: list[str]


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Offline:
    """Fill a store with a prefetch, then load from it in all ways and places in a process without a network."""
    folder = tmp_path_factory.mktemp("offline")
    trust(folder / "hub", "acme")
    write_build(folder / "hub", REPO, "v1", "torch-cpu", {"__init__.py": "from . import layers\n", "layers.py": NORM})
    with LocalHub(folder / "hub") as hub, contextlib.ExitStack() as stack:
        commit = fill(folder, hub.url)
        (folder / "moved").mkdir()
        shutil.copytree(folder / "store", folder / "moved" / "another place")
        places = {"store": (folder / "store", 0), "moved": (folder / "moved" / "another place", 0)}
        view = stack.enter_context(read_only(folder / "store", folder / "view"))
        places |= {"view": (view, 0)} if view else {}
        if os.geteuid() == 0:
            let_others_in(folder)
            places |= {"other user": (folder / "store", 1001)} | ({"other user, view": (view, 1002)} if view else {})
        hub.clear()
        lines = run(folder, hub.url, commit, places)
        requests = [record.path for record in hub.requests]
    printed = defaultdict(list)
    for line in lines:
        place, _, rest = line.partition(": ")
        printed[place].append(rest)
    return Offline(printed, requests)


def fill(folder: Path, endpoint: str) -> str:
    """Fetch the kernel and lock it; readable for everybody, as in an image that root makes for others."""
    session = Session(cache_dir=folder / "store", endpoint=endpoint, token=False)
    request = KernelRequest.parse(f"{REPO}@v1")
    prefetch([request], session)
    session.make_lock([request]).write(folder / "kernelhub.lock")
    for path in (folder / "kernelhub.lock", folder / "store", *(folder / "store").rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return next(session.store.builds()).manifest.commit


@contextlib.contextmanager
def read_only(folder: Path, view: Path) -> Iterator[Path | None]:
    """The folder through a read-only mount; None where that is not allowed."""
    view.mkdir()
    if subprocess.run(["mount", "--bind", folder, view], capture_output=True).returncode:
        yield None
        return
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", view], check=True)
        yield view
    finally:
        subprocess.run(["umount", view], check=True)


def run(folder: Path, endpoint: str, commit: str, places: dict[str, tuple[Path, int]]) -> list[str]:
    """The output of the program, which has a network without any device where that is allowed."""
    unshare = ["unshare", "-n"]
    if shutil.which("unshare") is None or subprocess.run([*unshare, "true"], capture_output=True).returncode:
        unshare = []
    words = [word for name, (place, user) in places.items() for word in (name, str(place), str(user))]
    command = [*unshare, sys.executable, str(PROGRAM), commit, str(folder / "kernelhub.lock"), *words]
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": "1", "HF_HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    settings |= {"XDG_CONFIG_HOME": "/nonexistent", "PYTHONPATH": str(PROGRAM.parents[1])}
    done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_r_47_after_a_prefetch_every_way_to_ask_is_served_without_a_socket(offline: Offline) -> None:
    """REF huggingface/kernels#553, #554, #580, #746: cached, and yet the list of variants was asked for.

    REF huggingface/kernels#10, #15: kernels that are brought into a container before it runs.
    """
    assert offline.printed["store"] == SERVED
    assert offline.requests == []


def test_r_47_a_store_that_was_moved_serves_every_way(offline: Offline) -> None:
    assert offline.printed["moved"] == SERVED


def test_r_47_r_7_a_read_only_store_serves_every_way(offline: Offline) -> None:
    """REF huggingface/huggingface_hub#2797: a filled read-only cache could not be used."""
    if "view" not in offline.printed:
        pytest.skip("needs the right to mount a folder")
    assert offline.printed["view"] == SERVED


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become somebody else")
def test_r_47_another_user_is_served_every_way(offline: Offline) -> None:
    assert offline.printed["other user"] == SERVED
    assert offline.printed.get("other user, view", SERVED) == SERVED
