"""Load a kernel without any network in each of the four ways that name it; run as a program.

    python tests/offline_process.py COMMIT LOCK [NAME STORE USER]...

Each store is used by a fork of this process, as that user (a number; 0 stays who it is), with HF_HUB_OFFLINE=1. Every
socket that Python opens ends the process, whatever the machine would allow. Prints one line a load.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kernelhub import KernelConfig, Session, kernelize, load_kernel, use_kernel
from kernelhub.package import PREFIX
from kernelhub.reporter import Reporter

REPO = "acme/norm"


@use_kernel("OfflineNorm")
class Norm(nn.Module):
    """The layer that the mapping is for."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Strict(Reporter):
    """A warning is a failure here."""

    def warn(self, message: str) -> None:
        raise AssertionError(message)


def no_sockets(event: str, _: tuple[Any, ...]) -> None:
    """An audit hook."""
    if event.startswith("socket.") and event != "socket.gethostname":
        raise AssertionError(f"{event} although offline")


def by_mapping(session: Session) -> float:
    model = nn.Sequential(Norm())
    kernelize(model, KernelConfig({"OfflineNorm": f"{REPO}@v1:Norm"}), session=session)
    return float(model(torch.ones(1)))


def load(request: str, session: Session) -> float:
    return float(load_kernel(request, session=session)().forward(torch.ones(1)))


def load_all(store: Path, commit: str, lock: Path) -> list[str]:
    """The four ways, each as a new process would go it."""
    results = []
    for way in ("version", "revision", "lock", "mapping"):
        for name in [name for name in sys.modules if name.startswith(PREFIX)]:
            del sys.modules[name]
        session = Session(cache_dir=store, lockfile=lock if way == "lock" else False, reporter=Strict())
        request = f"{REPO}@{commit}:Norm" if way == "revision" else f"{REPO}@v1:Norm"
        results.append(f"{way} {by_mapping(session) if way == 'mapping' else load(request, session)}")
    return results


def as_user(name: str, user: int, store: Path, commit: str, lock: Path) -> int:
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        if user:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
        for result in load_all(store, commit, lock):
            sys.stdout.write(f"{name}: {result}\n")
        sys.stdout.flush()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def main() -> int:
    commit, lock, *places = sys.argv[1:]
    sys.addaudithook(no_sockets)
    load_all(Path(places[1]), commit, Path(lock))  # everything is imported now, also what another user may not read
    rows = zip(places[::3], places[1::3], places[2::3], strict=True)
    return max(as_user(name, int(user), Path(store), commit, Path(lock)) for name, store, user in rows)


if __name__ == "__main__":
    sys.exit(main())
