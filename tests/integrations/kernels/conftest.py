"""The API of `kernels` takes no session: it finds the Hub of the tests by the environment, as users' code does."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import kernelhub.integrations.kernels as api
from kernelhub.integrations.kernels.layer import mapping

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kernelhub.serve import LocalHub


@pytest.fixture
def online(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_kernels: object
) -> Iterator[LocalHub]:
    """The Hub, an empty store, and no mapping."""
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    yield hub
    api.register_kernel_mapping({}, inherit_mapping=False)
    assert mapping.current_mapping().find("RMSNorm") is None
