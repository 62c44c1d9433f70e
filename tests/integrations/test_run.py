"""``kernelhub run``: scripts as their authors wrote them, in processes of their own without `kernels` or Liger."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hub_liger import publish_liger
from layers.tiny_model import tiny
from typer.testing import CliRunner

import kernelhub
from kernelhub.cli import app
from kernelhub.errors import InvalidConfig
from kernelhub.integrations.transformers import is_enabled, startup
from kernelhub.serve import LocalHub

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Run = Callable[..., subprocess.CompletedProcess[str]]

TREE = Path(kernelhub.__file__).parents[1]
ABSENT = """
import importlib.machinery
for name in ("kernels", "liger_kernel"):
    assert importlib.machinery.PathFinder.find_spec(name) is None
"""
USE_KERNELS = """
from transformers import AutoModelForCausalLM, KernelConfig
kernel_config = KernelConfig(kernel_mapping={"RMSNorm": "kernels-community/liger-kernels:LigerRMSNorm"})
model = AutoModelForCausalLM.from_pretrained("MODEL", use_kernels=True, kernel_config=kernel_config)
"""
USE_LIGER = """
from transformers import TrainingArguments
arguments = TrainingArguments("OUT", max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True, use_cpu=True,
                  use_liger_kernel=True,
                  liger_kernel_config={"rope": True, "cross_entropy": True, "rms_norm": False, "swiglu": True})
"""
TRAIN = """
from transformers import AutoModelForCausalLM, Trainer
model = AutoModelForCausalLM.from_pretrained("MODEL")
Trainer(model, arguments, train_dataset=[{"input_ids": [3, 8, 13], "labels": [3, 8, 13]}]).train()
"""
REPORT = """
import sys, kernelhub
print("bound:", sorted({row.symbol for row in kernelhub.report(model).bound}), file=sys.stderr)
"""


def environment(home: Path, **more: str) -> dict[str, str]:
    """The variables of somebody who has set nothing, with an empty home folder."""
    home.mkdir(exist_ok=True)
    needed = {name: os.environ[name] for name in ("PATH", "SYSTEMROOT", "LD_LIBRARY_PATH") if name in os.environ}
    needed["OMP_NUM_THREADS"] = "1"
    return {**needed, "HOME": str(home), "KERNELHUB_BACKEND": "cpu", "PYTHONPATH": str(TREE), **more}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``python -m kernelhub run`` with these arguments."""

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "kernelhub", "run", *arguments]
        variables = environment(tmp_path / "home", **more)
        return subprocess.run(command, capture_output=True, text=True, timeout=120, env=variables, cwd=tmp_path)

    return run


# The two scripts of the documentation


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[int, str]]]:
    """How the two scripts ended, each run in a process of its own, at the same time."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "hub").mkdir()
    publish_liger(folder / "hub")
    tiny().save_pretrained(folder / "model")
    scripts = {"use_kernels": ABSENT + USE_KERNELS + REPORT, "use_liger": ABSENT + USE_LIGER + TRAIN + REPORT}
    with LocalHub(folder / "hub") as hub, ExitStack() as stack:
        running = {}
        for name, text in scripts.items():
            path = folder / f"{name}.py"
            body = text.replace("MODEL", str(folder / "model")).replace("OUT", str(folder / name))
            path.write_text(body, encoding="utf-8")
            variables = environment(folder / "home", HF_ENDPOINT=hub.url)
            command = [sys.executable, "-m", "kernelhub", "run", str(path)]
            process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=variables, cwd=folder)
            running[name] = stack.enter_context(process)
        yield {name: (process.wait(180), process.stderr.read()) for name, process in running.items() if process.stderr}


def test_use_kernels_with_a_config_runs_as_written(finished: dict[str, tuple[int, str]]) -> None:
    code, text = finished["use_kernels"]
    assert code == 0, text
    assert "bound: ['LigerRMSNorm']" in text


def test_use_liger_kernel_runs_as_written(finished: dict[str, tuple[int, str]]) -> None:
    code, text = finished["use_liger"]
    assert code == 0, text
    assert "bound: ['LigerForCausalLMLoss', 'LigerSwiGLUMLP', 'liger_rotary_pos_emb']" in text


# What a script sees

SHOW = """
import importlib.util, os, sys
found = importlib.util.find_spec("kernels") is not None
print(__name__, sys.argv[1:], sys.path[0] == os.getcwd(), found, sorted({"torch", "transformers"} & set(sys.modules)))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "show.py"
    path.write_text(SHOW, encoding="utf-8")
    return path


def test_a_script_gets_its_arguments_and_nothing_else(run: Run, script: Path) -> None:
    result = run(str(script), "--steps", "3", "-m", "--help", "-x")
    assert result.stdout == "__main__ ['--steps', '3', '-m', '--help', '-x'] True True []\n", result.stderr
    assert run("-m", "show", "--shadow").stdout == "__main__ ['--shadow'] True True []\n"


def test_the_exit_code_and_the_traceback_are_the_scripts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "ends.py").write_text("import sys; sys.exit(int(sys.argv[1]))\n", encoding="utf-8")
    (tmp_path / "fails.py").write_text("raise OSError('mine')\n", encoding="utf-8")
    assert run("ends.py", "7").returncode == 7
    failed = run("fails.py")
    assert failed.returncode == 1
    assert failed.stderr.endswith("fails.py\", line 1, in <module>\n    raise OSError('mine')\nOSError: mine\n")


def test_processes_that_a_script_starts_are_served_too(run: Run, script: Path, tmp_path: Path) -> None:
    launcher = (
        "import multiprocessing, os, subprocess, sys\n"
        "subprocess.run([sys.executable, 'show.py', 'child'], check=True)\n"
        "subprocess.run([sys.executable, 'show.py', 'off'], env={**os.environ, 'KERNELHUB_TRANSFORMERS': '0'})\n"
        "subprocess.run([sys.executable, '-S', 'show.py', 'bare'])\n"
    )
    (tmp_path / "launch.py").write_text(launcher, encoding="utf-8")
    lines = run("launch.py").stdout.splitlines()
    assert lines == [
        "__main__ ['child'] True True []",
        "__main__ ['off'] True False []",
        "__main__ ['bare'] True False []",
    ]


def test_the_sitecustomize_of_the_user_runs_too(run: Run, script: Path, tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("print('mine')\n", encoding="utf-8")
    assert run(str(script), PYTHONPATH=f"{TREE}{os.pathsep}{own}").stdout.splitlines()[-2:] == [
        "mine",
        "__main__ [] True True []",
    ]


def test_a_launcher_can_set_the_variables_itself(tmp_path: Path, script: Path) -> None:
    printed = CliRunner().invoke(app, ["run", "--print-env", "--shadow"])
    assert printed.exit_code == 0
    assert printed.stdout.startswith("export KERNELHUB_TRANSFORMERS=shadow\nexport PYTHONPATH=")
    variables = {**environment(tmp_path / "home"), **startup.variables()}
    variables["PYTHONPATH"] += os.pathsep + str(TREE)
    command = [sys.executable, "show.py"]
    shown = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=tmp_path, check=True)
    assert shown.stdout == "__main__ [] True True []\n"


def test_without_a_script_there_is_nothing_to_run() -> None:
    result = CliRunner().invoke(app, ["run"])
    assert result.exit_code == 2
    assert "no script to run" in result.output


@pytest.mark.parametrize(("value", "on"), [("0", False), ("", False), ("off", False), (None, False)])
def test_the_variable_says_whether(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KERNELHUB_TRANSFORMERS", raising=False)
    if value is not None:
        monkeypatch.setenv("KERNELHUB_TRANSFORMERS", value)
    startup.switch_on()
    assert is_enabled() is on


def test_a_variable_that_says_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERNELHUB_TRANSFORMERS", "perhaps")
    with pytest.raises(InvalidConfig, match="KERNELHUB_TRANSFORMERS"):
        startup.switch_on()
