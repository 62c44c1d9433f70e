from __future__ import annotations

import pytest

from kernelhub.mode import Mode

INFERENCE, TRAINING, FALLBACK = Mode.INFERENCE, Mode.TRAINING, Mode.FALLBACK
INFERENCE_COMPILE, TRAINING_COMPILE = Mode.INFERENCE_COMPILE, Mode.TRAINING_COMPILE


@pytest.mark.parametrize(
    ("mode", "lookup"),
    [
        (INFERENCE, (INFERENCE, INFERENCE_COMPILE, TRAINING, TRAINING_COMPILE, FALLBACK)),
        (TRAINING, (TRAINING, TRAINING_COMPILE, FALLBACK)),
        (INFERENCE_COMPILE, (INFERENCE_COMPILE, TRAINING_COMPILE, FALLBACK)),
        (TRAINING_COMPILE, (TRAINING_COMPILE, FALLBACK)),
        (FALLBACK, (FALLBACK,)),
    ],
)
def test_a_mapping_is_searched_in_the_documented_order(mode: Mode, lookup: tuple[Mode, ...]) -> None:
    assert mode.lookup == lookup


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_is_served_by_itself_first_and_by_the_fallback_last(mode: Mode) -> None:
    assert mode.lookup[0] is mode
    assert mode.lookup[-1] is FALLBACK


@pytest.mark.parametrize("mode", Mode)
def test_an_inference_kernel_never_serves_training(mode: Mode) -> None:
    """REF huggingface/transformers#40459, #40628; huggingface/kernels#68, #90, #103, #108."""
    if mode.training:
        assert not {INFERENCE, INFERENCE_COMPILE} & set(mode.lookup)


@pytest.mark.parametrize("mode", Mode)
def test_a_kernel_not_made_for_compiling_never_serves_a_compiled_layer(mode: Mode) -> None:
    """REF linkedin/Liger-Kernel#871: a compiled norm gave wrong values."""
    if mode.compile:
        assert not {INFERENCE, TRAINING} & set(mode.lookup)


@pytest.mark.parametrize(
    ("training", "compiling", "mode"),
    [
        (False, False, INFERENCE),
        (True, False, TRAINING),
        (False, True, INFERENCE_COMPILE),
        (True, True, TRAINING_COMPILE),
    ],
)
def test_the_mode_of_a_module_follows_its_training_flag(training: bool, compiling: bool, mode: Mode) -> None:
    """REF huggingface/kernels#107, #135: the strictest mode as default made most kernels fall back."""
    assert Mode.of(training=training, compile=compiling) is mode
    assert (mode.training, mode.compile) == (training, compiling)


@pytest.mark.parametrize("mode", Mode)
def test_a_mode_reads_back_from_its_name(mode: Mode) -> None:
    assert Mode(mode.value) is mode
