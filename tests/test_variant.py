from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.backend import BACKENDS, Backend, Release
from kernelhub.errors import InvalidVariant
from kernelhub.variant import CPUS, NOARCH_NAMES, STABLE_ABI, SYSTEMS, TORCH, TVM_FFI, Variant

CORPUS = (Path(__file__).parent / "data" / "variants.txt").read_text(encoding="utf-8").splitlines()
KNOWN = [line.split("\t") for line in CORPUS if line and line[0] not in "#!"]
UNKNOWN = [line.partition("\t")[2] for line in CORPUS if line.startswith("!")]


@pytest.mark.parametrize(("name", "framework", "backend", "cpu", "system"), KNOWN)
def test_a_published_name_is_read_and_written_back(
    name: str, framework: str, backend: str, cpu: str, system: str
) -> None:
    variant = Variant.parse(name)
    assert str(variant) == name
    release = str(variant.release) if variant.release else None
    parts = [variant.framework, release, variant.abi, "noarch" if variant.noarch else None]
    assert " ".join(part for part in parts if part) == framework
    assert (variant.noarch or (variant.backend and variant.backend.describe())) == backend
    assert (variant.cpu or "-", variant.os or "-") == (cpu, system)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_name_that_is_no_variant_is_told_apart(name: str) -> None:
    with pytest.raises(InvalidVariant):
        Variant.parse(name)


def test_torch_210_is_torch_two_ten() -> None:
    assert Variant.parse("torch210-cu128-x86_64-linux").release == Release(2, 10)
    assert Variant.parse("torch-stable-abi210-cu128-x86_64-linux").release == Release(2, 10)


def test_a_version_far_in_the_future_is_read() -> None:
    """It is never selected; the selection says why."""
    variant = Variant.parse("torch29-cu9999-x86_64-linux")
    assert variant.backend == Backend("cuda", Release(99, 99))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch2-cpu-x86_64-linux", "torch version '2'"),
        ("torch029-cpu-x86_64-linux", "torch version '029'"),
        ("torch209-cpu-x86_64-linux", "torch version '209'"),
        ("torch2.9-cpu-x86_64-linux", "torch version '2.9'"),
        ("torch201-cpu-x86_64-linux", "torch version '201'"),
        ("torch29-cu1-x86_64-linux", "backend 'cu1'"),
        ("torch29-cu-x86_64-linux", "backend 'cu'"),
        ("torch29-cu13.0-x86_64-linux", "backend 'cu13.0'"),
        ("torch29-CU130-x86_64-linux", "backend 'CU130'"),
        ("torch29--cu130-x86_64-linux", "part count: 4"),
        ("torch29-cu130-x86_64", "part count: 2"),
        ("torch29-cu130-x86_64-linux-extra", "part count: 4"),
        ("torch29-cu130-amd64-linux", "unknown cpu 'amd64'; expected one of aarch64, x86_64"),
        ("torch29-cu130-x86_64-Linux", "unknown os 'Linux'; expected one of darwin, linux, windows"),
        ("torch29-cxx12-cu130-x86_64-linux", "unknown C++ ABI tag 'cxx12'"),
        ("torch\uff12\uff19-cpu-x86_64-linux", "non-ASCII character"),
        ("torch29-cpu-x86_64-linux\n", "unknown os 'linux\\n'"),
        pytest.param(f"torch{'2' * 5000}-cpu-x86_64-linux", "length 5022 > 100", id="5000 digits"),
        ("torch-../..", "contains '..'"),
        ("torch99-cpu-..-..", "contains '..'"),
        ("torch-stable-abi-cu128-x86_64-linux", "torch-stable-abi version ''"),
        ("torch-stable-abi2.10-cu128-x86_64-linux", "torch-stable-abi version '2.10'"),
        ("torch-stable-abi210-cxx11-cu128-x86_64-linux", "part count: 4"),
        ("tvm-ffi-cpu-x86_64-linux", "tvm-ffi version ''"),
        ("jax04-cpu-x86_64-linux", "unknown framework"),
        (".git", "unknown framework"),
        ("__pycache__", "unknown framework"),
        ("", "unknown framework"),
        ("torch", "torch version ''"),
        ("torch-", "torch version ''"),
        ("torch-cann", "torch version ''"),
    ],
)
def test_an_unreadable_name_is_refused_in_words(name: str, words: str) -> None:
    with pytest.raises(InvalidVariant) as caught:
        Variant.parse(name)
    assert words in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_hostile_length_is_cut_from_the_message() -> None:
    with pytest.raises(InvalidVariant) as caught:
        Variant.parse(f"torch{'2' * 5_000_000}-cpu-x86_64-linux")
    assert len(str(caught.value)) < 400


RELEASES = st.builds(Release, st.integers(1, 9), st.integers(0, 999))


@st.composite
def variants(draw: st.DrawFn) -> Variant:
    framework = draw(st.sampled_from([TORCH, STABLE_ABI, TVM_FFI, "noarch"]))
    if framework == "noarch":
        return Variant(TORCH, noarch=draw(st.sampled_from(NOARCH_NAMES)))
    kind = draw(st.sampled_from(BACKENDS))
    low = 10 ** (kind.major_digits - 1) if kind.major_digits else 0
    major = st.integers(low, 10**kind.major_digits - 1)
    release = draw(st.builds(Release, major, st.integers(0, 99))) if kind.major_digits else None
    abi = draw(st.sampled_from([None, "cxx11", "cxx98"])) if framework == TORCH else None
    cpu, system = draw(st.sampled_from(CPUS)), draw(st.sampled_from(SYSTEMS))
    return Variant(framework, draw(RELEASES), abi, Backend(kind.name, release), cpu, system)


@given(variants())
def test_a_variant_reads_back_from_its_own_text(variant: Variant) -> None:
    assert Variant.parse(str(variant)) == variant


PIECES = [
    "torch",
    "-stable-abi",
    "tvm-ffi",
    "29",
    "210",
    "0",
    "-cxx11",
    "-cu130",
    "-cpu",
    "-x86_64",
    "-linux",
    "-",
    ".",
]


@given(st.text() | st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
def test_any_text_is_a_variant_in_its_only_spelling_or_refused(text: str) -> None:
    try:
        variant = Variant.parse(text)
    except InvalidVariant:
        return
    assert str(variant) == text


@pytest.mark.parametrize(
    ("name", "expected"), [("torch-cpu", True), ("torch213-cxx11-cu130-x86_64-linux", True), ("x", False)]
)
def test_names_of_variants_are_told_from_others(name: str, expected: bool) -> None:
    assert Variant.is_name(name) is expected
