"""Prefetch: for this machine, for others, for all; from strings, configs and locks; what fails stops nothing else."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build
from typer.testing import CliRunner

from kernelhub import KernelConfig, kernelize, load_kernel
from kernelhub.cli import app
from kernelhub.environment import Environment
from kernelhub.errors import InvalidEnvironment, InvalidRequest, NotCached
from kernelhub.prefetch import choices_for, plan_prefetch, prefetch
from kernelhub.request import KernelRequest
from kernelhub.resolution import Resolution

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.prefetch import PrefetchReport
    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

H100 = Environment.parse("h100")
MAC = Environment.parse("mac")
CUDA = "torch213-cxx11-cu130-x86_64-linux"
METAL = "torch213-metal-aarch64-darwin"
KERNEL = KernelRequest.parse("org/kernel@v1")


@pytest.fixture
def root(hub_root: Path) -> Path:
    """``org/kernel`` for three kinds of machine, which needs ``org/base``; and a kernel of a stranger."""
    trust(hub_root, "org")
    needs = {"kernel-depends": [{"repo-id": "org/base", "version": 2}]}
    for variant in ("torch-cpu", CUDA, METAL):
        files = {"__init__.py": f"BUILD = {variant!r}\n"}
        write_build(hub_root, "org/kernel", "v1", variant, files, metadata_overrides=needs)
        write_build(hub_root, "org/base", "v2", variant, files)
    write_build(hub_root, "stranger/kernel", "v1", "torch-cpu", {"__init__.py": ""})
    return hub_root


def rows(report: PrefetchReport) -> list[tuple[str, str, str]]:
    return [(row.kernel or row.request, row.variant, row.state) for row in report.rows]


def offline(session: Session, environment: Environment | None = None) -> Session:
    return replace(session, offline=True, environment=environment or session.environment)


def test_a_kernel_comes_with_those_it_depends_on(root: Path, session: Session) -> None:
    report = prefetch([KERNEL], session)
    assert rows(report) == [("org/base", "torch-cpu", "fetched"), ("org/kernel", "torch-cpu", "fetched")]
    assert [row.verification for row in report.rows] == ["self-attested", "self-attested"]
    assert all(str(session.store.root) in row.folder for row in report.rows)


def test_what_is_stored_is_not_fetched_again(root: Path, session: Session, asked: Callable[[], list[str]]) -> None:
    prefetch([KERNEL], session)
    asked()
    again = prefetch([KERNEL], replace(session))
    assert {row.state for row in again.rows} == {"stored"}
    assert asked() == []


def test_several_targets_get_what_each_of_them_would_load(root: Path, session: Session) -> None:
    report = prefetch([KERNEL], session, targets=[H100, MAC])
    assert [(row.kernel, row.variant) for row in report.rows] == [
        ("org/base", CUDA),
        ("org/kernel", CUDA),
        ("org/base", METAL),
        ("org/kernel", METAL),
    ]
    assert {row.target for row in report.rows} == {str(H100), str(MAC)}


@pytest.mark.parametrize("request_", ["org/kernel", "org/kernel@v1", "org/kernel@latest", "org/kernel@>=1", "COMMIT"])
def test_another_machine_resolves_offline_to_the_build_that_was_fetched_for_it(
    request_: str, root: Path, session: Session, hub: LocalHub
) -> None:
    report = prefetch([KERNEL], session, targets=[H100])
    commit = report.rows[-1].commit
    hub.clear()
    there = offline(session, H100)
    found = there.resolve(KernelRequest.parse(f"org/kernel@{commit}" if request_ == "COMMIT" else request_))
    build = there.obtain(found)
    assert (found.commit, found.variant) == (commit, CUDA)
    assert build.dependencies[0].variant == CUDA
    assert hub.requests == []


def test_another_machine_follows_a_lock_offline(root: Path, session: Session, tmp_path: Path, hub: LocalHub) -> None:
    lock = session.make_lock([KERNEL])
    lock.write(tmp_path / "kernelhub.lock")
    locked = replace(session, lockfile=tmp_path / "kernelhub.lock")
    prefetch([kernel.request for kernel in lock.kernels if not kernel.dependency], locked, targets=[H100])
    hub.clear()
    there = offline(locked, H100)
    assert there.obtain(there.resolve(KERNEL)).variant == CUDA
    assert hub.requests == []


def test_a_best_build_that_its_metadata_rules_out_does_not_stop_an_offline_load(root: Path, session: Session) -> None:
    """What resolution read of a build that it then refused is needed again offline."""
    write_build(root, "org/picky", "v1", "torch213-cxx11-cu130-x86_64-linux", {"__init__.py": ""}, archs=["12.0"])
    write_build(root, "org/picky", "v1", "torch-cuda", {"__init__.py": ""})
    request = KernelRequest.parse("org/picky@v1")
    assert rows(prefetch([request], session, targets=[H100])) == [("org/picky", "torch-cuda", "fetched")]
    assert offline(session, H100).resolve(request).variant == "torch-cuda"


def test_all_variants_are_every_build_of_every_kernel(root: Path, session: Session) -> None:
    report = prefetch([KERNEL], session, all_variants=True)
    assert {(row.kernel, row.variant) for row in report.rows} == {
        (kernel, variant) for kernel in ("org/base", "org/kernel") for variant in ("torch-cpu", CUDA, METAL)
    }
    assert {row.state for row in report.rows} == {"fetched"}
    assert {row.target for row in report.rows} == {"all variants"}


def test_one_broken_build_does_not_stop_the_other_variants(root: Path, session: Session) -> None:
    broken = root / "org" / "kernel" / "v1" / "build" / METAL / "metadata.json"
    broken.write_text("{")
    report = prefetch([KERNEL], session, all_variants=True)
    assert [row.request for row in report.failures] == [f"org/kernel@{report.rows[-2].commit[:12]} {METAL}"]
    assert len(report.rows) == 6


def test_all_variants_ask_for_trust_too(root: Path, session: Session) -> None:
    report = prefetch([KernelRequest.parse("stranger/kernel")], session, all_variants=True)
    assert "trust_remote_code=['stranger/kernel']" in report.failures[0].error
    assert list(session.store.builds()) == []


def test_a_failing_request_does_not_stop_the_others(root: Path, session: Session) -> None:
    requests = map(KernelRequest.parse, ["org/nothing", "stranger/kernel", "org/kernel@v9", "org/base@v2"])
    report = prefetch(requests, session)
    assert [row.state for row in report.rows] == ["failed", "failed", "failed", "fetched"]
    assert "3 failed" in report.summary
    assert not report.to_dict()["ok"]


def test_a_build_that_fails_verification_is_a_failure_and_not_stored(root: Path, session: Session) -> None:
    (root / "org" / "base" / "v2" / "build" / "torch-cpu" / "__init__.py").write_text("changed = 1\n")
    report = prefetch([KERNEL], session)
    assert rows(report) == [("org/base", "torch-cpu", "failed"), ("org/kernel", "torch-cpu", "fetched")]
    assert "does not match" in report.failures[0].error


def test_a_dry_run_tells_sizes_and_fetches_nothing(root: Path, session: Session) -> None:
    """REF NVlabs/ToolOrchestra#5: what will be fetched can be asked first."""
    plan = plan_prefetch([KERNEL], session, targets=[H100, MAC])
    report = plan.report()
    assert {row.state for row in report.rows} == {"would fetch"}
    assert all(row.bytes > 0 for row in report.rows)
    assert plan.missing.keys() == {f"{row.kernel}@{row.commit[:12]} {row.variant}" for row in report.rows}
    assert report.summary == f"total: 4 would fetch ({sum(plan.missing.values())} bytes)"
    assert list(session.store.builds()) == []


def test_a_build_that_several_requests_share_counts_once(root: Path, session: Session) -> None:
    requests = [KERNEL, KernelRequest.parse("org/base@v2"), KernelRequest.parse("org/kernel@v1:Symbol")]
    report = plan_prefetch(requests, session).report()
    assert report.summary.startswith("total: 2 would fetch")
    assert len(report.rows) == 3


def test_the_report_is_plain_data(root: Path, session: Session) -> None:
    facts = json.loads(json.dumps(prefetch([KERNEL], session).to_dict()))
    assert facts["ok"]
    assert {"request", "target", "commit", "variant", "bytes", "state", "error"} <= facts["rows"][0].keys()


def test_a_machine_without_torch_has_to_name_the_target(root: Path, session: Session) -> None:
    nothing = replace(session, environment=Environment.parse("cpu=x86_64,os=linux"))
    with pytest.raises(InvalidEnvironment, match=r"Torch is not installed here.*--target h100"):
        plan_prefetch([KERNEL], nothing)
    assert prefetch([KERNEL], nothing, targets=[H100]).rows[-1].variant == CUDA
    assert len(prefetch([KERNEL], nothing, all_variants=True).rows) == 6


@pytest.mark.parametrize("local", ["builtin:RMSNorm", "/abs:Norm"])
def test_a_request_on_this_machine_is_refused_and_in_a_config_it_is_skipped(
    local: str, root: Path, session: Session
) -> None:
    with pytest.raises(InvalidRequest, match="is on this machine already"):
        plan_prefetch([KernelRequest.parse(local)], session)
    config = KernelConfig({"RMSNorm": local, "MLP": "org/base@v2:MLP"})
    report = prefetch([], session, config=config)
    assert [row.state for row in report.rows] == ["local", "fetched"]
    assert prefetch([], session, config=config, all_variants=True).rows[0].state == "local"


# Configs

MAPPING = {
    "RMSNorm": {"cuda": {"training": "org/train:Norm", "inference": "org/infer:Norm"}, "cpu": "org/cpu:Norm"},
    "MLP": "org/any:MLP",
    "Gate": "",
    "Fast": {"cuda>=10": "org/new:Fast", "cuda": "org/old:Fast"},
}


@pytest.mark.parametrize(
    ("target", "repositories"),
    [
        ("h100", {"org/train", "org/infer", "org/any", "org/old"}),
        ("b200", {"org/train", "org/infer", "org/any", "org/new"}),
        ("torch=2.13,cuda=13.0", {"org/train", "org/infer", "org/any", "org/old", "org/new"}),
        ("linux-cpu", {"org/cpu", "org/any"}),
        ("mac", {"org/any"}),
    ],
)
def test_of_a_config_a_target_gets_what_it_may_ask_for_in_any_mode(target: str, repositories: set[str]) -> None:
    found = choices_for(KernelConfig(MAPPING), Environment.parse(target))
    assert {choice.request.repo_id for choice in found} == repositories


def test_what_a_config_says_about_trust_counts_for_that_kernel_only(root: Path, session: Session) -> None:
    config = KernelConfig({"MLP": ("stranger/kernel:MLP", {"trust_remote_code": True}), "Norm": "org/base@v2:Norm"})
    assert [row.state for row in prefetch([], session, config=config).rows] == ["fetched", "fetched"]
    again = prefetch([KernelRequest.parse("stranger/kernel")], session)
    assert [row.state for row in again.rows] == ["failed"]


def test_a_prefetched_config_loads_offline(root: Path, session: Session, hub: LocalHub) -> None:
    prefetch([], session, config=KernelConfig({"Norm": "org/kernel@v1:Norm"}))
    hub.clear()
    assert load_kernel("org/kernel@v1", session=offline(session)).BUILD == "torch-cpu"
    assert hub.requests == []


def test_offline_what_was_never_fetched_is_told_with_the_command_for_this_target(root: Path, session: Session) -> None:
    prefetch([KERNEL], session, targets=[MAC])
    with pytest.raises(NotCached) as caught:
        offline(session, H100).resolve(KERNEL)
    assert f"run: kernelhub prefetch 'org/kernel@v1' --target '{H100}'" in str(caught.value)


def test_a_resolution_of_a_plan_belongs_to_the_build_it_names(root: Path, session: Session) -> None:
    plan = plan_prefetch([KERNEL], session, targets=[H100])
    assert all(isinstance(found, Resolution) and found.variant == CUDA for found in plan.resolutions)


def test_offline_all_that_a_config_lacks_is_told_at_once_with_commands_that_fetch_it(
    root: Path, session: Session
) -> None:
    from torch import nn

    code = "import torch\nclass Norm(torch.nn.Module):\n    def forward(self, x):\n        return x\n"
    for name in ("one", "two"):
        write_build(root, f"org/{name}", "v1", "torch-cpu", {"__init__.py": code})
    model = nn.Sequential(nn.RMSNorm(4), nn.LayerNorm(4))
    config = KernelConfig({"RMSNorm": "org/one@v1:Norm", "LayerNorm": "org/two@v1:Norm"})
    prefetch([KernelRequest.parse("org/base@v2")], session)  # so that the publisher is known
    with pytest.raises(NotCached) as caught:
        kernelize(model, config, session=offline(session))
    told = str(caught.value)
    assert "kernel org/one" in told
    assert "kernel org/two" in told
    command = told.rpartition("run: ")[2]
    assert command.startswith("kernelhub prefetch 'org/one@v1' 'org/two@v1' --target 'torch=")
    runner = CliRunner(env={"HF_ENDPOINT": session.store.endpoint, "KERNELHUB_CACHE": str(session.store.root)})
    assert runner.invoke(app, shlex.split(command)[1:]).exit_code == 0
    assert kernelize(model, config, session=offline(session)) is model
