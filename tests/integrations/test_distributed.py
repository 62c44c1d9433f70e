"""Ranks as real processes over gloo: one answer for all, the same code for all, and a failure that all hear of."""

from __future__ import annotations

import json
import os
import pickle
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

from kernelhub.errors import RanksDiffer, RepositoryNotFound
from kernelhub.integrations.distributed import kernelize_together, load_together, resolve_together
from kernelhub.request import KernelRequest
from kernelhub.serve import LocalHub

if TYPE_CHECKING:
    from kernelhub.session import Session

TESTS = Path(__file__).parents[1]
WORKER = Path(__file__).parent / "rank_worker.py"
NORM = """
import torch

WHO = "norm"

class Norm(torch.nn.Module):
    def forward(self, x):
        return torch.full_like(x, 7.0)
"""
GATE = NORM.replace("Norm", "Gate").replace("norm", "gate")
PICKY = f"import os\nassert os.environ['RANK'] != '1', 'not on rank 1'\n{NORM}"
SCENARIOS = [
    "same_code",
    "symbol",
    "shared_store",
    "moving_branch",
    "branch_moves_between_stores",
    "tampered_store",
    "tampered_store_on_binding",
    "unknown_kernel",
    "untrusted_kernel",
    "trusted_by_the_caller",
    "one_rank_without_network",
    "one_rank_fails_to_import",
    "binding",
    "binding_nothing",
    "one_rank_fails_to_bind",
    "in_a_group",
    "shipped_collection",
    "pinned_by_a_policy",
]

Seen = dict[str, list[dict[str, Any]]]


def write_repositories(root: Path) -> None:
    trust(root, "org")
    for name, code in {"norm": NORM, "gate": GATE, "picky": PICKY, "once": "", "moving": "STATE = 'first'\n"}.items():
        write_build(root, f"org/{name}", "v1", "torch-cpu", {"__init__.py": code})
    write_build(root, "stranger/kernel", "v1", "torch-cpu", {"__init__.py": "WHO = 'stranger'\n"})


@pytest.fixture(scope="module", params=[2, 4])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Seen, list[str]]:
    """All scenarios on so many ranks: their number, what each rank saw, and the downloads of ``org/once``."""
    folder, size = tmp_path_factory.mktemp("job"), request.param
    root = folder / "repositories"
    root.mkdir()
    write_repositories(root)
    with LocalHub(root) as hub:
        start(folder, hub.url, size)
    seen = [json.loads((folder / f"seen-{rank}.json").read_text()) for rank in range(size)]
    downloads = [path.rpartition("/")[2] for record in hub.requests if "/org/once/resolve/" in (path := record.path)]
    return size, {name: [rank[name] for rank in seen] for name in SCENARIOS}, downloads


def start(folder: Path, endpoint: str, size: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent)]),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(size),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, str(WORKER), str(folder), endpoint, ",".join(SCENARIOS)]
    ranks = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        told = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size, "\n".join(told)


def values(job: tuple[int, Seen, list[str]], scenario: str) -> list[Any]:
    return [rank.get("value", rank.get("text")) for rank in job[1][scenario]]


def errors(job: tuple[int, Seen, list[str]], scenario: str) -> list[tuple[str, str]]:
    return [(rank.get("error", ""), rank.get("text", "")) for rank in job[1][scenario]]


def test_all_ranks_load_the_same_kernel(job: tuple[int, Seen, list[str]]) -> None:
    assert values(job, "same_code") == ["norm"] * job[0]
    assert values(job, "symbol") == ["Norm"] * job[0]


def test_ranks_of_one_machine_download_once(job: tuple[int, Seen, list[str]]) -> None:
    """REF pytorch/pytorch#68320, #195294; modelscope/ms-swift#9447: all ranks downloaded at once."""
    assert values(job, "shared_store") == [1] * job[0]
    assert sorted(job[2]) == ["__init__.py", "metadata.json"]


def test_s_03_a_branch_that_moves_meanwhile_is_the_same_for_all(job: tuple[int, Seen, list[str]]) -> None:
    pins = values(job, "moving_branch")
    assert len({pinned for pinned, _ in pins}) == 1
    assert all(pinned != alone for pinned, alone in pins)


def test_what_rank_0_remembers_counts_for_all(job: tuple[int, Seen, list[str]]) -> None:
    assert values(job, "branch_moves_between_stores") == [[rank, 0] for rank in range(job[0])]


@pytest.mark.parametrize("scenario", ["tampered_store", "tampered_store_on_binding"])
def test_s_03_a_rank_with_other_code_is_named_on_all_ranks_before_the_import(
    scenario: str, job: tuple[int, Seen, list[str]]
) -> None:
    told = errors(job, scenario)
    assert {kind for kind, _ in told} == {"RanksDiffer"}
    assert all(f"rank {job[0] - 1} differs from rank 0" in text for _, text in told)


@pytest.mark.parametrize(
    ("scenario", "error"), [("unknown_kernel", "RepositoryNotFound"), ("untrusted_kernel", "UntrustedPublisher")]
)
def test_what_rank_0_cannot_resolve_is_the_same_error_everywhere(
    scenario: str, error: str, job: tuple[int, Seen, list[str]]
) -> None:
    assert len(set(errors(job, scenario))) == 1
    assert errors(job, scenario)[0][0] == error


def test_an_opt_in_of_the_caller_counts_on_all_ranks(job: tuple[int, Seen, list[str]]) -> None:
    assert values(job, "trusted_by_the_caller") == ["stranger"] * job[0]


@pytest.mark.parametrize(
    ("scenario", "failing", "own", "words"),
    [
        ("one_rank_without_network", -1, "NotCached", "obtaining kernels failed on rank"),
        ("one_rank_fails_to_import", 1, "ImportFailed", "importing kernels failed on rank 1"),
        ("one_rank_fails_to_bind", 1, "ImportFailed", "binding kernels failed on rank 1"),
        ("pinned_by_a_policy", -1, "PinMismatch", "using the kernels that rank 0 found failed on rank"),
    ],
)
def test_a_rank_that_fails_stops_all_and_is_named(
    scenario: str, failing: int, own: str, words: str, job: tuple[int, Seen, list[str]]
) -> None:
    told = errors(job, scenario)
    assert told.pop(failing)[0] == own
    assert {kind for kind, _ in told} == {"RankFailed"}
    assert all(words in text and own in text for _, text in told)


def test_ranks_with_different_layers_bind_what_each_has(job: tuple[int, Seen, list[str]]) -> None:
    assert values(job, "binding") == [[True, [True]]] * (job[0] - 1) + [[True, [True, True]]]


def test_a_symbol_that_is_not_there_fails_alike_everywhere(job: tuple[int, Seen, list[str]]) -> None:
    assert {kind for kind, _ in errors(job, "binding_nothing")} == {"SymbolNotFound"}


def test_a_group_has_its_own_first_rank(job: tuple[int, Seen, list[str]]) -> None:
    assert values(job, "in_a_group") == [None, *["norm"] * (job[0] - 1)]


def test_what_is_shipped_is_read_where_each_rank_has_it(job: tuple[int, Seen, list[str]]) -> None:
    assert values(job, "shipped_collection") == [["builtin", True]] * job[0]


# One process


@pytest.fixture
def root(hub_root: Path) -> Path:
    write_repositories(hub_root)
    return hub_root


def test_without_a_process_group_it_is_as_for_one_process(root: Path, session: Session) -> None:
    from torch import nn

    [pin] = resolve_together(["org/norm@v1"], session)
    assert load_together("org/norm", version=1, session=session).WHO == "norm"
    model = kernelize_together(nn.Sequential(nn.RMSNorm(4)), {"RMSNorm": "org/norm@v1:Norm"}, session=session)
    assert "forward" in vars(model[0])  # type: ignore[index]
    assert pin.variant == "torch-cpu"
    with pytest.raises(RepositoryNotFound):
        load_together("org/nothing", session=session)


def test_s_03_a_resolution_is_pickled_whole(root: Path, session: Session) -> None:
    needs = {"kernel-depends": [{"repo-id": "org/norm", "version": 1}]}
    write_build(root, "org/top", "v1", "torch-cpu", {"__init__.py": ""}, metadata_overrides=needs)
    write_build(root, "org/top", "v1", "torch-cuda", {"__init__.py": ""})
    write_build(root, "org/top", "v1", "no variant", {"__init__.py": ""})
    for request in ("org/top@v1", "builtin", str(root / "org" / "norm" / "v1")):
        resolution = session.resolve(KernelRequest.parse(request))
        copy = pickle.loads(pickle.dumps(resolution))
        assert copy == resolution
        assert copy.metadata_bytes == resolution.metadata_bytes
        assert [found.build for found in copy.tree()] == [found.build for found in resolution.tree()]


def test_s_03_a_pin_is_obtained_without_another_question_about_its_branch(root: Path, session: Session) -> None:
    [pin] = resolve_together(["org/moving@v1"], session)
    write_build(root, "org/moving", "v1", "torch-cpu", {"__init__.py": "STATE = 'moved'\n"})
    fresh = replace(session, cache_dir=session.store.root.parent / "fresh")
    build = fresh.obtain(pickle.loads(pickle.dumps(pin)))
    assert "first" in (build.folder / "__init__.py").read_text()


def test_ranks_that_differ_are_named_against_the_first_that_holds_the_kernel() -> None:
    error = RanksDiffer("org/norm@cccc torch-cpu", {2: "a" * 64, 3: "b" * 64, 5: "b" * 64})
    assert "ranks 3, 5 differ from rank 2" in str(error)
