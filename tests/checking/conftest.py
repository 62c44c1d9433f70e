"""One thread: the work of these tests is small, and the machine does other things too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from kernelhub.session import Session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def session(tmp_path: Path) -> Session:
    """A session whose store is empty, and stays on this machine."""
    return Session(cache_dir=tmp_path / "store", offline=True)
