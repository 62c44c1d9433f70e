"""What each of two processes does in ``test_fusions.py``: the steps of ``distributed_worker``, with a fusion bound."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import rank_process

import kernelhub
from company import distributed_worker
from company.distributed_worker import CASES, WORLD, attempt

if TYPE_CHECKING:
    from pathlib import Path

KEY = (("RMSNorm", "**.post_attention_layernorm"), ("MLP", "**.mlp"))


def fuse(model: Any, build: str) -> Any:
    return kernelhub.kernelize(model, {KEY: f"{build}:NormMLP"}, strict=False)


def work(rank: int, folder: Path, build: str) -> None:
    """Run every case and write what came of it to ``<rank>.json``."""
    rank_process.join(rank, folder, WORLD)
    warnings.simplefilter("ignore")  # torch's own about FSDP on CPU
    calls = kernelhub.load_kernel(build).layers.CALLS
    reasons: list[str] = []

    def bind(model: Any) -> Any:
        bound = fuse(model, build)
        reasons.extend(row.reason for row in kernelhub.report(model) if row.reason)
        return bound

    vars(distributed_worker)["kernelized"] = bind
    found = {}
    for name, case in CASES.items():
        calls.clear()
        reasons.clear()
        found[name] = {**attempt(case), "calls": calls["NormMLP"], "reasons": sorted(set(reasons))}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    rank_process.leave()
