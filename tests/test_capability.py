from __future__ import annotations

from types import SimpleNamespace

import pytest

from kernelhub.backend import Release
from kernelhub.capability import DeviceRange
from kernelhub.errors import InvalidBackend


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("cuda", "cuda"),
        ("mps", "metal"),
        ("cuda>=9.0,<10", "cuda>=9.0,<10.0"),
        ("cuda >= 9 , < 10", "cuda>=9.0,<10.0"),
        ("cuda==8.9", "cuda>=8.9,<8.10"),
        ("cuda<=8.6", "cuda<8.7"),
        ("cuda>8.6", "cuda>=8.7"),
        ("cuda>=8,>=9,<12,<11", "cuda>=9.0,<11.0"),
        ("rocm>=9.4", "rocm>=9.4"),
    ],
)
def test_a_range_reads_back_from_its_text(text: str, canonical: str) -> None:
    found = DeviceRange.parse(text)
    assert str(found) == canonical
    assert DeviceRange.parse(canonical) == found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cuda>=", "unreadable bound '>='"),
        ("cuda>=9.0a", "unreadable bound"),
        ("cuda>=9,", "unreadable bound ''"),
        ("cuda>=10,<9", "no capability is in this range"),
        ("cpu>=1", "cpu has no capabilities"),
        ("cdua>=9", "did you mean 'cuda'?"),
        ("cuda~9", "unknown name, did you mean 'cuda'?"),
        ("", "unknown name"),
    ],
)
def test_what_is_no_range_is_refused(text: str, words: str) -> None:
    with pytest.raises(InvalidBackend) as caught:
        DeviceRange.parse(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "capability", "holds"),
    [
        ("cuda", Release(9, 0), True),
        ("cuda", None, True),
        ("cuda>=9.0,<10", Release(9, 0), True),
        ("cuda>=9.0,<10", Release(10, 0), False),
        ("cuda>=9.0,<10", None, False),
        ("cuda<=9.0", Release(9, 0), True),
        ("cuda==8.9", Release(8, 10), False),
        ("rocm", Release(9, 0), False),
    ],
)
def test_a_range_holds_the_devices_inside(text: str, capability: Release | None, holds: bool) -> None:
    assert DeviceRange.parse(text).holds("cuda", capability) is holds


def test_narrower_ranges_have_the_smaller_width() -> None:
    texts = ["cuda==9.0", "cuda>=8.0,<9.0", "cuda>=8,<10", "cuda>=8", "cuda"]
    widths = [DeviceRange.parse(text).width for text in texts]
    assert widths == sorted(set(widths))


def test_the_devices_of_the_peer_are_read_too() -> None:
    """Its capabilities are major * 10 + minor, both ends included, without a bound 0 or a huge number."""

    def device(**properties: int) -> SimpleNamespace:
        return SimpleNamespace(type="cuda", properties=SimpleNamespace(**properties) if properties else None)

    assert str(DeviceRange.of(device())) == "cuda"
    assert str(DeviceRange.of(device(min_capability=75, max_capability=89))) == "cuda>=7.5,<9.0"
    assert str(DeviceRange.of(device(min_capability=0, max_capability=2**63 - 1))) == "cuda"
    with pytest.raises(InvalidBackend, match="name is not a string"):
        DeviceRange.of(5)
