"""Who may run code here: the caller's opt-in, the Hub's mark, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from kernel_repository import trust, write_build

import kernelhub
from kernelhub.errors import InvalidRequest, PinMismatch, UnsignedKernel, UntrustedPublisher
from kernelhub.hub import HubIndex
from kernelhub.request import KernelRequest
from kernelhub.trust import TrustPolicy

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session


@pytest.fixture
def index(hub: LocalHub, hub_root: Path) -> HubIndex:
    trust(hub_root, "acme")
    write_build(hub_root, "someone/relu", "v1", "torch-cpu", {"__init__.py": ""})
    return HubIndex(hub.url, token=False)


def test_a_publisher_that_the_hub_marks_is_trusted(index: HubIndex) -> None:
    assert TrustPolicy().check("acme/relu", index, requested=True).startswith("publisher acme is trusted by http://")


@pytest.mark.parametrize("publisher", ["someone", "nobody"])
def test_other_publishers_are_not(index: HubIndex, publisher: str) -> None:
    with pytest.raises(UntrustedPublisher, match="which is not a trusted kernel publisher"):
        TrustPolicy().check(f"{publisher}/relu", index, requested=True)


def test_true_covers_what_was_asked_for_and_nothing_that_it_needs(index: HubIndex) -> None:
    policy = TrustPolicy.of(True)
    assert policy.check("someone/relu", index, requested=True) == "opted in by the caller"
    with pytest.raises(UntrustedPublisher):
        policy.check("someone/relu", index, requested=False)


def test_a_list_covers_the_repositories_that_it_names(index: HubIndex) -> None:
    policy = TrustPolicy.of(["someone/relu"])
    assert policy.check("someone/relu", index, requested=False) == "opted in by the caller"
    for repo_id in ("someone/gelu", "someone/Relu", "other/relu"):
        with pytest.raises(UntrustedPublisher):
            policy.check(repo_id, index, requested=True)


def test_two_opt_ins_are_one(index: HubIndex) -> None:
    policy = TrustPolicy.of(["someone/relu"]).union(TrustPolicy.of(True))
    assert policy.check("someone/relu", index, requested=False)
    assert policy.check("someone/gelu", index, requested=True)


@pytest.mark.parametrize(
    ("value", "problem"),
    [("someone/relu", "trust_remote_code is a string"), (["someone"], "no organization"), (["a/b/c"], "too many '/'")],
)
def test_an_opt_in_that_names_no_repository_is_refused(value: str | list[str], problem: str) -> None:
    with pytest.raises(InvalidRequest, match=problem):
        TrustPolicy.of(value)


@pytest.mark.parametrize(
    "publisher", ["kernels-communlty", "Kernels-Community", "kernel-community", "kernelscommunity"]
)
def test_s_06_a_name_close_to_a_known_publisher_is_pointed_out(index: HubIndex, publisher: str) -> None:
    with pytest.raises(UntrustedPublisher, match="did you mean 'kernels-community'") as caught:
        TrustPolicy().check(f"{publisher}/relu", index, requested=True)
    assert f"trust_remote_code=['{publisher}/relu']" in str(caught.value)
    assert "trust_remote_code=True" not in str(caught.value)


def test_a_pull_request_needs_trust_by_name_even_of_a_trusted_publisher(index: HubIndex) -> None:
    with pytest.raises(UntrustedPublisher, match="anybody's code"):
        TrustPolicy().check("acme/relu", index, requested=True, foreign=True)
    assert TrustPolicy.of(["acme/relu"]).check("acme/relu", index, requested=True, foreign=True)


# The user's policy file, through every entry


@pytest.fixture
def policy_file(tmp_path: Path) -> Path:
    return tmp_path / "kernelhub.toml"


def under(session: Session, path: Path, text: str) -> Session:
    """The session under a policy file of that text."""
    path.write_text(text)
    return replace(session, policy_file=path)


def test_a_policy_trusts_publishers_and_repositories(session: Session, hub_root: Path, policy_file: Path) -> None:
    write_build(hub_root, "someone/relu", "v1", "torch-cpu", {"__init__.py": ""})
    write_build(hub_root, "other/relu", "v1", "torch-cpu", {"__init__.py": ""})
    text = '[trust]\npublishers = ["someone"]\nrepositories = ["other/relu"]\n'
    allowed = under(session, policy_file, text)
    for request in ("someone/relu", "other/relu"):
        assert allowed.resolve(KernelRequest.parse(request)).trust == f"trusted by {policy_file}"
    with pytest.raises(UntrustedPublisher):
        session.resolve(KernelRequest.parse("someone/relu"))


def test_a_policy_that_says_only_refuses_what_the_hub_marks_and_the_caller_allows(
    session: Session, hub_root: Path, policy_file: Path
) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": ""})
    strict = under(session, policy_file, "[trust]\nonly = true\n")
    for allowed in (False, True, ["acme/relu"]):
        with pytest.raises(UntrustedPublisher, match="does not list"):
            kernelhub.load_kernel("acme/relu", session=strict, trust_remote_code=allowed)


def test_a_policy_pins_a_repository_to_a_commit(session: Session, hub_root: Path, policy_file: Path) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": "answer = 1\n"})
    commit = session.resolve(KernelRequest.parse("acme/relu")).commit
    pinned = under(session, policy_file, f'[pins]\n"acme/relu" = "{commit}"\n')
    assert kernelhub.load_kernel("acme/relu", session=pinned).answer == 1
    elsewhere = under(session, policy_file, f'[pins]\n"acme/relu" = "{"0" * 40}"\n')
    with pytest.raises(PinMismatch, match="0000"):
        kernelhub.load_kernel("acme/relu", session=elsewhere)
    with pytest.raises(PinMismatch):
        elsewhere.make_lock([KernelRequest.parse("acme/relu")])


def test_a_policy_that_requires_signatures_refuses_unsigned_builds(
    session: Session, hub_root: Path, policy_file: Path, reporter: Recorder
) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": ""})
    with pytest.raises(UnsignedKernel, match="a signature"):
        kernelhub.load_kernel("acme/relu", session=under(session, policy_file, '[signatures]\nacme = "require"\n'))
    kernelhub.load_kernel("acme/relu", session=under(session, policy_file, '[signatures]\nacme = "warn"\n'))
    assert any("not signed" in warning for warning in reporter.warnings)


def test_a_policy_is_found_through_the_variable_and_the_users_folder_but_not_the_current_one(
    session: Session, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_build(hub_root, "someone/relu", "v1", "torch-cpu", {"__init__.py": ""})
    request = KernelRequest.parse("someone/relu")
    home = tmp_path / "config" / "kernelhub"
    home.mkdir(parents=True)
    (home / "kernelhub.toml").write_text('[trust]\npublishers = ["someone"]\n')
    monkeypatch.chdir(home)
    with pytest.raises(UntrustedPublisher):
        replace(session).resolve(request)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    assert replace(session).resolve(request)
    (tmp_path / "strict.toml").write_text("[trust]\nonly = true\n")
    monkeypatch.setenv("KERNELHUB_POLICY", str(tmp_path / "strict.toml"))
    with pytest.raises(UntrustedPublisher):
        replace(session).resolve(request)


def test_every_entry_asks_the_one_choke_point(session: Session, hub_root: Path) -> None:
    """huggingface/transformers#44395: a path that skips the trust gate lets a mapping run any repository.

    REF huggingface/transformers#46039: the same for kernels of a config.
    """
    files = {"__init__.py": "", "layers.py": "from torch import nn\nclass Norm(nn.Module):\n    pass\n"}
    write_build(hub_root, "someone/norm", "v1", "torch-cpu", files)
    model = torch.nn.Sequential(torch.nn.RMSNorm(4))
    mapping = {"RMSNorm": "someone/norm:Norm"}
    entries = {
        "load_kernel": lambda: kernelhub.load_kernel("someone/norm", session=session),
        "load_kernel symbol": lambda: kernelhub.load_kernel("someone/norm:Norm", session=session),
        "kernelize": lambda: kernelhub.kernelize(model, mapping, session=session),
        "kernelize, not strict": lambda: kernelhub.kernelize(model, mapping, session=session, strict=False),
        "make_lock": lambda: session.make_lock([KernelRequest.parse("someone/norm")]),
        "resolve": lambda: session.resolve(KernelRequest.parse("someone/norm@v1")),
    }
    for entry in entries.values():
        with pytest.raises(UntrustedPublisher):
            entry()
    [row] = kernelhub.plan(model, mapping, session=session)
    assert row.state == "skipped"
    assert "trust_remote_code=['someone/norm']" in row.reason


def test_a_publisher_that_lost_its_trust_is_refused_when_it_is_asked_again(
    session: Session, hub_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": ""})
    kernelhub.load_kernel("acme/relu", session=session)
    trust(hub_root, "acme", trusted=False)
    kernelhub.load_kernel("acme/relu", session=replace(session))  # the decision is an hour old at most
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.000001")
    with pytest.raises(UntrustedPublisher):
        kernelhub.load_kernel("acme/relu", session=replace(session))
    with pytest.raises(UntrustedPublisher):  # and the refusal is what offline loads remember
        kernelhub.load_kernel("acme/relu", session=replace(session), offline=True)
