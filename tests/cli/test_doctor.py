"""kernelhub doctor: what explains a failure, without secrets."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from compiled_kernel import marking_library
from kernel_repository import trust, write_build
from starlette.responses import JSONResponse, RedirectResponse
from typer.testing import CliRunner, Result

from kernelhub.cli import app

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kernelhub.serve import LocalHub

TOKEN = "hf_" + "SecretSecretSecret"


@pytest.fixture
def doctor(hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    home = tmp_path / "home"
    home.mkdir()
    trust(hub_root, "org")
    write_build(hub_root, "org/kernel", "v1", "torch-cpu", {"__init__.py": "raise RuntimeError\n"})
    write_build(hub_root, "org/cuda", "v1", "torch29-cxx11-cu90-aarch64-linux", {"__init__.py": ""})
    write_build(hub_root, "stranger/kernel", "v1", "torch-cpu", {"__init__.py": ""})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("KERNELHUB_CACHE", str(home / "store"))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, ["doctor", "--no-check", *arguments])


def facts(result: Result) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_a_healthy_machine_is_described(doctor: Callable[..., Result], hub: LocalHub) -> None:
    before = set(sys.modules)
    result = doctor("org/kernel@v1", "--json")
    assert result.exit_code == 0, result.output
    found = facts(result)
    assert found["kernelhub"]["torch"]
    assert found["environment"]["environment"].startswith("torch=")
    assert found["store"] == found["store"] | {"folder": "~/store", "exists": False, "writable": True, "builds": 0}
    assert found["endpoint"]["address"] == hub.url
    assert found["endpoint"]["reachable"].startswith("answered ")
    assert found["endpoint"]["token"] == "none"
    assert found["requests"]["org/kernel@v1"]["verdict"] == "torch-cpu, the best of 1 that fit"
    if sys.platform == "linux":
        assert found["environment"]["newest GLIBCXX"].startswith("3.4.")
    text = doctor("org/kernel@v1").stdout
    assert "verdict: torch-cpu, the best of 1 that fit" in text
    assert not [name for name in set(sys.modules) - before if name.startswith("kernelhub_k_")]


def test_what_is_broken_is_a_problem_and_the_rest_is_told_all_the_same(
    doctor: Callable[..., Result], hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "home/store").write_text("")
    (tmp_path / "policy.toml").write_text("[trust]\nonly = 3\n")
    monkeypatch.setenv("KERNELHUB_POLICY", str(tmp_path / "policy.toml"))
    result = doctor("org/cuda", "stranger/kernel", "org//", "--json")
    assert result.exit_code == 1
    found = facts(result)
    assert "problem" in found["policy"]
    assert "problem" in found["requests"]["org//"]
    assert found["environment"]["environment"]


def test_a_verdict_for_each_request(doctor: Callable[..., Result]) -> None:
    result = doctor("org/cuda", "stranger/kernel", "org/kernel", "--json")
    assert result.exit_code == 1
    requests = facts(result)["requests"]
    assert "no build of kernel org/cuda@v1 fits" in requests["org/cuda"]["problem"]
    assert "trust_remote_code=['stranger/kernel']" in requests["stranger/kernel"]["problem"]
    assert "problem" not in requests["org/kernel"]


def test_a_hub_that_does_not_answer_is_a_problem(doctor: Callable[..., Result], hub: LocalHub) -> None:
    hub.stop()
    result = doctor("--json")
    assert result.exit_code == 1
    assert "cannot be reached" in facts(result)["endpoint"]["problem"]
    assert facts(doctor("--json", "--offline"))["endpoint"]["reachable"] == "not asked, as kernelhub is offline"


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_token_is_tried_and_never_shown(
    status: int, doctor: Callable[..., Result], hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[str] = []

    def hook(request: Any) -> Any:
        if request.url.path != "/api/whoami-v2":
            return None
        sent.append(request.headers["authorization"])
        return JSONResponse({}, status_code=status)

    hub.hook = hook
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("KERNELHUB_NOTE", f"https://me:password@host/ {TOKEN} {tmp_path}/home/x")
    result = doctor("--json")
    assert sent == [f"Bearer {TOKEN}"]
    told = facts(result)["endpoint"]["token"]
    assert told.startswith({200: "accepted", 401: "refused (401)", 500: "answered 500"}[status])
    for text in (result.stdout, doctor().stdout):
        assert TOKEN not in text
        assert "password" not in text
        assert f"{tmp_path}/home" not in text
    assert facts(result)["settings"]["KERNELHUB_NOTE"] == "https://***@host/ hf_*** ~/x"
    assert facts(result)["settings"]["HF_TOKEN"] == "***"


def test_a_token_is_not_sent_in_clear_text(
    doctor: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str | None]] = []

    def ask(address: str, token: str | None) -> tuple[int, str]:
        asked.append((address, token))
        return 200, "answered 200 in 1 ms"

    monkeypatch.setattr("kernelhub.cli.doctor._ask", ask)
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "token"))
    for address, told in (("http://hub.example", "not sent"), ("https://hub.example", "accepted")):
        monkeypatch.setenv("HF_ENDPOINT", address)
        assert told in facts(doctor("--json"))["endpoint"]["token"]
    assert [token for _, token in asked] == [None, None, TOKEN]


def test_only_http_is_asked(doctor: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    assert "not an http address" in facts(doctor("--json"))["endpoint"]["problem"]


def test_the_shipped_kernels_are_checked_on_this_machine(doctor: Callable[..., Result]) -> None:
    before = set(sys.modules)
    result = doctor("--json", "--check")
    assert result.exit_code == 0, result.output
    assert facts(result)["numerics"]["checked"].startswith("6 of 6 right, in ")
    assert not [name for name in set(sys.modules) - before if name.startswith("kernelhub_k_")]


def test_a_token_does_not_follow_a_redirect(
    doctor: Callable[..., Result], hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths: list[str] = []

    def hook(request: Any) -> Any:
        paths.append(request.url.path)
        return RedirectResponse("/elsewhere") if request.url.path == "/api/whoami-v2" else None

    hub.hook = hook
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert facts(doctor("--json"))["endpoint"]["token"].startswith("answered 307")
    assert "/elsewhere" not in paths


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is looked at")
def test_a_library_that_cannot_be_loaded_is_the_verdict(doctor: Callable[..., Result], tmp_path: Path) -> None:
    body = marking_library(tmp_path, "_probe", "-Wl,-rpath,/tmp/lib")
    files: dict[str, str | bytes] = {"__init__.py": "from . import _probe\n", "_probe.abi3.so": body}
    folder = write_build(tmp_path / "local", "me/probe", "v1", "torch-cpu", files)
    result = doctor(str(folder), "--json")
    assert result.exit_code == 1
    [verdict] = facts(result)["requests"].values()
    assert verdict["problem"].startswith("_probe.abi3.so: its RPATH searches an absolute folder")
    explained = CliRunner().invoke(app, ["explain", str(folder)]).stdout
    assert "library      '_probe.abi3.so': its RPATH searches an absolute folder" in explained
