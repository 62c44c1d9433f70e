from __future__ import annotations

from typing import Any

import pytest

from kernelhub.config import KernelConfig
from kernelhub.errors import InvalidConfig

HUB = "kernels-community/liger-kernels@v3"
OPTIONAL = {"optional": True}


def test_without_switches_the_defaults_of_liger_are_on_and_optional() -> None:
    assert KernelConfig.from_liger().kernel_mapping == {
        "rotary_pos_emb": (f"{HUB}:liger_rotary_pos_emb", OPTIONAL),
        "RMSNorm": (f"{HUB}:LigerRMSNorm", OPTIONAL),
        "SwiGLUMLP": (f"{HUB}:LigerSwiGLUMLP", OPTIONAL),
        "GeGLUMLP": (f"{HUB}:LigerGEGLUMLP", OPTIONAL),
        "FusedLinearCrossEntropy": ("builtin:FusedLinearCrossEntropy", OPTIONAL),
    }


def test_a_switch_that_is_given_has_to_bind_something() -> None:
    config = KernelConfig.from_liger(rope=True, rms_norm=False, swiglu=True, geglu=False, cross_entropy=True)
    assert config.kernel_mapping == {
        "rotary_pos_emb": f"{HUB}:liger_rotary_pos_emb",
        "SwiGLUMLP": f"{HUB}:LigerSwiGLUMLP",
        "ForCausalLMLoss": f"{HUB}:LigerForCausalLMLoss",
    }
    assert not any(entry.is_optional for entry in config.entries)


def test_the_embedded_collection_offers_every_layer() -> None:
    every = dict.fromkeys(("rope", "rms_norm", "swiglu", "geglu", "layer_norm"), True)
    config = KernelConfig.from_liger(**every, fused_linear_cross_entropy=True, source="builtin")
    assert config.kernel_mapping == {
        name: f"builtin:{name}"
        for name in ("rotary_pos_emb", "RMSNorm", "SwiGLUMLP", "GeGLUMLP", "LayerNorm", "FusedLinearCrossEntropy")
    }


def test_another_repository_may_be_the_source() -> None:
    mapping = KernelConfig.from_liger(rms_norm=True, source="org/liger@main").kernel_mapping
    assert mapping["RMSNorm"] == "org/liger@main:LigerRMSNorm"


@pytest.mark.parametrize(
    ("switches", "words"),
    [
        ({"rms_nrom": True}, "unknown Liger switch, did you mean 'rms_norm'? expected switches rope, rms_norm"),
        ({"rope": 1}, "Liger switch rope; expected True or False"),
        ({"cross_entropy": True, "fused_linear_cross_entropy": True}, "exclude each other"),
        ({"layer_norm": True}, f'{HUB} has no LayerNorm layer; expected source="builtin"'),
        ({"source": "liger"}, "no organization"),
    ],
)
def test_switches_that_cannot_be_are_refused(switches: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfig) as caught:
        KernelConfig.from_liger(**switches)
    assert words in str(caught.value)


def test_both_kinds_of_cross_entropy_may_be_off() -> None:
    mapping = KernelConfig.from_liger(cross_entropy=False, fused_linear_cross_entropy=False).kernel_mapping
    assert not {"ForCausalLMLoss", "FusedLinearCrossEntropy"} & set(mapping)
