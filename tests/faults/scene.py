"""What the fault scripts share: a Hub on this machine, processes that install from it, and an inventory afterwards.

Run as a program this file is a nursery: it imports everything once and then forks a process for each trial, so that
hundreds of trials take minutes. Torch is not imported.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if __name__ != "__main__":
    sys.path.append(str(Path(__file__).parents[1]))  # the helpers of the tests

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kernelhub.serve import LocalHub
    from kernelhub.store import Store

REPO = "acme/relu"
ENVIRONMENT = "torch=2.13,cpu=x86_64,os=linux,python=3.11"
FILES = {
    "__init__.py": "from .parts.table import TWO\nONE = 1\n",
    "parts/table.py": "TWO = 2\n" + "# filling\n" * 3000,
    "parts/_native.bin": bytes(range(256)) * 4000,
}


def quiet_environment() -> dict[str, str]:
    """The environment of a process that knows nothing of the user's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "KERNEL", "HUGGING"))}
    return {**kept, "HF_HOME": "/nonexistent", "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@contextlib.contextmanager
def scene() -> Iterator[tuple[Path, LocalHub]]:
    """A folder to work in, and a Hub with one kernel."""
    from kernel_repository import trust, write_build

    from kernelhub.serve import LocalHub

    with tempfile.TemporaryDirectory(prefix="kernelhub-faults-", ignore_cleanup_errors=True) as folder:
        root = Path(folder) / "repositories"
        trust(root, "acme")
        write_build(root, REPO, "v1", "torch-cpu", FILES)
        with LocalHub(root) as hub:
            yield Path(folder), hub


class Outcome(NamedTuple):
    """How a process ended (0: it obtained the build; 3: a KernelHubError; negative: a signal), and what it said."""

    status: int
    said: str


class Nursery:
    """Forks processes that install the kernel, with these environment variables; a context manager."""

    def __init__(self, **settings: str) -> None:
        self._settings = settings

    def __enter__(self) -> Nursery:
        environment = quiet_environment() | self._settings
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def start(self, store: Path, endpoint: str, *words: str, count: int = 1) -> list[int]:
        """Start ``count`` processes at once and return their ids; with the word ``stopped`` they wait for SIGCONT.

        Words with a slash are the kernels that they install, in turn; without any it is the one of the scene.
        """
        order = {"store": str(store), "endpoint": endpoint, "words": words, "count": count}
        self._tell(order)
        return list(self._answer())

    def outcomes(self) -> list[Outcome]:
        """Wait for the processes that were started."""
        self._tell({})
        return [Outcome(*outcome) for outcome in self._answer()]

    def run(self, store: Path, endpoint: str, *words: str) -> Outcome:
        self.start(store, endpoint, *words)
        return self.outcomes()[0]

    def _tell(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())


def problems(root: Path, endpoint: str, *, after_recovery: bool) -> list[str]:
    """What is wrong in a store: torn builds always; after a run that succeeded also missing ones and leftovers."""
    from kernelhub.store import Store

    store = Store(root, endpoint)
    found = [f"torn: {path}" for path in _torn(store)]
    if after_recovery:
        if len(list(store.builds())) != 1:
            found.append("lost: no build is stored")
        found += [f"leftover: {path}" for path in _leftovers(store)]
    return found


def _torn(store: Store) -> Iterator[str]:
    for folder in store.root.glob("hubs/*/builds/*/*/*"):
        bodies = {"metadata.json": None, **FILES}
        for name, body in bodies.items():
            path = folder / "files" / name
            if not path.is_file():
                yield f"{name} is missing"
            elif body is not None and path.read_bytes() != (body.encode() if isinstance(body, str) else body):
                yield f"{name} differs"
    for build in store.builds():
        for file in build.manifest.files:
            if hashlib.sha256((build.files_folder / file.path).read_bytes()).hexdigest() != file.sha256:
                yield f"{file.path} is not what the manifest says"


def _leftovers(store: Store) -> Iterator[str]:
    """Everything that is neither a build, a record, a lock nor the stamp."""
    known = ("hubs/*/builds/*/*/*/files/**/*", "hubs/*/builds/*/*/*/*.json", "hubs/*/records/*/*.json", "locks/*.lock")
    expected = {path for pattern in known for path in store.root.glob(pattern)} | {store.root / "store.json"}
    for path in store.root.rglob("*"):
        if path not in expected and (not path.is_dir() or path.parent.name == "tmp"):
            yield str(path.relative_to(store.root))


def report(title: str, facts: dict[str, object], failures: Sequence[str]) -> int:
    """Print the figures of a script, and what failed; the exit code."""
    print(f"{title}: {', '.join(f'{value} {name}' for name, value in facts.items())}")
    for failure in failures[:20]:
        print(f"FAILED {failure}")
    return 1 if failures else 0


def _serve_nursery() -> None:
    children: dict[int, int] = {}
    is_warm = False
    for line in sys.stdin:
        order = json.loads(line)
        if not order:
            print(json.dumps([_outcome(child, output) for child, output in children.items()]), flush=True)
            continue
        if not is_warm:
            _warm_up(order["endpoint"])
            is_warm = True
        names = [word for word in order["words"] if "/" in word] or [REPO]
        children = dict(_fork(order, names[number % len(names)]) for number in range(order["count"]))
        print(json.dumps(list(children)), flush=True)


def _warm_up(endpoint: str) -> None:
    """Import what an install needs, so that its own system calls are what is left to trace; no socket is kept."""
    from huggingface_hub import close_session, get_session

    from kernelhub import lease

    with tempfile.TemporaryDirectory() as folder:
        status = _install(folder + "/store", endpoint, [], REPO)
        assert status == 0, "the warm-up failed"
    lease.drop_all()
    close_session()
    get_session()


def _fork(order: dict[str, Any], repo_id: str) -> tuple[int, int]:
    """A new process, and the file that takes what it says."""
    output = os.memfd_create("output")
    child = os.fork()
    if child:
        return child, output
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        if "stopped" in order["words"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        status = _install(order["store"], order["endpoint"], order["words"], repo_id)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _outcome(child: int, output: int) -> Outcome:
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    said = os.pread(output, 100_000, 0).decode(errors="replace").strip()
    os.close(output)
    return Outcome(status, said)


def _install(store: str, endpoint: str, words: list[str], repo_id: str) -> int:
    from kernelhub.environment import Environment
    from kernelhub.errors import KernelHubError
    from kernelhub.loader import load
    from kernelhub.request import KernelRequest
    from kernelhub.session import Session

    session = Session(
        cache_dir=Path(store),
        endpoint=endpoint,
        token=False,
        lockfile=False,
        offline="offline" in words,
        environment=Environment.parse(ENVIRONMENT),
    )
    try:
        build = session.obtain(session.resolve(KernelRequest.parse(repo_id)))
        if "load" in words:
            kernel = load(build)
            assert (kernel.ONE, kernel.TWO) == (1, 2)
    except KernelHubError as error:
        with contextlib.suppress(OSError):  # what it says may be the call that fails
            print(f"{type(error).__name__}: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    _serve_nursery()
