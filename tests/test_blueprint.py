"""Blueprints: which entries of a config a transformers model would use, told from its config.json alone."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest

from kernelhub import KernelConfig
from kernelhub.blueprint import SHIPPED, build, used_entries
from kernelhub.errors import InvalidConfig

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2}
QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2, "head_dim": 8, **SMALL}
GPT2 = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 32, "n_layer": 2, "n_head": 4}
MAPPING = {"RMSNorm": "org/norm:Norm", "GatedDeltaNet": "org/gdn:Net", "model.layers.0.mlp": "org/mlp:MLP"}


def write(folder: Path, facts: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(facts))
    return folder


def test_of_the_shipped_mapping_a_llama_like_model_uses_all_and_gpt2_what_it_has(tmp_path: Path) -> None:
    shipped = KernelConfig(SHIPPED)
    assert used_entries(write(tmp_path / "qwen3", QWEN3), shipped) == shipped
    assert set(used_entries(write(tmp_path / "gpt2", GPT2), shipped).kernel_mapping) <= {"ForCausalLM"}


def test_of_a_given_mapping_only_what_layers_answer_to_is_used(tmp_path: Path) -> None:
    write(tmp_path / "model", QWEN3)
    used = used_entries(tmp_path / "model" / "config.json", KernelConfig(MAPPING, inherit_mapping=False))
    assert list(used.kernel_mapping) == ["RMSNorm", "model.layers.0.mlp"]
    assert not used.inherit_mapping


def test_a_model_of_any_size_needs_no_memory(tmp_path: Path) -> None:
    huge = {
        **QWEN3,
        "hidden_size": 1 << 16,
        "intermediate_size": 1 << 18,
        "vocab_size": 1 << 20,
        "num_hidden_layers": 3,
    }
    model = build(write(tmp_path, huge))
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert sum(parameter.numel() for parameter in model.parameters()) > 10**11


def test_code_and_kernels_that_a_config_names_are_not_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF CVE-2026-4372: kernels named in a config.json were loaded whatever the caller had said about trust."""
    evil = {
        **QWEN3,
        "auto_map": {"AutoConfig": "evil--config.Config", "AutoModelForCausalLM": "evil--model.Model"},
        "attn_implementation": "evil/attention",
        "_attn_implementation": "evil/attention",
        "_attn_implementation_internal": "evil/attention",
        "experts_implementation": "evil/experts",
        "kernel_config": {"RMSNorm": "evil/norm"},
        "quantization_config": {"quant_method": "fp8"},
        "trust_remote_code": True,
        "sub": [{"_attn_implementation": "evil/attention"}],
    }
    import socket

    def no_network(*arguments: object) -> None:
        raise AssertionError("asked the network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    model = build(write(tmp_path, evil))
    assert model.config._attn_implementation == "eager"
    assert "evil" not in model.config.to_json_string()


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"model_type": "no-such-model"}, "no-such-model"),
        ({}, "transformers has"),
        ({**QWEN3, "num_hidden_layers": 10**9}, "key 'num_hidden_layers'; expected at most 1000"),
        ({**QWEN3, "text_config": {"num_experts": 10**9}}, "key 'num_experts'"),
        ({**QWEN3, "num_attention_heads": 0}, "transformers has"),
        ([], "a table or an object"),
    ],
)
def test_what_is_no_model_of_transformers_is_told(facts: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig) as caught:
        build(write(tmp_path, facts))
    assert words in str(caught.value)
    assert "config.json" in str(caught.value)


def test_a_name_that_is_no_model_class_is_not_used(tmp_path: Path) -> None:
    model = build(write(tmp_path, {**QWEN3, "architectures": ["set_seed", "os.system"]}))
    assert type(model).__name__ == "Qwen3Model"


def test_without_transformers_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InvalidConfig, match="or name the kernels themselves"):
        build(write(tmp_path, QWEN3))


def test_a_folder_without_a_config_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        build(tmp_path)
