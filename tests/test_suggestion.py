"""A build whose library cannot be loaded is told with what to type instead, in the error and in the explanation."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import pytest
from kernel_repository import trust, write_build

from kernelhub import explain, kernelize, load_kernel
from kernelhub.errors import IncompatibleLibrary
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is looked at")

BAD: dict[str, str | bytes] = {"__init__.py": "from . import _x\n", "_x.abi3.so": b"text"}
GOOD: dict[str, str | bytes] = {"__init__.py": "ONE = 1\n"}
OTHER = "Another version has a build for this machine: ask for "


@pytest.fixture
def publish(hub_root: Path) -> Callable[..., None]:
    def write(*versions: tuple[dict[str, str | bytes], str]) -> None:
        trust(hub_root, "acme")
        for number, (files, variant) in enumerate(versions, 1):
            write_build(hub_root, "acme/probe", f"v{number}", variant, files, version=number)

    return write


def hint(session: Session, request: str = "acme/probe@v1") -> str:
    with pytest.raises(IncompatibleLibrary) as caught:
        load_kernel(request, session=session)
    assert str(caught.value).endswith(caught.value.hint)
    return caught.value.hint


def test_versions_that_may_do_are_named_newest_first_as_text_to_type(
    publish: Callable[..., None], session: Session
) -> None:
    publish((BAD, "torch-cpu"), (GOOD, "torch-cpu"), (GOOD, "torch-cuda"), (GOOD, "torch-cpu"))
    assert hint(session).endswith(f"{OTHER}'acme/probe@v4' or 'acme/probe@v2'.")
    assert load_kernel("acme/probe@v4", session=session).ONE == 1
    told = explain("acme/probe@v1", session=session)
    assert told.advice == f"{OTHER}'acme/probe@v4' or 'acme/probe@v2'."
    assert told.verdict == "torch-cpu, which cannot be loaded here: not an ELF file (it starts with b'text')"
    assert "library      '_x.abi3.so': not an ELF file" in str(told)
    assert str(told).endswith(f"next         {told.advice}")
    assert told.to_dict()["libraries"] == {"_x.abi3.so": ["not an ELF file (it starts with b'text')"]}


def test_a_version_that_is_stored_and_no_better_is_not_named(publish: Callable[..., None], session: Session) -> None:
    publish((BAD, "torch-cpu"), (BAD, "torch-cpu"), (GOOD, "torch-cpu"))
    assert hint(session).endswith("ask for 'acme/probe@v3' or 'acme/probe@v2'.")
    assert hint(session, "acme/probe@v2").endswith("ask for 'acme/probe@v3'.")


def test_when_no_other_version_would_do_it_says_so(publish: Callable[..., None], session: Session) -> None:
    publish((BAD, "torch-cpu"), (GOOD, "torch-cuda"))
    assert hint(session).endswith("No other version has a build for this machine.")


def test_without_the_hub_the_refusal_stays_as_it_is(
    publish: Callable[..., None], session: Session, hub: LocalHub
) -> None:
    publish((BAD, "torch-cpu"), (GOOD, "torch-cpu"))
    session.obtain(session.resolve(KernelRequest.parse("acme/probe@v1")))
    offline = type(session)(cache_dir=session.cache_dir, endpoint=hub.url, offline=True, reporter=session.reporter)
    assert hint(offline) == "See `kernelhub explain` for builds and versions that fit."


def test_a_local_build_has_no_other_versions(tmp_path: Path, hubless: Session) -> None:
    folder = write_build(tmp_path, "acme/probe", "v1", "torch-cpu", BAD)
    assert "version" not in hint(hubless, str(folder)).partition("builds and versions")[2]


def test_a_lock_says_which_version_it_is(publish: Callable[..., None], session: Session) -> None:
    publish((BAD, "torch-cpu"), (GOOD, "torch-cpu"))
    lock = session.make_lock([KernelRequest.parse("acme/probe@v1")])
    locked = type(session)(cache_dir=session.cache_dir, endpoint=session.endpoint, token=False, lockfile=lock)
    assert OTHER not in hint(locked)


def test_binding_tells_it_too(publish: Callable[..., None], session: Session) -> None:
    from torch import nn

    publish((BAD, "torch-cpu"), (GOOD, "torch-cpu"))
    with pytest.raises(IncompatibleLibrary, match="ask for 'acme/probe@v2'"):
        kernelize(nn.Sequential(nn.RMSNorm(4)), {"RMSNorm": "acme/probe@v1:Layer"}, session=session)
