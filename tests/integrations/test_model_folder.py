"""``kernel_config.json`` in a model's folder: saved, loaded, and never believed (S-07)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hub_liger import REPOSITORY, publish_liger
from layers.tiny_model import tiny
from transformers import AutoModelForCausalLM

import kernelhub
from kernelhub.errors import InvalidConfig
from kernelhub.integrations.transformers import disable, enable, load_config, save_config
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

NORM = f"{REPOSITORY}@v3:LigerRMSNorm"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    return folder


@pytest.fixture
def lock(session: Session, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A lock of the user, with version 3 of the repository."""
    publish_liger(hub_root)
    path = tmp_path / "project" / "kernelhub.lock"
    path.parent.mkdir()
    session.make_lock([KernelRequest.parse(f"{REPOSITORY}@v3")]).write(path)
    monkeypatch.setenv("KERNELHUB_LOCK", str(path))
    return path


@pytest.fixture
def switched_on(hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "models-store"))
    enable()
    yield
    disable()


def write(folder: Path, mapping: dict[str, Any], **more: Any) -> None:
    (folder / "kernel_config.json").write_text(json.dumps({"kernel_mapping": mapping, **more}), encoding="utf-8")


def test_a_saved_config_is_read_back_without_what_it_said_about_trust(folder: Path) -> None:
    mapping = {
        "SiLU": ("builtin:RMSNorm", {"optional": True}),
        "RMSNorm": {"cpu": "", "cuda>=9.0": {"training": "builtin@v2:RMSNorm"}},
        "model.layers.*.mlp": "builtin:SwiGLUMLP",
    }
    config = kernelhub.KernelConfig(mapping, inherit_mapping=False)
    path = save_config(config, folder)
    assert load_config(folder) == config
    trusting = kernelhub.KernelConfig({"RMSNorm": ("org/repo:Norm", {"trust_remote_code": ["org/repo"]})})
    save_config(trusting, folder)
    assert "trust" not in path.read_text(encoding="utf-8")
    assert kernelhub.KernelConfig.from_file(path).kernel_mapping == {"RMSNorm": "org/repo:Norm"}


def test_s_07_only_locked_kernels_are_followed(folder: Path, lock: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, {"RMSNorm": NORM, "SiLU": f"{REPOSITORY}@v1:X", "MLP": "org/other:MLP", "GeLU": "/abs/path:G"})
    assert load_config(folder).kernel_mapping == {"RMSNorm": NORM}
    assert "['SiLU', 'MLP', 'GeLU'] not followed" in caplog.text
    assert "KernelConfig.from_file(" in caplog.text


@pytest.mark.parametrize("where", ["no lock", "the lock of the folder itself"])
def test_without_a_lock_of_the_user_nothing_of_the_hub_is(
    folder: Path, lock: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("KERNELHUB_LOCK")
    if where != "no lock":
        lock.rename(folder / "kernelhub.lock")
        monkeypatch.chdir(folder)
    write(folder, {"RMSNorm": NORM, "SwiGLUMLP": "builtin:SwiGLUMLP"})
    assert load_config(folder).kernel_mapping == {"SwiGLUMLP": "builtin:SwiGLUMLP"}


@pytest.mark.parametrize("trust", [True, [REPOSITORY]])
def test_s_07_a_folder_cannot_grant_trust(folder: Path, lock: Path, trust: object) -> None:
    """CVE-2026-4372, CVE-2026-5241: kernels named in a model's files ran, and a nested config flipped the flag."""
    write(folder, {"RMSNorm": {"cpu": {"training": [NORM, {"trust_remote_code": trust}]}}})
    with pytest.raises(InvalidConfig, match="trust given in code, by the user"):
        load_config(folder)


@pytest.mark.parametrize("text", ["[]", '{"kernel_mapping": 3}', '{"trust": true}', "{", '{"a": 1, "a": 2}'])
def test_a_broken_file_is_told(folder: Path, text: str) -> None:
    (folder / "kernel_config.json").write_text(text, encoding="utf-8")
    with pytest.raises(InvalidConfig):
        load_config(folder)


def test_a_model_is_saved_with_its_config_and_loaded_with_it(
    folder: Path, lock: Path, switched_on: None, session: Session
) -> None:
    model = tiny()
    model.set_use_kernels(True, kernelhub.KernelConfig({"RMSNorm": NORM, "SwiGLUMLP": "builtin:SwiGLUMLP"}))
    model.save_pretrained(folder)
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert not kernelhub.report(plain).bound
    again = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True)
    assert {row.layer for row in kernelhub.report(again).bound} == {"RMSNorm", "SwiGLUMLP"}


def test_what_the_caller_gives_counts_and_the_folder_is_not_read(folder: Path, switched_on: None) -> None:
    tiny().save_pretrained(folder)
    write(folder, {"RMSNorm": ["org/evil:Norm", {"trust_remote_code": True}]})
    config = kernelhub.KernelConfig({"RMSNorm": "builtin:RMSNorm"})
    model = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True, kernel_config=config)
    assert {row.symbol for row in kernelhub.report(model).bound} == {"RMSNorm"}
    with pytest.raises(InvalidConfig, match="trust_remote_code in a model's folder"):
        AutoModelForCausalLM.from_pretrained(folder, use_kernels=True)
