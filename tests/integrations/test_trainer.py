"""Trainer with kernels: Liger's switches, our callback, PEFT, and the same losses as without."""

from __future__ import annotations

import logging
import runpy
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers
from hub_liger import REPOSITORY, publish_liger
from layers.tiny_model import IDS, anatomy, tiny
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations import liger

import kernelhub
from kernelhub.errors import FetchError, InvalidConfig, ResolutionError
from kernelhub.integrations.transformers import KernelTrainerCallback, disable, enable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.serve import LocalHub

STEPS = 20
apply_liger: Any = liger.apply_liger_kernel
SWITCHES = {"rope": True, "cross_entropy": True, "rms_norm": False, "swiglu": True}
BUILTIN = kernelhub.KernelConfig.from_liger(source="builtin")


@pytest.fixture
def switched_on(
    hub: LocalHub, hub_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_kernels: object
) -> Iterator[None]:
    publish_liger(hub_root)
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "store"))
    enable()
    yield
    disable()


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tiny models only wait for more than one thread, the longer the busier the machine is."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders as ``save_pretrained`` writes them, with safetensors."""
    folders = {family: tmp_path_factory.mktemp(family) for family in ("Qwen3", "Llama")}
    for family, folder in folders.items():
        tiny(family).save_pretrained(folder)
        assert (folder / "model.safetensors").is_file()
    return folders


def trainer(
    model: Any, folder: Path, steps: int = STEPS, callbacks: Any = None, model_init: Any = None, **options: Any
) -> Any:
    quiet: dict[str, Any] = {"report_to": [], "save_strategy": "no", "disable_tqdm": True, "use_cpu": True}
    args = TrainingArguments(str(folder), max_steps=steps, logging_steps=1, learning_rate=1e-2, **quiet, **options)
    data: Any = [{"input_ids": ids, "labels": ids} for ids in IDS]
    return Trainer(model, args, train_dataset=data, eval_dataset=data, model_init=model_init, callbacks=callbacks)


def losses(trained: Any) -> list[float]:
    trained.train()
    return [entry["loss"] for entry in trained.state.log_history if "loss" in entry]


def bound(model: Any) -> set[str]:
    return {row.layer for row in kernelhub.report(model).bound}


def names_of(found: dict[str, list[tuple[str, int]]]) -> dict[str, list[str]]:
    """The attributes of each module below the root, where Trainer leaves some of its own."""
    return {path: [name for name, _ in names] for path, names in found.items() if path}


# Losses with kernels on and off


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_twenty_steps_have_the_same_losses_with_every_kind_of_switch(
    switched_on: None, checkpoints: dict[str, Path], tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints[family]
    plain = losses(trainer(AutoModelForCausalLM.from_pretrained(folder), tmp_path))
    assert plain[-1] < 0.8 * plain[0]

    theirs: Any = transformers.KernelConfig
    config = theirs({"RMSNorm": f"{REPOSITORY}:LigerRMSNorm"})
    kerneled = AutoModelForCausalLM.from_pretrained(folder, use_kernels=True, kernel_config=config)
    liger = trainer(kerneled, tmp_path, use_liger_kernel=True, liger_kernel_config=SWITCHES)
    assert losses(liger) == pytest.approx(plain, rel=1e-4)
    assert bound(kerneled) == {"RMSNorm", "rotary_pos_emb", "SwiGLUMLP", "ForCausalLMLoss"}
    calls = kernelhub.load_kernel(f"{REPOSITORY}@v3").CALLS
    assert calls["rope"] == calls["mlp"] == 2 * STEPS
    assert calls["loss"] == STEPS

    monkeypatch.setenv("KERNELHUB_LIGER_SOURCE", "builtin")
    defaults = AutoModelForCausalLM.from_pretrained(folder)
    assert losses(trainer(defaults, tmp_path, use_liger_kernel=True)) == pytest.approx(plain, rel=1e-3)
    assert bound(defaults) == {"RMSNorm", "rotary_pos_emb", "SwiGLUMLP", "FusedLinearCrossEntropy"}
    assert {row.kernel for row in kernelhub.report(defaults).bound} == {"builtin@v2"}


def test_liger_evaluates_with_logits_and_without(
    switched_on: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELHUB_LIGER_SOURCE", "builtin")
    trained = trainer(tiny(), tmp_path, steps=1, use_liger_kernel=True)
    trained.train()
    plain = trainer(tiny(), tmp_path, steps=1)
    plain.train()
    for only_loss in (False, True):
        ours, theirs = (
            each.prediction_step(each.model, {"input_ids": IDS, "labels": IDS}, prediction_loss_only=only_loss)
            for each in (trained, plain)
        )
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-3, atol=1e-4)
    assert trained.predict(trained.eval_dataset).predictions.shape == (*IDS.shape, 64)


# Liger's switches


def test_a_model_without_such_layers_passes_unpatched(
    switched_on: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """REF linkedin/Liger-Kernel#1404: a documented pass-through was a KeyError."""
    config = transformers.GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=1, n_head=2)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config)
    before = anatomy(model)
    trainer(model, tmp_path, steps=1, use_liger_kernel=True, liger_kernel_config={"swiglu": True}).train()
    assert not bound(model)
    assert "GPT2LMHeadModel has no layer for Liger's switch SwiGLUMLP" in caplog.text
    assert anatomy(model).keys() == before.keys()


def test_a_switch_for_another_kind_of_mlp_is_passed_over(switched_on: None, caplog: pytest.LogCaptureFixture) -> None:
    gelu = tiny("Qwen3", hidden_act="gelu")
    apply_liger(gelu, {"swiglu": True, "rope": True, "fused_linear_cross_entropy": False})
    assert bound(gelu) == {"RMSNorm", "rotary_pos_emb"}
    assert "no layer for Liger's switch SwiGLUMLP" in caplog.text


def test_a_kernel_that_was_asked_for_and_cannot_be_loaded_is_an_error(
    switched_on: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELHUB_LIGER_SOURCE", "kernels-community/gone@v1")
    apply_liger(tiny(), {"fused_linear_cross_entropy": False})  # by default all are optional
    with pytest.raises((ResolutionError, FetchError), match="kernels-community/gone"):
        apply_liger(tiny(), {"rms_norm": True})
    with pytest.raises(InvalidConfig, match="did you mean 'rms_norm'"):
        apply_liger(tiny(), {"rms_nrom": True})


def test_a_model_keeps_ligers_kernels_when_its_own_switch_goes_off(switched_on: None) -> None:
    model = tiny()
    model.set_use_kernels(True, kernelhub.KernelConfig({"RMSNorm": "builtin:RMSNorm"}))
    apply_liger(model, SWITCHES)
    model.use_kernels = False
    assert bound(model) == {"rotary_pos_emb", "SwiGLUMLP", "ForCausalLMLoss"}


# The callback


def test_the_callback_binds_before_the_first_step_and_restores_at_the_end(
    checkpoints: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "kernelhub")
    plain = losses(trainer(AutoModelForCausalLM.from_pretrained(checkpoints["Qwen3"]), tmp_path))
    model = AutoModelForCausalLM.from_pretrained(checkpoints["Qwen3"])
    before = anatomy(model)
    callback = KernelTrainerCallback(BUILTIN)
    trained = trainer(model, tmp_path, callbacks=[callback])
    assert bound(model) == {"RMSNorm", "rotary_pos_emb", "SwiGLUMLP", "FusedLinearCrossEntropy"}
    assert losses(trained) == pytest.approx(plain, rel=1e-3)
    assert not bound(model)
    assert names_of(anatomy(model)) == names_of(before)
    assert not {"forward", "_kernelhub"} & set(vars(model))
    assert callback.report is not None
    assert callback.report.counts["bound"] == 14
    assert "kernels for the training:\nSTATE" in caplog.text


def test_the_callback_binds_again_after_adapters_were_added(tmp_path: Path) -> None:
    class Adapting(transformers.TrainerCallback):
        """Adds adapters between the first and the second step, as some training scripts do."""

        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == 1:
                model.base_model.inject_adapter(model.base_model.model, "second")

    def adapted(callbacks: list[Any]) -> tuple[Any, list[float]]:
        torch.manual_seed(0)
        target = ["gate_proj", "up_proj", "q_proj"]
        model: Any = get_peft_model(tiny(), LoraConfig(r=2, target_modules=target, init_lora_weights=False))
        model.peft_config["second"] = LoraConfig(r=2, target_modules=["lm_head"], init_lora_weights=False)
        trained = trainer(model, tmp_path, steps=4, callbacks=[Adapting(), *callbacks])
        return trained, losses(trained)

    _, plain = adapted([])
    callback = KernelTrainerCallback(BUILTIN)
    trained, found = adapted([callback])
    assert found == pytest.approx(plain, rel=1e-3)
    assert callback.report is not None
    assert {row.layer for row in callback.report.bound} == {"RMSNorm", "rotary_pos_emb", "SwiGLUMLP"}
    assert "lm_head" in str(callback.report)  # with an adapter there the fused loss was refused
    assert not bound(trained.model)


def test_the_callback_gives_back_the_kernels_that_the_model_had(tmp_path: Path) -> None:
    model = kernelhub.kernelize(tiny(), {"SwiGLUMLP": "builtin:SwiGLUMLP"})
    callback = KernelTrainerCallback({"RMSNorm": "builtin:RMSNorm"}, mode="training")
    trainer(model, tmp_path, steps=1, callbacks=[callback]).train()
    assert bound(model) == {"SwiGLUMLP"}


def test_a_model_that_is_made_for_the_training_is_bound_too(tmp_path: Path) -> None:
    callback = KernelTrainerCallback(BUILTIN)
    trained = trainer(None, tmp_path, steps=1, callbacks=[callback], model_init=lambda: tiny())
    trained.train()
    assert callback.report is not None
    assert callback.report.bound


def test_after_an_error_the_model_can_be_restored(tmp_path: Path) -> None:
    class Failing(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("out of luck")

    model = tiny()
    callback = KernelTrainerCallback(BUILTIN)
    with pytest.raises(RuntimeError, match="out of luck"):
        trainer(model, tmp_path, callbacks=[callback, Failing()]).train()
    assert bound(model)
    callback.restore()
    assert not bound(model)


def test_the_example_of_a_loop_with_accelerate_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, checkpoints: dict[str, Path]
) -> None:
    example = Path(__file__).parents[2] / "examples" / "accelerate_loop.py"
    monkeypatch.setattr(sys, "argv", [str(example), "--model", str(checkpoints["Llama"]), "--steps", "3"])
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert "10 bound" in shown
    assert "step 2: loss " in shown
