"""What is remembered: answers that serve again, until they are old, damaged or wrong."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build
from starlette.responses import Response

from kernelhub import load_kernel
from kernelhub.errors import HubUnavailable, NotCached, UntrustedPublisher
from kernelhub.hub import HubIndex
from kernelhub.recorded import RecordedIndex, RememberingIndex, fresh_seconds
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.api import Session
    from kernelhub.serve import LocalHub

REPO = "acme/relu"
DAMAGE = ["", "{", "[]", '{"schema": 1}', '{"name": "acme/relu", "time": 0}', '{"name": NAME, "time": TIME}']
WRONG = '{"name": NAME, "time": TIME, "branches": 1, "tags": {}, "builds": {"torch-cpu": [[1]]}, "repo_type": 1}'


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "acme")
    write_build(hub_root, REPO, "v1", "torch-cpu", {"__init__.py": "ONE = 1\n"})
    return hub_root


@pytest.fixture
def remembering(root: Path, session: Session) -> Callable[..., RememberingIndex]:
    def make(max_age: float = 3600.0) -> RememberingIndex:
        index = HubIndex(session.endpoint, token=False)
        return RememberingIndex(session.store, lambda: index, session.reporter, max_age)

    return make


def offline(session: Session) -> Session:
    return dataclasses.replace(session, offline=True)


def test_answers_are_given_again_while_they_are_fresh(
    remembering: Callable[..., RememberingIndex], session: Session, asked: Callable[[], list[str]]
) -> None:
    first = remembering()
    commit = first.refs(REPO).branches["v1"]
    answers = (first.trusts("acme"), first.trusts("nobody"), first.refs(REPO), first.builds(REPO, commit))
    assert answers[:2] == (True, False)
    asked()
    for index in (remembering(), remembering(math.inf), RecordedIndex(session.store)):
        assert (index.trusts("acme"), index.trusts("nobody"), index.refs(REPO), index.builds(REPO, commit)) == answers
    assert asked() == []


def test_old_answers_about_branches_and_publishers_are_asked_for_again(
    remembering: Callable[..., RememberingIndex], asked: Callable[[], list[str]]
) -> None:
    commit = remembering().refs(REPO).branches["v1"]
    remembering().trusts("acme")
    remembering().builds(REPO, commit)
    asked()
    time.sleep(0.01)
    stale = remembering(0.001)
    stale.trusts("acme")
    stale.refs(REPO)
    stale.builds(REPO, commit)  # what a commit holds does not change
    assert [request.rpartition("/")[2] for request in asked()] == ["overview", "refs"]


def test_r_38_an_answer_from_the_future_is_asked_for_again(
    remembering: Callable[..., RememberingIndex], session: Session, asked: Callable[[], list[str]]
) -> None:
    """A clock that was wrong must not make an answer last."""
    remembering().trusts("acme")
    [path] = session.store.root.glob("hubs/*/records/publishers/*.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "time": time.time() + 1e6}))
    asked()
    remembering(math.inf).trusts("acme")
    assert len(asked()) == 1


def test_a_refreshed_answer_is_asked_for_once_a_run(
    remembering: Callable[..., RememberingIndex], asked: Callable[[], list[str]]
) -> None:
    remembering().refs(REPO)
    asked()
    index = remembering()
    for _ in range(3):
        index.refs(REPO, refresh=True)
    assert len(asked()) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_an_older_answer_serves_while_the_hub_fails(
    status: int,
    remembering: Callable[..., RememberingIndex],
    hub: LocalHub,
    reporter: Recorder,
) -> None:
    """REF huggingface/huggingface_hub#3342, #3312; kotaro-kinoshita/yomitoku#99: a busy Hub stopped loads of cached
    files.
    """
    commit = remembering().refs(REPO).branches["v1"]
    remembering().trusts("acme")
    remembering().commit(REPO, commit)
    hub.hook = lambda request: Response(status_code=status)
    time.sleep(0.01)
    stale = remembering(0.001)
    assert stale.trusts("acme")
    assert stale.refs(REPO).branches["v1"] == commit
    assert stale.commit(REPO, commit) == commit
    assert [f"HTTP {status}" in text and "0.0 hours ago" in text for text in reporter.warnings] == [True] * 3
    with pytest.raises(HubUnavailable):
        stale.trusts("unknown")
    with pytest.raises(HubUnavailable):
        stale.refs("acme/unknown")


@pytest.mark.parametrize("damage", [*DAMAGE, WRONG])
def test_r_36_damaged_answers_are_asked_for_again_and_replaced(
    damage: str, root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    assert load_kernel(REPO, session=session).ONE == 1
    asked()
    _damage_all(session, damage)
    assert load_kernel(REPO, session=dataclasses.replace(session)).ONE == 1
    assert len(asked()) == 3
    assert load_kernel(REPO, session=offline(session)).ONE == 1


@pytest.mark.parametrize("damage", [*DAMAGE, WRONG])
def test_r_36_damaged_answers_are_no_answers_offline(damage: str, root: Path, session: Session) -> None:
    load_kernel(REPO, session=session)
    _damage_all(session, damage)
    with pytest.raises((NotCached, UntrustedPublisher)):
        load_kernel(REPO, session=offline(session))
    with pytest.raises(NotCached, match="kernelhub prefetch 'acme/relu'"):
        load_kernel(REPO, session=offline(session), trust_remote_code=True)


def _damage_all(session: Session, damage: str) -> None:
    for path in session.store.root.glob("hubs/*/records/*/*.json"):
        name = json.loads(path.read_text())["name"]
        path.write_text(damage.replace("NAME", json.dumps(name)).replace("TIME", str(time.time())))


def test_a_stored_build_is_found_offline_by_its_commit_without_any_answer(root: Path, session: Session) -> None:
    load_kernel(REPO, session=session)
    [build] = session.store.builds()
    _damage_all(session, "")
    request = f"{REPO}@{build.manifest.commit}"
    assert load_kernel(request, session=offline(session), trust_remote_code=[REPO]).ONE == 1


def test_offline_uses_the_trust_that_was_recorded_and_no_other(root: Path, session: Session) -> None:
    """REF huggingface/kernels#580: offline, nobody could tell whether a publisher was trusted."""
    write_build(root, "someone/relu", "v1", "torch-cpu", {"__init__.py": "ONE = 1\n"})
    load_kernel("someone/relu", session=session, trust_remote_code=True)
    with pytest.raises(UntrustedPublisher, match=r"whose trust was never asked online.*`kernelhub explain") as caught:
        load_kernel("someone/relu", session=offline(session))
    assert "trust_remote_code" not in str(caught.value)
    with pytest.raises(UntrustedPublisher, match="not a trusted kernel publisher"):
        load_kernel("someone/relu", session=session)
    with pytest.raises(UntrustedPublisher, match="not a trusted kernel publisher"):
        load_kernel("someone/relu", session=offline(session))
    assert load_kernel("someone/relu", session=offline(session), trust_remote_code=["someone/relu"]).ONE == 1


@pytest.mark.parametrize("status", [500, 503])
def test_an_older_answer_is_told_with_the_commit_and_not_used_in_the_strict_mode(
    status: int, root: Path, session: Session, hub: LocalHub, reporter: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF huggingface/huggingface_hub#3007: while the Hub failed, older files were used and nobody was told."""
    load_kernel(REPO, session=session)
    commit = session.refs(REPO).branches["v1"]
    hub.hook = lambda request: Response(status_code=status)
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.000001")
    assert load_kernel(REPO, session=dataclasses.replace(session)).ONE == 1
    [told] = [text for text in reporter.warnings if "kernel acme/relu" in text]
    assert f"HTTP {status}" in told
    assert f"0.0 hours ago, v1 is {commit[:12]}" in told
    strict = dataclasses.replace(session, strict=True)
    with pytest.raises(HubUnavailable, match=rf"HTTP {status} .*; what it said of .* before is not used here"):
        load_kernel(REPO, session=strict)
    with pytest.raises(HubUnavailable):
        session.make_lock([KernelRequest.parse(REPO)])
    assert load_kernel(f"{REPO}@{commit}", session=strict).ONE == 1
    assert load_kernel(REPO, session=offline(strict)).ONE == 1


def test_what_is_cached_is_preferred_when_the_user_says_so(
    root: Path, session: Session, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF huggingface/huggingface_hub#4705; Nerogar/OneTrainer#1645: the network only for what the cache lacks."""
    load_kernel(REPO, session=session)
    write_build(root, REPO, "v2", "torch-cpu", {"__init__.py": "ONE = 2\n"}, version=2)
    later = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: later)
    monkeypatch.setenv("KERNELHUB_PREFER_CACHED", "1")
    asked()
    assert load_kernel(REPO, session=dataclasses.replace(session)).ONE == 1
    assert asked() == []
    assert load_kernel(f"{REPO}@v2", session=dataclasses.replace(session)).ONE == 2
    assert asked()


def test_how_long_an_answer_is_fresh_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fresh_seconds() == 3600
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "60")
    assert fresh_seconds() == 60


# Several processes that ask at once


def test_of_many_who_need_an_answer_one_asks(
    remembering: Callable[..., RememberingIndex], asked: Callable[[], list[str]]
) -> None:
    """Threads with an index each, as processes have."""

    def work(_: int) -> tuple[object, ...]:
        index = remembering()
        commit = index.refs(REPO).branches["v1"]
        [files] = index.builds(REPO, commit).values()
        assert files is not None
        listed = next(file for file in files if file.path == "metadata.json")
        with index.stream(REPO, commit, "build/torch-cpu/metadata.json", expected=listed) as chunks:
            return index.trusts("acme"), commit, b"".join(chunks)

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(work, range(8)))
    assert len(answers) == 1
    requests = [request for request in asked() if not request.endswith("/refs")]  # each Hub client asks for the type
    assert len(requests) == len(set(requests)) == 3


def test_refreshing_takes_an_answer_that_was_given_while_it_waited(
    remembering: Callable[..., RememberingIndex], asked: Callable[[], list[str]], session: Session
) -> None:
    remembering().refs(REPO)
    asked()
    with ThreadPoolExecutor(4) as pool:
        with session.store.asking(f"repositories--{REPO}"):
            waiting = [pool.submit(lambda: remembering().refs(REPO, refresh=True)) for _ in range(4)]
            time.sleep(0.3)
        for future in waiting:
            future.result()
    assert len(asked()) == 1


def test_a_lock_that_somebody_keeps_does_not_keep_an_answer_away(
    remembering: Callable[..., RememberingIndex], session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernelhub.store._ASK_SECONDS", 0.1)
    with session.store.asking("publishers--acme"):
        assert remembering().trusts("acme")


@pytest.mark.parametrize("damage", ["", "{", '{"base64": "####"}', '{"base64": 1}', '{"base64": "e30="}'])
def test_damaged_metadata_answers_are_asked_for_again(damage: str, root: Path, session: Session) -> None:
    resolution = session.resolve(KernelRequest.parse(REPO))
    [path] = session.store.root.glob("hubs/*/records/metadata/*.json")
    record = json.loads(path.read_text())
    path.write_text(json.dumps(record | json.loads(damage)) if damage.endswith("}") else damage)
    assert dataclasses.replace(session).resolve(KernelRequest.parse(REPO)) == resolution
    assert json.loads(path.read_text())["base64"] == record["base64"]
