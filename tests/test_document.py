"""Config files: TOML and JSON, strict, and errors that name the file and the key."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from kernelhub import KernelConfig
from kernelhub.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

TOML = """
inherit_mapping = false

[kernel_mapping]
RMSNorm = "org/repo:Norm"
SwiGLUMLP = ["org/repo:MLP", {version = 2}]
rotary_pos_emb = {cuda = "org/repo:rope", cpu = ""}
"model.layers.*.mlp" = {cuda = {training = "org/a:M", inference = "org/b:M"}}
"""
MAPPING = {
    "RMSNorm": "org/repo:Norm",
    "SwiGLUMLP": ("org/repo:MLP", {"version": 2}),
    "rotary_pos_emb": {"cuda": "org/repo:rope", "cpu": ""},
    "model.layers.*.mlp": {"cuda": {"training": "org/a:M", "inference": "org/b:M"}},
}


def write(folder: Path, data: str | bytes, name: str = "kernels.toml") -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def test_toml_and_json_say_the_same_as_code(tmp_path: Path) -> None:
    config = KernelConfig(MAPPING, inherit_mapping=False)
    assert KernelConfig.from_file(write(tmp_path, TOML)) == config
    assert KernelConfig.from_file(write(tmp_path, json.dumps(config.to_dict()), "kernels.JSON")) == config
    assert KernelConfig.from_file(write(tmp_path, "[kernel_mapping]")) == KernelConfig()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no key 'kernel_mapping'; expected a table [kernel_mapping]"),
        ("[kernel_maping]", "no key 'kernel_mapping' among 'kernel_maping'"),
        ("more = 1\n[kernel_mapping]", "'more'"),
        ("kernel_mapping = 1", "expected a dict of layer name to kernel"),
        ("use_local_kernel = 1\n[kernel_mapping]", "key 'use_local_kernel'; expected true or false"),
        ("inherit_mapping = 'no'\n[kernel_mapping]", "key 'inherit_mapping'"),
        ("[kernel_mapping]\nRMSNorm = 'org/repo'", "layer 'RMSNorm'): names no symbol"),
        ("[kernel_mapping]\nRMSNorm = 5", "layer 'RMSNorm'): a int"),
        ("[kernel_mapping]\nRMSNorm = ['org/repo:N', {versoin = 1}]", "layer 'RMSNorm'): unknown option, did you mean"),
        ("[kernel_mapping]\nRMSNorm = {cdua = 'org/repo:N'}", "layer 'RMSNorm'): device"),
        ("use_local_kernel = true\n[kernel_mapping]\nRMSNorm = 'org/repo:N'", "needs a path"),
        ("[kernel_mapping]\nA = ''\nA = ''", "TOML in UTF-8"),
        ("kernel_mapping", "TOML in UTF-8"),
        (b"\xff", "TOML in UTF-8"),
        (b"#" * ((1 << 20) + 1), "more than 1048576 bytes"),
    ],
)
def test_what_is_wrong_is_told_with_the_file_and_the_key(text: str | bytes, words: str, tmp_path: Path) -> None:
    path = write(tmp_path, text)
    with pytest.raises(InvalidConfig) as caught:
        KernelConfig.from_file(path)
    assert words in str(caught.value)
    assert path.name in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "a list; expected a table or an object"),
        ("{", "JSON in UTF-8"),
        ('{"kernel_mapping": {"A": "", "A": ""}}', "key 'A' given twice"),
        ('{"kernel_mapping": {}, "kernel_mapping": {}}', "given twice"),
        ("[" * 100_000, "JSON in UTF-8"),
        ('{"kernel_mapping": null}', "kernel_mapping"),
    ],
)
def test_json_is_read_as_strictly(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        KernelConfig.from_file(write(tmp_path, text, "kernels.json"))
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["kernels.yaml", "kernels", "kernels.toml.txt"])
def test_the_ending_tells_the_form(name: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"a \.toml or \.json file"):
        KernelConfig.from_file(write(tmp_path, TOML, name))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match=r"absent\.toml.*cannot be read"):
        KernelConfig.from_file(tmp_path / "absent.toml")
