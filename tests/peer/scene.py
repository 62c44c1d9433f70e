"""The Hub, folders and locks that the calls in ``calls.py`` are about, and how to make these calls."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_repository import trust, write_build

from kernelhub.hub import HubIndex

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernelhub.serve import LocalHub

SCRIPTS = Path(__file__).parent
RECORDED = SCRIPTS.parent / "data" / "peer"

LAYERS = """
import torch
from torch import nn

class Relu(nn.Module):
    can_torch_compile = True
    def forward(self, x):
        return x * 0 + 1

class Silu(nn.Module):
    can_torch_compile = True
    def forward(self, x):
        return x * 0 + 2

class Eager(nn.Module):
    def forward(self, x):
        return x * 0 + 3

class NoBackward(nn.Module):
    can_torch_compile = True
    has_backward = False
    def forward(self, x):
        return x * 0 + 4

class WithInit(nn.Module):
    def __init__(self):
        super().__init__()
    def forward(self, x):
        return x * 0 + 5

class WithMember(nn.Module):
    scale = 6
    def forward(self, x):
        return x * self.scale

class TwoArguments(nn.Module):
    def forward(self, x, y):
        return x

class KeywordOnly(nn.Module):
    def forward(self, *, x):
        return x

class NotALayer:
    def forward(self, x):
        return x

class turn(nn.Module):
    can_torch_compile = True
    def forward(self, x, angle):
        return x * 0 + 7

class OtherName(nn.Module):
    def forward(self, x, degrees=0.0):
        return x * 0 + 8

class Scaled(nn.Module):
    def forward(self, x):
        return x * self.scale
"""
RELU: dict[str, str | bytes] = {
    "__init__.py": "from . import layers\nVALUE = 1\ndef relu(x):\n    return x.clamp(min=0)\n",
    "layers.py": LAYERS,
}
COMPILED = "torch213-cxx11-cu130-x86_64-linux"


def write_scene(root: Path) -> None:
    """Write the repositories."""
    trust(root, "acme")
    trust(root, "evil", trusted=False)
    _write(root, "acme/relu", RELU)
    _write(root, "acme/relu", {**RELU, "__init__.py": "from . import layers\nVALUE = 2\n"}, branch="v2", version=2)
    _write(root, "acme/relu", {**RELU, "__init__.py": "VALUE = 'main'\n"}, branch="main")
    _write(root, "evil/relu", RELU)
    _write(root, "acme/needs-evil", {"__init__.py": "VALUE = 1\n"}, depends=["evil/relu"])
    _write(root, "acme/flat", {"__init__.py": LAYERS, "layers.py": ""})
    _write(root, "acme/gpu-only", RELU, variant="torch-cuda")
    _write(root, "acme/newer", RELU, variant="torch-cuda")
    _write(root, "acme/newer", RELU, branch="v2", version=2)
    for variant in ("torch-cpu", "torch-cuda", "torch-universal", COMPILED, "torch212-cxx11-cpu-x86_64-linux", "odd"):
        _write(root, "acme/many", {"__init__.py": "VALUE = 1\n"}, variant=variant)
    _write(root, "acme/needs-gpu", {"__init__.py": ""}, depends=["acme/gpu-only"])
    _write_historic(root)
    _write_faulty(root)


def _write_historic(root: Path) -> None:
    """Repositories as they were made before."""
    _write(root, "acme/nested", {"nested/__init__.py": "VALUE = 'nested'\n"})
    _write(root, "acme/bare", {"__init__.py": "VALUE = 'bare'\n"})
    (root / "acme/bare/v1/build/torch-cpu/metadata.json").unlink()
    _write(root, "acme/model", {"__init__.py": "VALUE = 'model'\n"})
    (root / "acme/model/repository.json").write_text('{"type": "model"}')


def _write_faulty(root: Path) -> None:
    """Repositories with something wrong, and those that use `kernels` themselves."""
    sources = {
        "raises": "raise RuntimeError('boom')\n",
        "misspelt": "def f(:\n",
        "imports": "import no_such_package\n",
        "base": "VALUE = 'base'\n",
        "user": "from kernels import get_kernel_dep\nVALUE = get_kernel_dep('acme/base').VALUE\n",
        "sly": "from kernels import get_kernel_dep\nVALUE = get_kernel_dep('acme/relu').VALUE\n",
        "without-layers": "VALUE = 1\n",
        "round-a": "",
        "round-b": "",
    }
    needs = {"user": ["acme/base"], "sly": ["acme/base"], "round-a": ["acme/round-b"], "round-b": ["acme/round-a"]}
    for name, source in sources.items():
        _write(root, f"acme/{name}", {"__init__.py": source}, depends=needs.get(name, []))
    odd: dict[str, dict[str, Any]] = {
        "wants-einops": {"python-depends": ["einops"]},
        "wants-unknown": {"python-depends": ["evil-pkg"]},
        "wants-newer": {"kernels-minver": "99.0.0"},
    }
    for name, facts in odd.items():
        _write(root, f"acme/{name}", {"__init__.py": "VALUE = 1\n"}, **facts)
    _write(root, "acme/changed", {"__init__.py": "VALUE = 1\n"})
    (root / "acme/changed/v1/build/torch-cpu/__init__.py").write_text("VALUE = 2\n")


def _write(
    root: Path,
    repo_id: str,
    files: Mapping[str, str | bytes],
    *,
    branch: str = "v1",
    variant: str = "torch-cpu",
    version: int = 1,
    depends: list[str] | None = None,
    **facts: Any,
) -> None:
    facts["kernel-depends"] = [{"repo-id": need, "version": 1} for need in depends or []]
    write_build(
        root, repo_id, branch, variant, files, version=version, backend=_kind(variant), metadata_overrides=facts
    )


def _kind(variant: str) -> str:
    return "cuda" if "cu" in variant else "cpu"


def scene_facts(root: Path, folder: Path, hub: LocalHub) -> dict[str, Any]:
    """What a call cannot know by itself: folders, commits, and locks, which are written here."""
    index = HubIndex(hub.url, False)
    names = ("acme/relu", "acme/user", "acme/base", "acme/many", "evil/relu")
    commits = {name: index.refs(name).branches["v1"] for name in names}
    entries = [_entry(name, commit) for name, commit in commits.items() if name != "acme/base"]
    locks = {
        "lock": json.dumps(entries),
        "whole_lock": json.dumps([*entries, _entry("acme/base", commits["acme/base"])]),
        "legacy_lock": json.dumps([_legacy_entry("acme/relu", commits["acme/relu"])]),
        "bad_lock": "[",
    }
    for name, text in locks.items():
        (folder / name).write_text(text)
    (folder / "empty").mkdir()
    return {"commits": commits, "root": str(root), **{name: str(folder / name) for name in (*locks, "empty")}}


def _entry(repo_id: str, commit: str) -> dict[str, Any]:
    return {"dependency": {"repo-id": repo_id, "version": 1}, "lock": {"commit": commit}}


def _legacy_entry(repo_id: str, commit: str) -> dict[str, Any]:
    variants = {"torch-cpu": {"hash": "sha256-none", "hash_type": "git_lfs_concat"}}
    return {"repo_id": repo_id, "sha": commit, "variants": variants}


def make_calls(python: Path | str, package: str, facts: Mapping[str, Any], home: Path, url: str) -> dict[str, Any]:
    """The outcome of every call in ``calls.py``, made by an interpreter with a package; offline ones last."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "LANG", "TMPDIR")}
    environment = {**kept, "HOME": str(home), "HF_HOME": str(home), "HF_ENDPOINT": url, "KERNELHUB_BACKEND": "cpu"}
    environment |= {
        "PYTHONPATH": str(SCRIPTS.parent),
        "PYTHONDONTWRITEBYTECODE": "1",
    }  # no caches beside what is served
    outcomes: dict[str, Any] = {}
    for part, extra in (("online", {}), ("offline", {"HF_HUB_OFFLINE": "1"})):
        command = [str(python), "-m", "peer.calls", package, part, json.dumps(facts)]
        done = subprocess.run(command, env={**environment, **extra}, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(done.stderr)
        outcomes |= json.loads(done.stdout)
    return outcomes
