"""One rank of a training run under DeepSpeed ZeRO-3: plain, and with kernels bound before and after it is wrapped.

Started by test_deepspeed.py through torch.distributed.run; rank 0 writes what it saw as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import deepspeed  # type: ignore[import-not-found, unused-ignore]  # installed by those who want this test
import rank_process
import torch
import torch.distributed as dist
from layers.tiny_model import tiny

import kernelhub
from kernelhub.config import KernelConfig

STEPS = 5
# Every weight is given back after the call of its module, however small it is.
SETTINGS = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "overlap_comm": False},
    "zero_allow_untested_optimizer": True,
}


def train(order: str) -> dict[str, Any]:
    """The losses of a few steps, and how many layers have kernels in which state."""
    model: Any = tiny().train()
    config = KernelConfig.from_liger(source="builtin")
    if order == "kernelize, then wrap":
        kernelhub.kernelize(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), optimizer=optimizer, config=SETTINGS
    )
    if order == "wrap, then kernelize":
        kernelhub.kernelize(model, config, strict=False)
    generator = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(model.config.vocab_size, (2, 16), generator=generator)
    losses = []
    for _ in range(STEPS):
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    rows = [] if order == "plain" else kernelhub.report(model)
    return {"losses": losses, "bound": sorted({row.layer for row in rows if row.state == "bound"})}


def main(folder: Path) -> None:
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    found = {order: train(order) for order in ("plain", "kernelize, then wrap", "wrap, then kernelize")}
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))
    rank_process.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
