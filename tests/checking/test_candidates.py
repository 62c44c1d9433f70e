"""Several kernels for one layer in a config: read, written back, and taken apart."""

from __future__ import annotations

from typing import Any

import pytest

from kernelhub.config import KernelConfig
from kernelhub.errors import InvalidConfig


def test_candidates_are_taken_apart_in_order() -> None:
    config = KernelConfig({"RMSNorm": ["org/a:L", ("org/b:L", {"version": 2}), "org/c:L"], "MLP": "org/a:M"})
    assert [each.kernel_mapping for each in config.candidates()] == [
        {"RMSNorm": "org/a:L", "MLP": "org/a:M"},
        {"RMSNorm": "org/b@v2:L"},
        {"RMSNorm": "org/c:L"},
    ]
    assert [str(choice) for choice in config.choices()] == ["org/a:L", "org/b@v2:L", "org/c:L", "org/a:M"]
    assert config.entries[0].choices[0][1] is not None
    assert str(config.entries[0].choices[0][1]) == "org/a:L"  # what is bound where nothing is measured


def test_candidates_per_device_and_mode() -> None:
    config = KernelConfig({"Norm": {"cuda": ["org/a:L", "org/b:L"], "cpu": {"training": "org/c:L"}}})
    assert [each.kernel_mapping for each in config.candidates()] == [
        {"Norm": {"cuda": "org/a:L", "cpu": {"training": "org/c:L"}}},
        {"Norm": {"cuda": "org/b:L", "cpu": {"training": "org/c:L"}}},
    ]


@pytest.mark.parametrize("value", [["org/a:L", "org/b:L"], {"cpu": ["org/a:L", ("org/b:L", {"optional": True})]}])
def test_a_config_with_candidates_is_written_and_read_back(value: Any) -> None:
    config = KernelConfig({"Norm": value})
    assert KernelConfig(config.kernel_mapping) == config
    assert KernelConfig.from_dict(config.to_dict()) == config


def test_a_config_without_candidates_is_its_own_part() -> None:
    config = KernelConfig({"Norm": "org/a:L"})
    assert config.candidates() == (config,)
    assert KernelConfig().candidates() == (KernelConfig(),)


@pytest.mark.parametrize(
    "value", [[], ["org/a:L"], ["org/a:L", ""], [["org/a:L", "org/b:L"], "org/c:L"], ["org/a:L", 3]]
)
def test_an_unreadable_list_is_refused(value: Any) -> None:
    with pytest.raises(InvalidConfig, match="layer 'Norm'"):
        KernelConfig({"Norm": value})
