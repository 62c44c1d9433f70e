"""The newest build that each name gave: it only ever grows, for each Hub, and nobody else's counts."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernelhub.errors import OlderBuild
from kernelhub.history import History, SignedBuild
from kernelhub.revision import Revision
from kernelhub.signer import Signer
from kernelhub.store import Store

HUB = "https://hub.test"


def signed(time: int, revision: str = "v1", version: int | None = 1, variant: str = "torch-cpu") -> SignedBuild:
    signer = Signer("https://github.com/acme/x", "https://issuer.test", time)
    return SignedBuild("acme/relu@1", "acme/relu", variant, Revision.parse(revision), version, signer)


def accepts(history: History, build: SignedBuild) -> bool:
    try:
        history.check(build)
    except OlderBuild:
        return False
    return True


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(["v1", "main"]), st.integers(0, 9)), max_size=12))
def test_a_name_gives_nothing_older_than_the_newest_that_it_gave(asked: list[tuple[str, int]]) -> None:
    newest: dict[str, int] = {}
    with TemporaryDirectory() as folder:
        for name, time in asked:
            history = History(Store(Path(folder) / "store", HUB))  # as each new process has it
            assert accepts(history, signed(time, name)) is (time >= newest.get(name, 0))
            newest[name] = max(time, newest.get(name, 0))


@settings(max_examples=12)
@given(st.lists(st.integers(1, 4), max_size=8))
def test_a_range_gives_no_lower_version_than_it_gave(versions: list[int]) -> None:
    seen = 0
    with TemporaryDirectory() as folder:
        history = History(Store(Path(folder) / "store", HUB))
        for version in versions:
            assert accepts(history, signed(5, ">=1", version)) is (version >= seen)
            seen = max(seen, version)


def test_variants_hubs_and_builds_without_a_version_are_each_their_own(tmp_path: Path) -> None:
    store = Store(tmp_path / "store", HUB)
    History(store).check(signed(9))
    History(store).check(signed(5, variant="torch-cuda"))
    History(Store(tmp_path / "store", "https://other.test")).check(signed(5))
    History(store).check(signed(5, "latest", None))
    with pytest.raises(OlderBuild, match="signed 1970-01-01 00:00:05 UTC, but one signed 1970-01-01 00:00:09 UTC"):
        History(store).check(signed(5))


@pytest.mark.parametrize("newest", [None, "9", 1e9, -1, True, 1 << 60, ...])
def test_a_damaged_memory_counts_as_none(tmp_path: Path, newest: object) -> None:
    store = Store(tmp_path / "store", HUB)
    History(store).check(signed(9))
    for path in (tmp_path / "store").rglob("newest/*.json"):
        facts = json.loads(path.read_text())
        path.write_text("{" if newest is ... else json.dumps({**facts, "newest": newest}))
    History(Store(tmp_path / "store", HUB)).check(signed(5))
