"""A newer trust root from an update repository on this machine: fetched when asked for, and never a forged one."""

from __future__ import annotations

import json
import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
from authority import Authority
from typer.testing import CliRunner, Result
from update_repository import UpdateRepository

from kernelhub.cli import app
from kernelhub.errors import InvalidConfig, RefreshFailed
from kernelhub.policy import NO_POLICY
from kernelhub.rootupdate import PUBLIC_URL, refresh
from kernelhub.trustroot import TrustRoot

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

AUTHORITY = Authority()
DATA = json.dumps(AUTHORITY.root).encode()


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[UpdateRepository]:
    (tmp_path / "tuf").mkdir()
    with UpdateRepository(tmp_path / "tuf") as repository:
        repository.publish(DATA)
        yield repository


@pytest.fixture
def ask(repository: UpdateRepository, tmp_path: Path) -> Callable[[], TrustRoot]:
    return lambda: refresh(repository.url, repository.first_key, remembered=tmp_path / "seen")


def test_the_published_root_is_fetched_and_dated(ask: Callable[[], TrustRoot], repository: UpdateRepository) -> None:
    root = ask()
    assert root.keys == AUTHORITY.root
    assert root.days < 1
    assert root.source == repository.url
    other = Authority().root
    repository.publish(json.dumps(other).encode())
    assert ask().keys == other


def test_an_older_repository_is_refused_once_a_newer_one_was_seen(
    ask: Callable[[], TrustRoot], repository: UpdateRepository, tmp_path: Path
) -> None:
    shutil.copytree(repository.folder, tmp_path / "before")
    repository.publish(json.dumps(Authority().root).encode())
    ask()
    shutil.copytree(tmp_path / "before", repository.folder, dirs_exist_ok=True)
    with pytest.raises(RefreshFailed, match="The one in use was not changed"):
        ask()


def forged(repository: UpdateRepository) -> None:
    [target] = (repository.folder / "targets").iterdir()
    target.write_bytes(target.read_bytes().replace(b"authority.test", b"authority.evil"))


def signed_by_others(repository: UpdateRepository) -> None:
    stranger = UpdateRepository(repository.folder, version=1)
    stranger.publish(DATA)


def expired(repository: UpdateRepository) -> None:
    repository.publish(DATA, days=-1.0)


def other_target(repository: UpdateRepository) -> None:
    repository.publish(DATA, name="something.json")


def no_root(repository: UpdateRepository) -> None:
    repository.publish(b'{"mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1"}')


def no_json(repository: UpdateRepository) -> None:
    repository.publish(b"<html>")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (forged, "DownloadError|LengthOrHashMismatch"),
        (signed_by_others, "UnsignedMetadataError"),
        (expired, "ExpiredMetadataError"),
        (other_target, r"it publishes no trusted_root\.json"),
        (no_root, "what it publishes is no trust root"),
        (no_json, "what it publishes is no trust root"),
    ],
)
def test_what_is_not_signed_as_it_has_to_be_is_refused(
    ask: Callable[[], TrustRoot], repository: UpdateRepository, damage: Callable[[UpdateRepository], None], problem: str
) -> None:
    damage(repository)
    with pytest.raises(RefreshFailed, match=problem):
        ask()


def test_another_repository_needs_its_first_key(repository: UpdateRepository, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="--first-key"):
        refresh(repository.url, remembered=tmp_path)
    with pytest.raises(RefreshFailed):
        refresh(repository.url, b"{}", remembered=tmp_path)


def test_a_repository_that_does_not_answer_is_named(tmp_path: Path) -> None:
    with UpdateRepository(tmp_path) as gone:
        gone.publish(DATA)
        url, key = gone.url, gone.first_key
    with pytest.raises(RefreshFailed, match=rf"refreshed from {url}: ConnectionRefusedError"):
        refresh(url, key, remembered=tmp_path / "seen")


def test_without_the_extra_the_command_that_installs_it_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tuf.ngclient.updater", None)
    with pytest.raises(RefreshFailed, match=r"pip install 'kernelhub\[sign\]'"):
        refresh(PUBLIC_URL, remembered=tmp_path)


# The command


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["trust-root", *arguments])


def facts(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_refreshed_root_is_the_one_in_use_from_then_on(
    command: Callable[..., Result], repository: UpdateRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert facts(command("info", "--json"))["origin"] == "bundled with kernelhub"
    key = tmp_path / "first.json"
    key.write_bytes(repository.first_key)
    result = command("refresh", "--url", repository.url, "--first-key", str(key))
    assert result.exit_code == 0, result.output
    assert "2 authorities" in result.stdout
    path = tmp_path / "config/kernelhub/trust-root.json"
    told = facts(command("info", "--json"))
    assert (told["origin"], told["source"], told["problem"]) == (str(path), repository.url, "")
    assert "https://ca.authority.test, https://log.authority.test" in command("info").stdout
    assert TrustRoot.in_use(NO_POLICY).keys == AUTHORITY.root
    carried = tmp_path / "carried.json"  # to a machine without network
    assert command("refresh", "--url", repository.url, "--first-key", str(key), "--to", str(carried)).exit_code == 0
    path.unlink()
    monkeypatch.setenv("KERNELHUB_TRUST_ROOT", str(carried))
    assert facts(command("info", "--json"))["origin"] == str(carried)


def test_a_failed_refresh_leaves_the_root_in_use(
    command: Callable[..., Result], repository: UpdateRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = tmp_path / "first.json"
    key.write_bytes(repository.first_key)
    arguments = ("refresh", "--url", repository.url, "--first-key", str(key))
    assert command(*arguments).exit_code == 0
    before = (tmp_path / "config/kernelhub/trust-root.json").read_bytes()
    forged(repository)
    assert isinstance(command(*arguments).exception, RefreshFailed)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "offline" in str(command(*arguments).exception)
    assert (tmp_path / "config/kernelhub/trust-root.json").read_bytes() == before
    assert isinstance(command("refresh", "--first-key", str(tmp_path / "none")).exception, RefreshFailed)


def test_a_root_that_is_too_old_is_a_problem(command: Callable[..., Result], tmp_path: Path) -> None:
    policy = tmp_path / "config/kernelhub/kernelhub.toml"
    policy.parent.mkdir(parents=True)
    old = {"schema": 1, "time": "2026-01-01T00:00:00Z", "source": "x", "trusted_root": AUTHORITY.root}
    (tmp_path / "old.json").write_text(json.dumps(old))
    policy.write_text(f'[trust_root]\nfile = "{tmp_path / "old.json"}"\nfail_days = 30\n')
    result = command("info", "--json")
    assert result.exit_code == 1
    assert facts(result)["problem"] == "older than 30 days: run `kernelhub trust-root refresh`"
