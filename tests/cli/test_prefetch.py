"""``kernelhub prefetch`` and scripts/prefetch_kernels.py: options, exit codes, output, and no need for Torch."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build
from rich.console import Console
from typer.testing import CliRunner, Result

from kernelhub.cli import app
from kernelhub.cli.prefetch import PrefetchReporter
from kernelhub.errors import PrefetchFailed
from kernelhub.prefetch import plan_prefetch
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

SCRIPT = Path(__file__).parents[2] / "scripts" / "prefetch_kernels.py"
CUDA = "torch213-cxx11-cu130-x86_64-linux"
WITHOUT_TORCH = "import sys; sys.modules['torch'] = sys.modules['transformers'] = None\n"


@pytest.fixture
def kernelhub(hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """The command line, asking a Hub with kernels for CPUs and GPUs."""
    trust(hub_root, "org")
    for name in ("norm", "mlp"):
        for variant in ("torch-cpu", CUDA):
            write_build(hub_root, f"org/{name}", "v1", variant, {"__init__.py": f"NAME = {name!r}\n"})
    write_build(hub_root, "stranger/kernel", "v1", "torch-cpu", {"__init__.py": ""})
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    monkeypatch.chdir(tmp_path)
    runner = CliRunner()
    return lambda *arguments: runner.invoke(app, list(arguments))


def states(result: Result) -> list[tuple[str, str, str]]:
    return [(row["request"], row["variant"], row["state"]) for row in json.loads(result.stdout)["rows"]]


def write_config(folder: Path, name: str = "kernels.toml") -> str:
    path = folder / name
    path.write_text('[kernel_mapping]\nRMSNorm = "org/norm:Norm"\nSwiGLUMLP = {cuda = "org/mlp:MLP"}\n')
    return str(path)


# What can be asked for


def test_a_config_file_is_fetched_for_each_target(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    path = write_config(tmp_path)
    result = kernelhub("prefetch", "--config", path, "--target", "linux-cpu", "--target", "h100,torch=2.13", "--json")
    assert result.exit_code == 0, result.output
    assert states(result) == [
        ("org/norm", "torch-cpu", "fetched"),
        ("org/norm", CUDA, "fetched"),
        ("org/mlp", CUDA, "fetched"),
    ]


def test_a_lock_is_fetched_as_a_whole(kernelhub: Callable[..., Result], hub_root: Path) -> None:
    kernelhub("lock", "org/norm@v1", "org/mlp@v1", "--lockfile", "my.lock")
    locked = Path("my.lock").read_text()
    write_build(hub_root, "org/norm", "v1", "torch-cpu", {"__init__.py": "NAME = 'moved'\n"})
    result = kernelhub("prefetch", "--lock", "my.lock", "--json")
    assert states(result) == [("org/mlp@v1", "torch-cpu", "fetched"), ("org/norm@v1", "torch-cpu", "fetched")]
    assert all(row["commit"] in locked for row in json.loads(result.stdout)["rows"])
    only = kernelhub("prefetch", "org/norm@v1", "--lock", "my.lock", "--json")
    assert states(only) == [("org/norm@v1", "torch-cpu", "stored")]


def test_all_variants_and_a_dry_run_tell_sizes(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    result = kernelhub("prefetch", "org/norm", "org/mlp", "--all-variants", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.count("would fetch, ") == 4
    assert "total: 4 would fetch (" in result.stdout
    assert list((tmp_path / "store").glob("hubs/*/builds/*")) == []


def test_a_model_is_fetched_what_its_layers_would_use(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    facts = {"model_type": "qwen3", "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    (tmp_path / "config.json").write_text(json.dumps(facts))
    path = tmp_path / "mapping.toml"
    path.write_text('[kernel_mapping]\nRMSNorm = "org/norm:Norm"\nGatedDeltaNet = "org/mlp:Net"\n')
    result = kernelhub("prefetch", "--model", str(tmp_path), "--config", str(path), "--json")
    assert states(result) == [("org/norm", "torch-cpu", "fetched")]
    assert "uses RMSNorm of the config" in result.stderr
    assert "no layer answers to GatedDeltaNet" in result.stderr
    shipped = kernelhub("prefetch", "--model", str(tmp_path), "--json")
    assert {state for _, _, state in states(shipped)} == {"local"}


# How it ends


def test_what_fails_is_told_at_the_end_and_the_rest_is_stored(kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("prefetch", "org/nothing", "stranger/kernel", "org/norm")
    assert isinstance(result.exception, PrefetchFailed)
    assert str(result.exception).startswith("2 of 3 could not be brought into the store\n  org/nothing: ")
    assert "org/norm: org/norm@" in result.stdout
    assert "1 fetched" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "nothing to prefetch"),
        (["org"], "no organization"),
        (["builtin:RMSNorm"], "is on this machine already"),
        (["org/norm", "--target", "h1000"], "no preset 'h1000', did you mean"),
        (["org/norm", "--target", "h100", "--all-variants"], "given together with --target"),
        (["--config", "absent.toml"], "cannot be read"),
        (["--lock", "absent.lock"], "cannot be read"),
        (["--model", "absent"], "file name ends in"),
        (["--no-such-option"], "No such option"),
    ],
)
def test_bad_usage_ends_with_2(arguments: list[str], words: str, kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("prefetch", *arguments)
    assert result.exit_code == 2
    assert words in " ".join(result.output.replace("│", " ").split())


def test_offline_nothing_is_asked_and_what_is_missing_is_told(
    kernelhub: Callable[..., Result], hub: LocalHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernelhub("prefetch", "org/norm")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.clear()
    result = kernelhub("prefetch", "org/norm", "org/mlp")
    assert "org/norm: org/norm@" in result.stdout
    assert "run: kernelhub prefetch 'org/mlp'" in str(result.exception)
    assert hub.requests == []


# What it prints


def test_without_a_terminal_progress_is_plain_lines(kernelhub: Callable[..., Result]) -> None:
    result = kernelhub("prefetch", "org/norm", "org/mlp")
    lines = result.stderr.splitlines()
    assert lines[0].startswith("2 builds to fetch, ")
    assert [line.split()[0] for line in lines[1:]] == ["downloading", "stored", "downloading", "stored"]
    assert "\x1b" not in result.stderr


def test_on_a_terminal_there_is_a_bar_for_the_whole_and_one_a_build(
    kernelhub: Callable[..., Result], session: Session
) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    with PrefetchReporter(console) as reporter:
        session.reporter = reporter
        reporter.run(plan_prefetch([KernelRequest("org/norm"), KernelRequest("org/mlp")], session))
    drawn = console.file.getvalue()  # type: ignore[attr-defined]
    for title in ("total: 2 builds", "org/norm@", "org/mlp@"):
        assert title in drawn


def test_a_file_has_a_bar_while_it_is_under_way() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    with PrefetchReporter(console) as reporter:
        reporter.file_advanced("org/norm torch-cpu", "big.so", 10, 30)
        reporter.file_advanced("org/norm torch-cpu", "big.so", -10, 30)
        assert [task.description for task in reporter.tasks] == ["  big.so"]
        reporter.file_advanced("org/norm torch-cpu", "big.so", 30, 30)
        assert list(reporter.tasks) == []


# Without Torch, as on a login node


def python(code: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", code, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **variables}
    )


def test_without_torch_the_target_has_to_be_given(kernelhub: Callable[..., Result], tmp_path: Path) -> None:
    code = f"{WITHOUT_TORCH}from kernelhub.cli import main\nmain()"
    refused = python(code, "prefetch", "org/norm", KERNELHUB_CACHE=str(tmp_path / "login"))
    assert refused.returncode == 2
    assert "Torch is not installed here" in " ".join(refused.stderr.replace("│", " ").split())
    done = python(
        code, "prefetch", "org/norm", "--target", "h100,torch=2.13", "--json", KERNELHUB_CACHE=str(tmp_path / "login")
    )
    assert done.returncode == 0, done.stderr
    assert [row["variant"] for row in json.loads(done.stdout)["rows"]] == [CUDA]
    planned = python(code, "prefetch", "--model", str(tmp_path / "config.json"), "--target", "h100")
    assert planned.returncode == 2


@pytest.mark.parametrize(
    ("arguments", "code"), [(["org/norm", "--json"], 0), (["org/nothing"], 1), (["--nonsense"], 2), (["--help"], 0)]
)
def test_the_script_for_job_scripts_takes_the_same_options(
    arguments: list[str], code: int, kernelhub: Callable[..., Result]
) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(SCRIPT), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == code, done.stderr
    if arguments[-1] == "--json":
        facts: Any = json.loads(done.stdout)
        assert facts["ok"]
    assert ("Traceback" in done.stderr) is False
