"""TRL's trainers, where TRL is installed: they put a fused head of their own into the model, beside our kernels."""

from __future__ import annotations

import importlib.util
import random
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
import torch
from layers.tiny_model import IDS, tiny

import kernelhub
from kernelhub.integrations.transformers import KernelTrainerCallback, disable, enable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed"),
    pytest.mark.filterwarnings("ignore"),  # TRL's and its dependencies' own
]

BUILTIN = kernelhub.KernelConfig.from_liger(source="builtin")
LAYERS = {"RMSNorm", "SwiGLUMLP", "rotary_pos_emb"}
STEPS = 6

Train: TypeAlias = "Callable[..., tuple[list[float], Any]]"
Tell: TypeAlias = "Callable[[str, str, str], None]"


@pytest.fixture
def switched_on(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("KERNELHUB_LIGER_SOURCE", "builtin")
    enable()
    yield
    disable()


@pytest.fixture
def train(tmp_path: Path) -> Train:
    """The losses of a few steps of supervised fine-tuning, and the trainer."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    def run(model: Any = None, callbacks: Any = (), **options: Any) -> tuple[list[float], Any]:
        torch.manual_seed(0)
        model = tiny() if model is None else model
        chance = random.Random(0)
        rows = [{"input_ids": [chance.randrange(3, 64) for _ in range(12)]} for _ in range(16)]
        arguments = SFTConfig(
            output_dir=str(tmp_path / "out"),
            max_steps=STEPS,
            per_device_train_batch_size=2,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            dataset_kwargs={"skip_prepare_dataset": True},
            **options,
        )
        trainer = SFTTrainer(
            model,
            arguments,
            train_dataset=Dataset.from_list(rows),
            processing_class=tokenizer(),
            callbacks=list(callbacks),
        )
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry], trainer

    return run


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"[PAD]": 0, "[UNK]": 1, "[EOS]": 2, **{str(number): number for number in range(3, 64)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", pad_token="[PAD]", eos_token="[EOS]")


def loss(trainer: Any) -> float:
    """By the model's own head, after the training."""
    with torch.no_grad():
        return float(trainer.model(input_ids=IDS, labels=IDS).loss)


def test_a_callback_binds_all_but_the_head_that_trl_replaces(train: Train, tell: Tell) -> None:
    plain, unbound = train()
    callback = KernelTrainerCallback(BUILTIN)
    losses, trainer = train(callbacks=[callback])
    assert len(losses) == STEPS
    assert losses == pytest.approx(plain, rel=1e-4)
    assert callback.report is not None
    assert {row.layer for row in callback.report.bound} == LAYERS
    [head] = [row for row in callback.report.skipped if row.layer == "FusedLinearCrossEntropy"]
    assert head.reason == "its forward was replaced after the kernel was bound (by trl.trainer.utils._fused_forward)"
    assert loss(trainer) == pytest.approx(loss(unbound), rel=1e-4)
    assert not any(row.state == "bound" for row in kernelhub.report(trainer.model))
    tell("TRL, KernelTrainerCallback", ", ".join(sorted(LAYERS)), "works")
    tell("TRL, KernelTrainerCallback", "FusedLinearCrossEntropy", "TRL's own head runs, and the report says so")


def test_ligers_switches_bind_all_but_the_head(train: Train, tell: Tell, switched_on: None) -> None:
    plain, unbound = train()
    losses, trainer = train(use_liger_kernel=True)
    assert losses == pytest.approx(plain, rel=1e-4)
    assert {row.layer for row in kernelhub.report(trainer.model) if row.state == "bound"} == LAYERS
    assert loss(trainer) == pytest.approx(loss(unbound), rel=1e-4)
    tell("TRL, use_liger_kernel", ", ".join(sorted(LAYERS)), "works")
