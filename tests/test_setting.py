"""Environment variables: read when used, refused when unreadable."""

from __future__ import annotations

import os
import subprocess
import sys
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


def test_r_46_a_flag_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "maybe")
    with pytest.raises(InvalidConfig, match=r"'maybe' .*HF_HUB_OFFLINE.*neither yes nor no"):
        setting.offline()


@pytest.mark.parametrize("name", ["DISABLE_KERNEL_MAPPING", "KERNELHUB_STRICT", "KERNELHUB_SHARED_CACHE"])
@pytest.mark.parametrize("value", ["true", "maybe"])
def test_r_46_a_word_for_yes_is_taken_and_nonsense_told_when_a_variable_is_used_not_at_import(
    name: str, value: str
) -> None:
    """REF huggingface/huggingface_hub#3394: read once at import, it stayed what it was then."""
    code = (
        "import kernelhub, kernelhub.setting as setting\n"
        "print('imported')\n"
        f"print(setting.flag({name!r}))\n"
        f"import os; os.environ[{name!r}] = '0'\n"
        f"print(setting.flag({name!r}))\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, check=False)
    if value == "true":
        assert done.stdout.split() == ["imported", "True", "False"]
    else:
        assert done.stdout.split() == ["imported"]
        assert f"InvalidConfig: invalid kernel config 'maybe' (from variable {name}): neither yes nor no" in done.stderr


@pytest.mark.parametrize("value", ["abc", "-1", "0", "1e9", "nan", "inf", ""])
def test_r_46_seconds_outside_their_range_are_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
