"""A Hub on this machine, a session that uses it, and an environment without anything of the user's."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from company import table
from hypothesis import settings
from starlette.responses import JSONResponse

from kernelhub.package import PREFIX
from kernelhub.parallel import WORKING
from kernelhub.reporter import Reporter
from kernelhub.serve import LocalHub
from kernelhub.session import Session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from compiled_kernel import CompiledKernel
    from starlette.requests import Request
    from starlette.responses import Response

# A busy machine is slow, not wrong: property tests have no deadline, and the same examples every time.
settings.register_profile("kernelhub", deadline=None, derandomize=True)
settings.load_profile("kernelhub")

_STARTS = ("HF_", "HUGGING", "KERNELHUB_", "KERNELS_", "LOCAL_KERNELS", "TRANSFORMERS_OFFLINE", "DISABLE_KERNEL")
_PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def pytest_configure(config: pytest.Config) -> None:
    """Take the user's settings away before huggingface_hub is imported, which reads most of them only then."""
    for name in list(os.environ):
        if name.upper().startswith((*_STARTS, *_PROXIES)):
            del os.environ[name]
    # A job in the background starts with Ctrl-C ignored, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    home = tempfile.TemporaryDirectory(prefix="kernelhub-tests-")
    config.add_cleanup(home.cleanup)
    os.environ["HF_HOME"] = os.environ["XDG_CONFIG_HOME"] = home.name
    # Whatever Torch is installed, the kernels of these tests run on the CPU.
    os.environ["KERNELHUB_BACKEND"] = "cpu"


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A process that runs a part of the tests hands over its lines of the table."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["company"] = [tuple(line) for line in table.LINES]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """And here they are taken over."""
    table.LINES.extend(table.Line(*line) for line in getattr(node, "workeroutput", {}).get("company", ()))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if table.LINES:
        table.show(terminalreporter)


class Recorder(Reporter):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.warnings: list[str] = []

    def note(self, message: str) -> None:
        self.notes.append(message)

    def warn(self, message: str) -> None:
        self.warnings.append(message)


@pytest.fixture(autouse=True)
def no_long_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failed requests are tried again as often as for users, but sooner."""
    monkeypatch.setattr("kernelhub.retry.FIRST_PAUSE", 0.002)


@pytest.fixture
def hub_root(tmp_path: Path) -> Path:
    root = tmp_path / "repositories"
    root.mkdir()
    return root


@pytest.fixture(scope="session")
def background() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def settle(seconds: float = 2.0) -> None:
    """Let requests end that a load began and then had no use for: their session must not be closed under them."""
    end = time.monotonic() + seconds
    while any(thread.name == WORKING for thread in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.002)


@pytest.fixture
def hub(hub_root: Path, background: ThreadPoolExecutor) -> Iterator[LocalHub]:
    from huggingface_hub import close_session

    hub = LocalHub(hub_root)
    hub.start()
    yield hub
    settle()
    close_session()
    background.submit(hub.stop)  # takes a moment, which the next test need not wait for


@pytest.fixture
def reporter() -> Recorder:
    return Recorder()


def let_others_in(folder: Path) -> None:
    """Let other users get to a temporary folder; those above it stay open, as other tests may be using them now."""
    top = Path(tempfile.gettempdir()).resolve()
    for path in (folder.resolve(), *folder.resolve().parents):
        if path == top or not path.is_relative_to(top):
            return
        path.chmod(path.stat().st_mode | 0o755)


@pytest.fixture
def forget_kernels() -> Iterator[Callable[[], None]]:
    """Forgets loaded kernels when it is called, and after the test, so that the next load imports anew."""

    def forget() -> None:
        for name in [name for name in sys.modules if name.startswith(PREFIX)]:
            del sys.modules[name]

    yield forget
    forget()


@pytest.fixture
def imported() -> Callable[[], list[str]]:
    """The modules of kernels that were imported since the test began."""
    before = set(sys.modules)
    return lambda: [name for name in set(sys.modules) - before if name.startswith(PREFIX)]


@pytest.fixture
def session(tmp_path: Path, hub: LocalHub, reporter: Recorder, forget_kernels: object) -> Session:
    """A session with an empty store."""
    return Session(cache_dir=tmp_path / "store", endpoint=hub.url, token=False, reporter=reporter)


@pytest.fixture
def hubless(tmp_path: Path, reporter: Recorder, forget_kernels: object) -> Session:
    """A session for builds that are read in place."""
    return Session(cache_dir=tmp_path / "store", endpoint="http://127.0.0.1:9", token=False, reporter=reporter)


@pytest.fixture
def asked(hub: LocalHub) -> Callable[[], list[str]]:
    """The requests since the last call, as ``GET /path``.

    huggingface_hub 2 asks ``/api/agent-harnesses`` on its own account, once a day and home folder: not counted.
    """

    def take() -> list[str]:
        requests = [f"{record.method} {record.path}" for record in hub.requests]
        hub.clear()
        return [request for request in requests if "/api/agent-harnesses" not in request]

    return take


@pytest.fixture
def change_tree(hub: LocalHub) -> Callable[[str, Callable[[list[dict[str, Any]]], object]], None]:
    """Serve another file listing: ``change_tree(repo_id, change)`` applies ``change`` to the rows of branch v1."""

    def install(repo_id: str, change: Callable[[list[dict[str, Any]]], object]) -> None:
        with urllib.request.urlopen(f"{hub.url}/api/kernels/{repo_id}/tree/v1/build?recursive=true") as answer:
            rows = json.load(answer)
        change(rows)
        hub.clear()

        def hook(request: Request) -> Response | None:
            return JSONResponse(rows) if f"/{repo_id}/tree/" in request.url.path else None

        hub.hook = hook

    return install


@pytest.fixture(scope="session")
def compiled(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> CompiledKernel:
    """A kernel with one C++ operator; compiled once, and kept by pytest's cache for later runs."""
    from compiled_kernel import compile_kernel  # and with it torch

    if shutil.which("g++") is None:
        pytest.skip("needs g++")  # kernelhub itself compiles nothing
    cache = getattr(pytestconfig, "cache", None)
    return compile_kernel(cache.mkdir("compiled-kernel") if cache else tmp_path_factory.mktemp("compiled-kernel"))
