"""Environment variables: read when used, refused when unreadable."""

from __future__ import annotations

from pathlib import Path

import pytest

from kernelhub import setting
from kernelhub.errors import InvalidConfig


@pytest.mark.parametrize("value", ["1", "true", "YES", " On "])
def test_a_flag_is_on(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert setting.offline()


@pytest.mark.parametrize("value", ["0", "false", "NO", "off", ""])
def test_a_flag_is_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", value)
    assert not setting.offline()


def test_an_unset_flag_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not setting.offline()
    assert setting.flag("HF_HUB_OFFLINE", default=True)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert setting.offline()


def test_a_flag_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "maybe")
    with pytest.raises(InvalidConfig, match=r"'maybe' .*HF_HUB_OFFLINE.*neither yes nor no"):
        setting.offline()


@pytest.mark.parametrize("value", ["abc", "-1", "0", "1e9", "nan", "inf", ""])
def test_seconds_outside_their_range_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELHUB_LOCK_TIMEOUT", value)
    with pytest.raises(InvalidConfig, match="KERNELHUB_LOCK_TIMEOUT"):
        setting.seconds("KERNELHUB_LOCK_TIMEOUT", 1.0)


def test_seconds_are_read_or_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting.seconds("KERNELHUB_LOCK_TIMEOUT", 7.0) == 7.0
    monkeypatch.setenv("KERNELHUB_LOCK_TIMEOUT", "0.5")
    assert setting.seconds("KERNELHUB_LOCK_TIMEOUT", 7.0) == 0.5


def test_the_store_is_where_the_first_variable_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert setting.store_folder() == Path("/home/someone/.cache/huggingface/kernelhub")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert setting.store_folder() == Path("/xdg/huggingface/kernelhub")
    monkeypatch.setenv("HF_HOME", "~/hf")
    assert setting.store_folder() == Path("/home/someone/hf/kernelhub")
    monkeypatch.setenv("KERNELS_CACHE", "/peer")
    assert setting.store_folder() == Path("/peer")
    monkeypatch.setenv("KERNELHUB_CACHE", "relative")
    assert setting.store_folder() == Path.cwd() / "relative"


def test_the_endpoint_has_no_slash_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting.endpoint() == "https://huggingface.co"
    monkeypatch.setenv("HF_ENDPOINT", "https://hub.example/")
    assert setting.endpoint() == "https://hub.example"
    monkeypatch.setenv("HF_ENDPOINT", "")
    assert setting.endpoint() == "https://huggingface.co"


def test_the_lock_in_force_is_named_or_lies_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert setting.lock_path() is None
    (tmp_path / "kernelhub.lock").write_text("")
    assert setting.lock_path() == tmp_path / "kernelhub.lock"
    monkeypatch.setenv("KERNELHUB_LOCK", "other.lock")
    assert setting.lock_path() == tmp_path / "other.lock"
