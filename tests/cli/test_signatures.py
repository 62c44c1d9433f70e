"""verify, info, explain and doctor tell who signed a build, and why nobody can say."""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

import pytest
from authority import ISSUER, SIGNER, Authority
from kernel_repository import trust, write_build
from typer.testing import CliRunner, Result

from kernelhub.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub

AUTHORITY = Authority()
BODY = {"__init__.py": "raise RuntimeError('imported')\n"}
POLICY = f"""
[signatures]
acme = "RULE"

[identities.acme]
issuer = "{ISSUER}"
signers = ["{SIGNER}"]
"""


def sign(build: Path, signer: str = SIGNER) -> Path:
    data = (build / "metadata.json").read_bytes()
    (build / "metadata.json.sigstore").write_bytes(AUTHORITY.sign(data, signer=signer))
    return build


@pytest.fixture
def rule(tmp_path: Path) -> Callable[[str], None]:
    def write(rule: str) -> None:
        (tmp_path / "policy.toml").write_text(POLICY.replace("RULE", rule))

    return write


@pytest.fixture
def kernelhub(
    hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: Callable[[str], None]
) -> Callable[..., Result]:
    trust(hub_root, "acme")
    sign(write_build(hub_root, "acme/relu", "v1", "torch-cpu", BODY))
    sign(write_build(hub_root, "other/relu", "v1", "torch-cpu", BODY))
    write_build(hub_root, "acme/plain", "v1", "torch-cpu", BODY)
    now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    root = {"schema": 1, "time": now, "source": "test", "trusted_root": AUTHORITY.root}
    (tmp_path / "root.json").write_text(json.dumps(root))
    rule("off")
    settings = {"HF_ENDPOINT": hub.url, "KERNELHUB_CACHE": tmp_path / "store", "HOME": tmp_path}
    paths = {"KERNELHUB_POLICY": tmp_path / "policy.toml", "KERNELHUB_TRUST_ROOT": tmp_path / "root.json"}
    for name, value in {**settings, **paths}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


def rows(result: Result) -> dict[str, dict[str, Any]]:
    return {row["build"].split("@")[0]: row for row in json.loads(result.stdout)}


def test_verify_tells_a_state_and_the_signer_of_each_build(
    kernelhub: Callable[..., Result], rule: Callable[[str], None], imported: Callable[[], list[str]]
) -> None:
    kernelhub("prefetch", "acme/relu", "acme/plain", "other/relu", "--trust", "other/relu")
    result = kernelhub("verify", "--all", "--json")
    assert result.exit_code == 0
    found = rows(result)
    states = {name: row["state"] for name, row in found.items()}
    assert states == {"acme/relu": "signed", "acme/plain": "self-attested", "other/relu": "self-attested"}
    assert found["acme/relu"]["signer"] == f"{SIGNER} (issuer {ISSUER}), 2026-03-01 12:00:05 UTC"
    assert found["other/relu"]["note"].startswith("it is signed, but nothing says by whom")
    assert found["acme/plain"]["note"] == ""
    assert f"signed: by {SIGNER}" in kernelhub("verify", "acme/relu").stdout
    rule("require")
    result = kernelhub("verify", "--all", "--json")
    assert result.exit_code == 1
    assert [name for name, row in rows(result).items() if row["refused"]] == ["acme/plain"]
    assert "but a signature (" in rows(result)["acme/plain"]["problem"]
    assert kernelhub("verify", "acme/relu").exit_code == 0
    assert not imported()


def test_verify_tells_a_bad_signature_whatever_the_policy(kernelhub: Callable[..., Result], hub_root: Path) -> None:
    sign(hub_root / "acme/relu/v1/build/torch-cpu", SIGNER.replace("acme", "evil"))
    kernelhub("prefetch", "acme/relu")
    result = kernelhub("verify", "acme/relu")
    assert result.exit_code == 1
    assert ": bad: " in result.stdout
    assert "its signature is refused: it names 'https://github.com/evil/kernels" in result.stdout


def test_verify_takes_a_folder_for_that_of_a_publisher(kernelhub: Callable[..., Result], hub_root: Path) -> None:
    folder = str(hub_root / "acme/relu/v1")
    told = kernelhub("verify", folder)
    assert (told.exit_code, "a folder does not say who its publisher is" in told.stdout) == (0, True)
    assert f"torch-cpu: signed: by {SIGNER}" in kernelhub("verify", folder, "--publisher", "acme").stdout
    sign(hub_root / "acme/relu/v1/build/torch-cpu", SIGNER.replace("acme", "evil"))
    assert kernelhub("verify", folder, "--publisher", "acme").exit_code == 1


def test_verify_believes_nothing_that_was_found_before(
    kernelhub: Callable[..., Result], rule: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    rule("require")
    kernelhub("prefetch", "acme/relu")
    monkeypatch.setitem(sys.modules, "sigstore", None)
    for name in [name for name in sys.modules if name.startswith("sigstore.")]:
        monkeypatch.delitem(sys.modules, name)
    result = kernelhub("verify", "acme/relu")
    assert result.exit_code == 1
    assert "pip install 'kernelhub[sign]'" in result.stdout


@pytest.mark.parametrize("locked", [True, False])
def test_verify_tells_what_a_lock_lists(kernelhub: Callable[..., Result], tmp_path: Path, locked: bool) -> None:
    kernelhub("prefetch", "acme/relu@v1", "acme/plain@v1")
    if locked:
        assert kernelhub("lock", "acme/relu@v1", "acme/plain@v1").exit_code == 0
    found = rows(kernelhub("verify", "--all", "--json"))
    expected = ["locked", "locked+signed"] if locked else ["self-attested", "signed"]
    assert [found["acme/plain"]["state"], found["acme/relu"]["state"]] == expected


def test_info_and_explain_tell_the_signature_as_far_as_it_was_checked(
    kernelhub: Callable[..., Result], rule: Callable[[str], None], hub_root: Path
) -> None:
    def told(request: str) -> str:
        signature: str = json.loads(kernelhub("info", request, "--json").stdout)["signature"]
        return signature

    assert told("acme/plain@v1") == "none"
    assert told("acme/relu@v1") == "there is one; not looked at, as the policy does not ask for it"
    rule("require")
    assert told("acme/relu@v1") == "there is one; checked when the build is fetched"
    kernelhub("prefetch", "acme/relu@v1")
    assert told("acme/relu@v1") == f"{SIGNER} (issuer {ISSUER}), 2026-03-01 12:00:05 UTC"
    assert f"signature    {SIGNER}" in kernelhub("explain", "acme/relu@v1").stdout
    sign(write_build(hub_root, "acme/bad", "v1", "torch-cpu", BODY), SIGNER.replace("acme", "evil"))
    kernelhub("prefetch", "acme/bad@v1")
    assert told("acme/bad@v1").startswith("REFUSED: ")


def test_doctor_tells_the_trust_root_and_whether_signatures_can_be_checked(
    kernelhub: Callable[..., Result], rule: Callable[[str], None], tmp_path: Path
) -> None:
    def asked(*arguments: str) -> tuple[int, dict[str, Any]]:
        result = kernelhub("doctor", "--json", "--no-check", *arguments)
        return result.exit_code, json.loads(result.stdout)

    code, found = asked("acme/relu@v1")
    assert code == 0
    assert found["signatures"]["origin"] == "~/root.json"
    assert found["signatures"]["checked"] is True
    assert found["policy"]["signers"] == {"acme": f"{SIGNER} (issuer {ISSUER})"}
    assert found["kernelhub"]["sigstore"]
    assert found["requests"]["acme/relu@v1"]["signature"].startswith("there is one")
    root = json.loads((tmp_path / "root.json").read_text())
    (tmp_path / "root.json").write_text(json.dumps({**root, "time": "2025-01-01T00:00:00Z"}))
    code, found = asked()
    assert (code, found["signatures"]["checked"]) == (0, False)  # nobody asks for signatures
    rule("warn")
    code, found = asked()
    assert code == 1
    assert "older than 90 days" in found["signatures"]["problem"]
