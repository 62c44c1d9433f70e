"""Lightning's Trainer, where it is installed, with kernels for the time of a training."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

import pytest
import torch
from layers.tiny_model import IDS, anatomy, tiny

import kernelhub
from kernelhub.errors import UnknownLayer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("lightning") is None, reason="lightning is not installed"),
    pytest.mark.filterwarnings("ignore"),  # Lightning's own
]

BUILTIN = kernelhub.KernelConfig.from_liger(source="builtin")
STEPS = 5


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., Any]:
    """Trains a tiny model for some steps; gives it, with its losses in ``losses``."""
    from lightning.pytorch import LightningModule, Trainer

    class Causal(LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = tiny()
            self.losses: list[float] = []
            self.held_out: list[float] = []

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.model(input_ids=batch, labels=batch).loss
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.held_out.append(self.model(input_ids=batch, labels=batch).loss.item())

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def run(*callbacks: Any) -> Any:
        module = Causal()
        module.model.train()
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        trainer = Trainer(
            max_epochs=STEPS, accelerator="cpu", default_root_dir=tmp_path, callbacks=list(callbacks), **quiet
        )
        batches = torch.utils.data.DataLoader([IDS], batch_size=None)  # type: ignore[arg-type]  # a list will do
        trainer.fit(module, batches, batches)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module

    return run


def test_a_training_has_the_same_losses_and_the_model_none_of_it_afterwards(
    train: Callable[..., Any], tmp_path: Path
) -> None:
    from kernelhub.integrations.lightning import KernelCallback

    plain = train()
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]
    callback = KernelCallback(BUILTIN)
    assert callback.report is None
    trained = train(callback)
    assert len(trained.losses) == STEPS
    assert trained.losses == pytest.approx(plain.losses, rel=1e-3)
    assert trained.held_out == pytest.approx(plain.held_out, rel=1e-3)
    assert callback.report is not None
    layers = {row.layer for row in callback.report.bound}
    assert layers == {"RMSNorm", "rotary_pos_emb", "SwiGLUMLP", "FusedLinearCrossEntropy"}
    assert not kernelhub.report(trained)
    names = {path: [key for key, _ in entries] for path, entries in anatomy(trained).items()}
    assert names == {path: [key for key, _ in entries] for path, entries in anatomy(plain).items()}
    assert list(torch.load(tmp_path / "last.ckpt", weights_only=False)["state_dict"]) == list(saved)


def test_after_an_error_the_model_is_as_it_was(train: Callable[..., Any]) -> None:
    from lightning.pytorch import Callback

    from kernelhub.integrations.lightning import KernelCallback

    seen: list[Any] = []

    class Failing(Callback):  # type: ignore[misc, unused-ignore]
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *rest: Any) -> None:
            seen.append((pl_module, len(kernelhub.report(pl_module).bound)))
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        train(KernelCallback(BUILTIN), Failing())
    [(module, bound)] = seen
    assert bound == 14
    assert not kernelhub.report(module)


def test_a_config_that_means_nothing_in_the_model_ends_the_training(train: Callable[..., Any]) -> None:
    from kernelhub.integrations.lightning import KernelCallback

    with pytest.raises(UnknownLayer, match="RMSNrom"):
        train(KernelCallback({"RMSNrom": "builtin:RMSNorm"}))
