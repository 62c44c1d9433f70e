from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.config import KernelConfig
from kernelhub.errors import InvalidConfig
from kernelhub.fusion import Fusion, Member

if TYPE_CHECKING:
    from pathlib import Path

PAIRS = (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))
TEXT = "RMSNorm=model.layers.*.post_attention_layernorm + MLP=model.layers.*.mlp"

names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
children = st.from_regex(r"[A-Za-z0-9_]{1,8}", fullmatch=True)
parents = st.lists(st.from_regex(r"[A-Za-z0-9_*]{1,6}", fullmatch=True), max_size=4).map(".".join)
fusions = st.builds(
    lambda parent, members: Fusion(tuple(Member(name, parent, child) for name, child in members)),
    parents,
    st.lists(st.tuples(names, children), min_size=1, max_size=4, unique_by=lambda member: member[1]),
)


@given(fusions)
def test_the_text_of_a_fusion_reads_back(fusion: Fusion) -> None:
    assert Fusion.parse(str(fusion)) == fusion
    pairs = tuple((each.name, f"{each.parent}.{each.child}".lstrip(".")) for each in fusion.members)
    assert Fusion.of(pairs) == fusion


@given(st.text(alphabet="AMb.*=+ ", max_size=20))
def test_any_text_is_a_fusion_or_refused(text: str) -> None:
    try:
        fusion = Fusion.parse(text)
    except InvalidConfig:
        return
    assert Fusion.parse(str(fusion)) == fusion


def test_a_tuple_and_its_text_are_the_same_key() -> None:
    config = KernelConfig({PAIRS: "org/repo:Fused"})
    assert config == KernelConfig({TEXT: "org/repo:Fused"}) == KernelConfig({TEXT.replace(" ", ""): "org/repo:Fused"})
    assert config.kernel_mapping == {TEXT: "org/repo:Fused"}
    assert KernelConfig.from_dict(config.to_dict()) == config
    assert config.entries[0].is_path
    assert config.entries[0].fusion == Fusion.parse(TEXT)


@pytest.mark.parametrize("name", ["kernels.toml", "kernels.json"])
def test_a_file_spells_a_fusion_as_text(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    toml = f'[kernel_mapping]\n"{TEXT}" = "org/repo:Fused"\n'
    path.write_text(toml if name.endswith("toml") else f'{{"kernel_mapping": {{"{TEXT}": "org/repo:Fused"}}}}')
    assert KernelConfig.from_file(path) == KernelConfig({PAIRS: "org/repo:Fused"})


REFUSED: list[tuple[Any, str]] = [
    ((), "a fusion without layers"),
    (("RMSNorm", "MLP"), "not the key of a fusion"),
    (("RMSNorm", "model.norm"), "not the key of a fusion"),
    ((("RMSNorm", "a.norm", "x"), ("MLP", "a.mlp")), "not the key of a fusion"),
    ((("RMSNorm", "a.norm"), ("MLP", 3)), "not the key of a fusion"),
    ((("RMSNorm", "a.norm"), ("MLP", "b.mlp")), "have one parent"),
    ((("RMSNorm", "norm"), ("MLP", "b.mlp")), "have one parent"),
    ((("RMSNorm", "a.norm"), ("MLP", "a.norm")), "named twice"),
    ((("RMSNorm", "a.*"), ("MLP", "a.mlp")), "a pattern at the end"),
    ((("RMS Norm", "a.norm"),), "not a layer of a fusion"),
    ((("", "a.norm"),), "not a layer of a fusion"),
    ((("RMSNorm", ""),), "not a layer of a fusion"),
    ((("RMSNorm", "a..norm"),), "not a layer of a fusion"),
    ("RMSNorm=a.norm +", "not a layer of a fusion"),
    ("RMSNorm=a.norm MLP=a.mlp", "not a layer of a fusion"),
    ("=a.norm", "not a layer of a fusion"),
]


@pytest.mark.parametrize(("key", "problem"), REFUSED)
def test_other_keys_are_refused_with_the_reason(key: Any, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=problem):
        KernelConfig({key: "org/repo:Fused"})


def test_one_fusion_in_two_spellings_is_given_twice() -> None:
    with pytest.raises(InvalidConfig, match="a fusion given twice"):
        KernelConfig({PAIRS: "org/repo:Fused", TEXT: "org/repo:Other"})


def test_one_layer_may_end_in_a_pattern() -> None:
    config = KernelConfig({(("DecoderLayer", "model.layers.*"),): "org/repo:Layer"})
    assert list(config.kernel_mapping) == ["DecoderLayer=model.layers.*"]
