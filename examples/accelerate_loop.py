"""A training loop of one's own with accelerate, and kernels for the time of it: ``python examples/accelerate_loop.py``.

Takes the folder or name of a causal language model, or makes a tiny one. Needs ``pip install kernelhub accelerate
transformers``. Kernels are bound before ``prepare``, which may wrap the model, and shipped with kernelhub; name others
in ``CONFIG``.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

import kernelhub

CONFIG = kernelhub.KernelConfig.from_liger(source="builtin")


def tiny() -> Any:
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=256, num_key_value_heads=2, head_dim=16, **sizes))


def batches(vocabulary: int, count: int) -> torch.utils.data.DataLoader[torch.Tensor]:
    rows = torch.arange(count * 4 * 32).reshape(count * 4, 32) * 7 % vocabulary
    return torch.utils.data.DataLoader(rows, batch_size=4)  # type: ignore[arg-type]  # a tensor is a dataset of rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="folder or name of a causal language model")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    accelerator = Accelerator()
    model = AutoModelForCausalLM.from_pretrained(options.model) if options.model else tiny()
    kernelhub.kernelize(model, CONFIG)
    accelerator.print(kernelhub.report(model))

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = batches(model.config.vocab_size, options.steps)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    model.train()
    for step, ids in enumerate(data):
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        accelerator.print(f"step {step}: loss {loss.item():.4f}")

    plain = kernelhub.unkernelize(accelerator.unwrap_model(model))  # as it was, to be saved or used elsewhere
    assert not kernelhub.report(plain).bound


if __name__ == "__main__":
    main()
