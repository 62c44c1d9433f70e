from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.backend import ACCEPTED_NAMES, BACKENDS, Backend, Release, backend_kind, device_backend, split_release
from kernelhub.errors import InvalidBackend


@pytest.mark.parametrize(
    ("text", "name", "release"),
    [
        ("cpu", "cpu", None),
        ("metal", "metal", None),
        ("neuron", "neuron", None),
        ("tpu", "tpu", None),
        ("cu118", "cuda", (11, 8)),
        ("cu126", "cuda", (12, 6)),
        ("cu130", "cuda", (13, 0)),
        ("cu1210", "cuda", (12, 10)),
        ("cu9999", "cuda", (99, 99)),
        ("rocm63", "rocm", (6, 3)),
        ("rocm714", "rocm", (7, 14)),
        ("xpu20253", "xpu", (2025, 3)),
        ("xpu20260", "xpu", (2026, 0)),
        ("cann81", "cann", (8, 1)),
    ],
)
def test_the_digits_of_a_backend_are_split_by_its_own_rule(
    text: str, name: str, release: tuple[int, int] | None
) -> None:
    backend = Backend.parse(text)
    assert (backend.name, backend.release) == (name, release)
    assert str(backend) == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cu", "no readable version; expected like cu130 for 13.0"),
        ("cu1", "no readable version"),
        ("cu12", "no readable version"),
        ("cu0130", "no readable version"),
        ("cu1300", "no readable version"),
        ("cu13.0", "unknown backend"),
        ("CU130", "unknown backend; expected one of cann, cpu, cu, metal"),
        ("cuda130", "unknown backend"),
        ("cpu1", "no readable version; expected like cpu"),
        ("rocm6", "no readable version; expected like rocm63 for 6.3"),
        ("xpu2025", "no readable version; expected like xpu20253"),
        ("cu123456789", "no readable version"),
        ("cu" + "1" * 5000, "no readable version"),
        ("cu\uff11\uff13\uff10", "unknown backend"),
        ("", "unknown backend"),
    ],
)
def test_an_unreadable_backend_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidBackend) as caught:
        Backend.parse(text)
    assert words in str(caught.value)


def test_minor_versions_are_compared_as_numbers() -> None:
    assert Release(12, 10) > Release(12, 9)
    assert str(Release(12, 10)) == "12.10"


@pytest.mark.parametrize(
    ("name", "backend"),
    [
        ("cpu", "cpu"),
        ("cuda", "cuda"),
        ("rocm", "rocm"),
        ("xpu", "xpu"),
        ("metal", "metal"),
        ("mps", "metal"),
        ("cann", "cann"),
        ("npu", "cann"),
        ("neuron", "neuron"),
        ("tpu", "tpu"),
    ],
)
def test_every_documented_device_name_is_accepted(name: str, backend: str) -> None:
    """REF huggingface/kernels#131, #132, #669: the documentation listed "cpu", the code raised ValueError."""
    assert backend_kind(name).name == backend
    assert name in ACCEPTED_NAMES


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CUDA", "did you mean 'cuda'? expected one of"),
        ("CPU", "did you mean 'cpu'?"),
        ("cuda:0", "did you mean 'cuda'?"),
        ("hpu", "unknown name"),
        ("vulkan", "unknown name; expected one of cann, cpu, cuda, metal, mps, neuron, npu, rocm, tpu, xpu"),
        ("", "unknown name; expected one of cann"),
        (None, "unknown name"),
        (["cuda"], "unknown name"),
    ],
)
def test_an_unknown_device_name_lists_the_accepted_ones(name: Any, words: str) -> None:
    """REF huggingface/kernels#131, #132, #669."""
    with pytest.raises(InvalidBackend) as caught:
        backend_kind(name)
    assert words in str(caught.value)
    assert all(accepted in str(caught.value) for accepted in ACCEPTED_NAMES)


@pytest.mark.parametrize(
    ("device", "rocm", "backend"),
    [
        ("cuda", False, "cuda"),
        ("cuda", True, "rocm"),
        ("mps", False, "metal"),
        ("npu", False, "cann"),
        ("xla", False, "tpu"),
        ("cpu", False, "cpu"),
        ("cpu", True, "cpu"),
        ("meta", False, "meta"),
    ],
)
def test_a_rocm_device_called_cuda_is_served_by_rocm(device: str, rocm: bool, backend: str) -> None:
    """REF huggingface/kernels-community#674, #679: on ROCm, ``device.type`` is "cuda"."""
    assert device_backend(device, rocm=rocm) == backend


def test_the_table_names_each_backend_once() -> None:
    spellings = [spelling for kind in BACKENDS for spelling in (kind.name, *kind.aliases)]
    assert len(spellings) == len(set(spellings)) == len(ACCEPTED_NAMES)
    assert len({kind.token for kind in BACKENDS}) == len({kind.noarch for kind in BACKENDS}) == len(BACKENDS)


def test_a_backend_is_described_for_people() -> None:
    assert Backend("cuda", Release(13, 0)).describe() == "cuda 13.0"
    assert Backend("cpu").describe() == "cpu"


@st.composite
def backends(draw: st.DrawFn) -> Backend:
    kind = draw(st.sampled_from(BACKENDS))
    if not kind.major_digits:
        return Backend(kind.name)
    low = 10 ** (kind.major_digits - 1)
    major = draw(st.integers(low if kind.major_digits > 1 else 0, 10**kind.major_digits - 1))
    return Backend(kind.name, Release(major, draw(st.integers(0, 999))))


@given(backends())
def test_a_backend_reads_back_from_its_own_text(backend: Backend) -> None:
    assert Backend.parse(str(backend)) == backend


@given(st.text() | st.from_regex(r"(cu|rocm|xpu|cann|cpu|metal)[0-9.]{0,10}", fullmatch=True))
def test_any_text_is_a_backend_in_its_only_spelling_or_refused(text: str) -> None:
    try:
        backend = Backend.parse(text)
    except InvalidBackend:
        return
    assert str(backend) == text


@given(st.text(), st.integers(0, 4))
def test_splitting_never_raises(digits: str, major_digits: int) -> None:
    release = split_release(digits, major_digits)
    assert release is None or f"{release.major}{release.minor}" == digits
