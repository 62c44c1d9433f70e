"""The trust root: which file is in use, how old it is, and what is no trust root."""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING

import pytest
from authority import Authority
from tuf.api.metadata import Metadata, Root  # type: ignore[attr-defined]  # documented there

from kernelhub.errors import InvalidConfig
from kernelhub.policy import NO_POLICY, Policy
from kernelhub.rootupdate import write
from kernelhub.signer import checked_root
from kernelhub.trustroot import BUNDLED, TrustRoot, bundled_file

if TYPE_CHECKING:
    from pathlib import Path

KEYS = Authority().root
WHOLE = {"schema": 1, "time": "2026-03-01T12:00:00Z", "source": "https://tuf.test", "trusted_root": KEYS}


def test_the_bundled_root_is_one_that_sigstore_reads_and_says_its_date() -> None:
    root = TrustRoot.bundled()
    assert checked_root(root)
    assert root.told_time.startswith("2026-10-")
    assert "https://fulcio.sigstore.dev" in root.authorities
    assert str(root).startswith(f"trust root ({BUNDLED}, of 2026-10-")
    first: Metadata[Root] = Metadata.from_bytes(bundled_file("tuf-root.json"))
    first.signed.verify_delegate("root", first.signed_bytes, first.signatures)  # the key that a refresh starts from


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    root = TrustRoot.parse(json.dumps(WHOLE).encode(), "test")
    write(root, tmp_path / "new" / "root.json")
    again = TrustRoot.read(tmp_path / "new" / "root.json")
    assert (again.keys, again.time, again.source) == (KEYS, root.time, "https://tuf.test")
    assert again.told_time == "2026-03-01T12:00:00Z"
    assert again.digest == root.digest
    assert (tmp_path / "new" / "root.json").stat().st_mode & 0o777 == 0o644


def test_a_plain_file_of_sigstore_is_as_old_as_the_file(tmp_path: Path) -> None:
    path = tmp_path / "trusted_root.json"
    path.write_text(json.dumps(KEYS))
    assert TrustRoot.read(path).days < 1
    ago = time.time() - 10 * 24 * 3600
    os.utime(path, (ago, ago))
    assert 9 < TrustRoot.read(path).days < 11


def test_a_root_from_the_future_is_new() -> None:
    assert TrustRoot(KEYS, time.time() + 1e9, "test").days == 0.0


def test_the_variable_comes_first_then_the_policy_then_what_was_refreshed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    assert TrustRoot.in_use(NO_POLICY).origin == BUNDLED
    names = ("kernelhub/trust-root.json", "policy.json", "variable.json")
    refreshed, named, variable = (tmp_path / name for name in names)
    refreshed.parent.mkdir()
    for path in (refreshed, named, variable):
        path.write_text(json.dumps(WHOLE))
    assert TrustRoot.in_use(NO_POLICY).origin == str(refreshed)
    policy = Policy(trust_root=named)
    assert TrustRoot.in_use(policy).origin == str(named)
    monkeypatch.setenv("KERNELHUB_TRUST_ROOT", str(variable))
    assert TrustRoot.in_use(policy).origin == str(variable)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (b"[" * 100_000, "not a JSON object"),
        (b"{}", "not a trust root"),
        (json.dumps({**WHOLE, "schema": 2}).encode(), "not a trust root"),
        (json.dumps({**WHOLE, "trusted_root": []}).encode(), "not a trust root"),
        (json.dumps({**WHOLE, "time": 5}).encode(), "not a trust root"),
        (json.dumps({**WHOLE, "time": "yesterday"}).encode(), "key 'time'"),
        (b" " * (1 << 21), "more than"),
    ],
)
def test_what_is_no_trust_root_is_refused(data: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "root.json"
    path.write_bytes(data)
    with pytest.raises(InvalidConfig, match=problem):
        TrustRoot.read(path)


def test_a_file_that_is_missing_or_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="cannot be read"):
        TrustRoot.read(tmp_path / "none.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidConfig, match="cannot be written"):
        write(TrustRoot.bundled(), tmp_path / "file" / "root.json")
