from __future__ import annotations

import itertools
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.backend import Release
from kernelhub.compatibility import CHECKS, Rejection, first_reason, judge_archs, select
from kernelhub.environment import Environment
from kernelhub.errors import NoCompatibleVariant
from kernelhub.machine import Gpu
from kernelhub.variant import Variant

if TYPE_CHECKING:
    import random

LINUX = "x86_64-linux"


def machine(text: str) -> Environment:
    return Environment.parse(f"{text},python=3.12" if "python=" not in text else text)


def best(text: str, *names: str) -> str | None:
    chosen = select(names, machine(text)).best
    return None if chosen is None else str(chosen)


def reason(text: str, name: str) -> str | None:
    return first_reason(Variant.parse(name), machine(text))


# One machine of each kind, over a repository that has everything

PLATFORMS = [
    ("x86_64", "linux"),
    ("aarch64", "linux"),
    ("x86_64", "windows"),
    ("aarch64", "windows"),
    ("aarch64", "darwin"),
]
TOKENS = ["cpu", "cu126", "cu128", "cu130", "rocm63", "rocm714", "xpu20253", "cann81", "metal", "neuron", "tpu"]
NOARCH = ["torch-cpu", "torch-cuda", "torch-rocm", "torch-xpu", "torch-npu", "torch-metal", "torch-neuron", "torch-tpu"]
COMPILED = [
    f"torch{torch}{'-cxx11' if system == 'linux' else ''}-{token}-{cpu}-{system}"
    for torch in ("212", "213")
    for token in TOKENS
    for cpu, system in PLATFORMS
]
EVERYTHING = [*COMPILED, *NOARCH, "torch-universal"]
MACHINES = [
    # backend of the machine, the compiled build that serves it, the pure Python build that serves it
    ("", "cpu", "torch-cpu"),
    ("cuda=13.0", "cu130", "torch-cuda"),
    ("cuda=13.2", "cu130", "torch-cuda"),
    ("cuda=12.9", "cu128", "torch-cuda"),
    ("cuda=12.10", "cu128", "torch-cuda"),
    ("cuda=12.6", "cu126", "torch-cuda"),
    ("cuda=12.5", None, "torch-cuda"),
    ("cuda=11.8", None, "torch-cuda"),
    ("cuda=14.0", None, "torch-cuda"),
    ("rocm=6.3", "rocm63", "torch-rocm"),
    ("rocm=6.4", None, "torch-rocm"),
    ("rocm=7.14", "rocm714", "torch-rocm"),
    ("rocm=7.1", None, "torch-rocm"),
    ("xpu=2025.3", "xpu20253", "torch-xpu"),
    ("xpu=2025.2", None, "torch-xpu"),
    ("cann=8.1", "cann81", "torch-npu"),
    ("cann=unknown", None, "torch-npu"),
    ("metal=1,macos=26.0", "metal", "torch-metal"),
    ("metal=1,macos=15.7", None, "torch-metal"),
    ("metal=1", None, "torch-metal"),
    ("neuron=1", "neuron", "torch-neuron"),
    ("tpu=1", "tpu", "torch-tpu"),
]
PYTHONS = [("3.10", True), ("3.13", True), ("3.13t", False), ("3.14t", False), ("3.15t", True), ("3.16t", True)]


@pytest.mark.parametrize(("backend", "token", "noarch"), MACHINES)
def test_every_machine_gets_the_build_made_for_it(backend: str, token: str | None, noarch: str) -> None:
    """OS, CPU, backend, Torch and Python in all combinations.

    REF huggingface/kernels#312, #494: compiled kernels crash a free-threaded Python before 3.15.
    """
    for (cpu, system), torch, (python, abi3) in itertools.product(PLATFORMS, ("2.11", "2.12", "2.13"), PYTHONS):
        facts = (f"torch={torch}", f"cpu={cpu}", f"os={system}", f"python={python}", backend)
        tag = "-cxx11" if system == "linux" else ""
        compiled = f"torch{torch.replace('.', '')}{tag}-{token}-{cpu}-{system}"
        expected = compiled if token and abi3 and torch != "2.11" else noarch
        assert best(",".join(fact for fact in facts if fact), *EVERYTHING) == expected, facts


def test_the_order_of_preference_is_the_documented_one() -> None:
    names = [
        "torch-stable-abi213-cu130-x86_64-linux",
        "torch-stable-abi213-cu128-x86_64-linux",
        "torch-stable-abi210-cu132-x86_64-linux",
        "torch213-cu132-x86_64-linux",
        "torch213-cu130-x86_64-linux",
        "torch213-cxx11-cu132-x86_64-linux",
        "torch213-cxx11-cu130-x86_64-linux",
        "tvm-ffi01-cu132-x86_64-linux",
        "tvm-ffi01-cu130-x86_64-linux",
        "torch-cuda",
        "torch-universal",
    ]
    selection = select(reversed(names), machine("torch=2.13,cuda=13.2,tvm_ffi=0.1"))
    expected = [name for name in names if "cu128" not in name]
    assert [str(variant) for variant in selection.accepted] == expected
    assert [str(rejection.variant) for rejection in selection.rejected] == [names[1]]


def test_minor_versions_are_ordered_as_numbers() -> None:
    names = [f"torch213-cu12{minor}-{LINUX}" for minor in ("6", "9", "10")]
    assert best("torch=2.13,cuda=12.10", *names) == f"torch213-cu1210-{LINUX}"
    assert best("torch=2.13,cuda=12.9", *names) == f"torch213-cu129-{LINUX}"
    names = [f"torch-stable-abi{minor}-cpu-{LINUX}" for minor in ("29", "210", "213")]
    assert best("torch=2.12", *names) == f"torch-stable-abi210-cpu-{LINUX}"


@pytest.mark.parametrize(
    ("text", "name", "expected"),
    [
        ("torch=2.13", "torch213-cpu-aarch64-linux", "built for aarch64 CPUs, this CPU is x86_64"),
        ("torch=2.13", "torch213-cpu-x86_64-windows", "built for windows, this system is linux"),
        ("torch=2.13", "torch213-cu130-x86_64-linux", "built for cuda, this process uses cpu"),
        ("torch=2.13", "torch-cuda", "built for cuda, this process uses cpu"),
        ("torch=2.13,cann=8.1", "torch-cpu", "built for cpu, this process uses npu"),
        ("torch=2.13", f"torch212-cpu-{LINUX}", "built for Torch 2.12, here is 2.13"),
        ("torch=2.9", f"torch-stable-abi210-cpu-{LINUX}", "needs Torch 2.10 or newer, here is 2.9"),
        ("cpu=x86_64", f"torch213-cpu-{LINUX}", "needs Torch, which is not installed"),
        ("cpu=x86_64", f"torch-stable-abi210-cpu-{LINUX}", "needs Torch, which is not installed"),
        ("torch=2.13", f"tvm-ffi01-cpu-{LINUX}", "needs tvm-ffi 0.1, which is not installed"),
        ("torch=2.13,tvm_ffi=0.2", f"tvm-ffi01-cpu-{LINUX}", "built for tvm-ffi 0.1, here is 0.2"),
        ("torch=2.13", f"torch213-cxx98-cpu-{LINUX}", "built with the cxx98 C++ ABI, Torch here uses cxx11"),
        ("torch=2.6,cxx11=0", f"torch26-cxx11-cpu-{LINUX}", "built with the cxx11 C++ ABI, Torch here uses cxx98"),
        ("torch=2.13,cuda=12.6", f"torch213-cu128-{LINUX}", "built for cuda 12.8, here is cuda 12.6"),
        ("torch=2.13,cuda=13.0", f"torch213-cu128-{LINUX}", "built for cuda 12.8, here is cuda 13.0"),
        ("torch=2.13,cuda=13.0", f"torch213-cu9999-{LINUX}", "built for cuda 99.99, here is cuda 13.0"),
        ("torch=2.13,cuda=unknown", f"torch213-cu130-{LINUX}", "built for cuda 13.0, the version here is unknown"),
        ("torch=2.13,rocm=7.1", f"torch213-rocm70-{LINUX}", "built for rocm 7.0, here is rocm 7.1"),
        ("torch=2.13,musl=1.2", f"torch213-cpu-{LINUX}", "compiled for glibc, this system uses musl libc"),
        ("torch=2.13,musl=1.2", f"torch-stable-abi210-cpu-{LINUX}", "compiled for glibc, this system uses musl libc"),
        (
            "torch=2.13,metal=1,os=darwin,cpu=arm64,macos=15.7",
            "torch213-metal-aarch64-darwin",
            "Metal builds need macOS 26 or newer, here is 15.7",
        ),
        (
            "torch=2.13,metal=1,os=darwin,cpu=arm64",
            "torch213-metal-aarch64-darwin",
            "Metal builds need macOS 26 or newer, the version here is unknown",
        ),
        (
            "torch=2.13,python=3.14t",
            f"torch213-cpu-{LINUX}",
            "compiled builds cannot run on free-threaded Python 3.14 (before 3.15)",
        ),
        # and what fits
        ("torch=2.13", f"torch213-cpu-{LINUX}", None),
        ("torch=2.13", f"torch213-cxx11-cpu-{LINUX}", None),
        ("torch=2.6,cxx11=0", f"torch26-cxx98-cpu-{LINUX}", None),
        ("torch=2.13,os=windows", "torch213-cxx11-cpu-x86_64-windows", None),
        ("torch=2.13", f"torch-stable-abi213-cpu-{LINUX}", None),
        ("tvm_ffi=0.1", f"tvm-ffi01-cpu-{LINUX}", None),
        ("torch=2.13,musl=1.2", "torch-cpu", None),
        ("torch=2.13,python=3.14t", "torch-cpu", None),
        ("torch=2.13,python=3.15t", f"torch213-cpu-{LINUX}", None),
        ("torch=2.13,rocm=7.1", "torch-universal", None),
        ("torch=2.13,glibc=2.28", f"torch213-cpu-{LINUX}", None),
    ],
)
def test_a_build_that_does_not_fit_has_one_reason(text: str, name: str, expected: str | None) -> None:
    assert reason(text, name) == expected


def test_every_check_is_the_reason_of_some_build() -> None:
    machines = [
        machine("torch=2.13"),
        machine("torch=2.13,cuda=12.6"),
        machine("torch=2.13,cuda=13.0,musl=1.2"),
        machine("torch=2.6,cxx11=0"),
    ]
    machines += [machine("torch=2.13,python=3.14t"), machine("torch=2.13,metal=1,os=darwin,cpu=arm64")]
    names = [*EVERYTHING, f"torch26-cxx11-cpu-{LINUX}"]
    used = {
        next((check for check in CHECKS if check(Variant.parse(name), environment)), None)
        for environment in machines
        for name in names
    }
    assert used == {*CHECKS, None}


def test_torch_2_1_and_20_1_are_never_taken_for_each_other() -> None:
    environment = replace(machine("torch=2.13"), torch=Release(20, 1))
    assert select([f"torch201-cpu-{LINUX}", f"torch21-cpu-{LINUX}"], environment).best is None


def test_a_name_that_does_not_parse_is_kept_apart() -> None:
    selection = select(["torch-cpu", "__pycache__", "jax04-cpu-x86_64-linux"], machine("torch=2.13"))
    assert [str(variant) for variant in selection.accepted] == ["torch-cpu"]
    assert [error.value for error in selection.unknown] == ["__pycache__", "jax04-cpu-x86_64-linux"]


def test_two_folders_that_differ_in_case_only_are_refused_with_both_names() -> None:
    selection = select(["torch-cpu", "Torch-CPU", "torch-universal"], machine("torch=2.13"))
    assert [str(variant) for variant in selection.accepted] == ["torch-universal"]
    (rejection,) = selection.rejected
    assert str(rejection.variant) == "torch-cpu"
    assert rejection.reason == "same folder as 'Torch-CPU' where file names ignore letter case"
    assert [error.value for error in selection.unknown] == ["Torch-CPU"]


def test_the_best_build_can_be_ruled_out_later() -> None:
    selection = select(["torch-cpu", "torch-universal"], machine("torch=2.13"))
    assert str(selection.best) == "torch-cpu"
    without = selection.without_best("no")
    assert str(without.best) == "torch-universal"
    assert without.rejected == (Rejection(Variant.parse("torch-cpu"), "no"),)
    assert without.without_best("no").best is None


# What users reported


def test_a_torch_newer_than_every_build_gets_one_reason_for_each_group() -> None:
    """REF huggingface/kernels-community#1082, huggingface/transformers#47863; huggingface/kernels#504."""
    environment = machine("torch=2.13.0+cu130,cuda=13.0")
    old = [f"torch2{minor}-cxx11-{cuda}-{LINUX}" for minor in (10, 11, 12) for cuda in ("cu126", "cu130")]
    selection = select(old, environment)
    assert selection.best is None
    message = str(NoCompatibleVariant("org/repo", "v1", environment, selection.rejected, fitting_version=3))
    assert "torch=2.13,cuda=13.0" in message
    reasons = [line for line in message.splitlines() if "built for Torch" in line]
    assert len(reasons) == 3
    assert all(f"built for Torch 2.{minor}, here is 2.13: torch2{minor}-" in message for minor in (10, 11, 12))
    assert "Version v3 has a build that fits: ask for 'org/repo@v3'." in message
    assert best("torch=2.13,cuda=13.0", f"torch-stable-abi210-cu130-{LINUX}") is not None


def test_each_build_that_does_not_fit_is_explained_by_its_own_reason() -> None:
    """REF huggingface/kernels#504, #422, #436, #561: no single "expected" name is printed."""
    environment = machine("torch=2.13")
    names = [f"torch212-cpu-{LINUX}", "torch213-cpu-x86_64-windows", "torch213-cpu-aarch64-linux"]
    message = str(NoCompatibleVariant("org/repo", "v1", environment, select(names, environment).rejected))
    assert f"built for Torch 2.12, here is 2.13: {names[0]}" in message
    assert f"built for windows, this system is linux: {names[1]}" in message
    assert f"built for aarch64 CPUs, this CPU is x86_64: {names[2]}" in message
    assert f"torch213-cpu-{LINUX}" not in message


def test_sixty_builds_stay_on_one_screen() -> None:
    """REF huggingface/kernels-community#1082: one reason per rejected variant, grouped, not 60 lines."""
    environment = machine("torch=2.11,cuda=11.8")
    message = str(NoCompatibleVariant("org/repo", "v1", environment, select(EVERYTHING, environment).rejected))
    assert len(message.splitlines()) < 20


def test_a_cpu_user_of_a_cuda_only_kernel_is_told_the_backends() -> None:
    """REF huggingface/transformers#43512, huggingface/kernels#35: a file-not-found error with a cache path."""
    environment = machine("torch=2.13")
    names = [f"torch29-cxx11-cu128-{LINUX}"]
    selection = select(names, environment)
    headline, why, *_ = str(NoCompatibleVariant("org/repo", "v1", environment, selection.rejected)).splitlines()
    assert "no build of kernel org/repo@v1 fits this environment" in headline
    assert "built for cuda, this process uses cpu" in why
    assert best("torch=2.13", *names, "torch-cpu") == "torch-cpu"
    assert best("torch=2.13", *names, "torch-universal") == "torch-universal"


def test_a_build_that_is_not_for_windows_says_so() -> None:
    """REF huggingface/kernel-builder#243, huggingface/kernels#537, #175, #198."""
    selection = select([f"torch213-cxx11-cpu-{LINUX}"], machine("torch=2.13,os=windows,cpu=AMD64"))
    assert selection.rejected[0].reason == "built for linux, this system is windows"
    assert best("torch=2.13,os=windows,cpu=ARM64", "torch213-cpu-aarch64-windows") == "torch213-cpu-aarch64-windows"


def test_musl_is_one_line_not_a_flood_of_symbols() -> None:
    """REF huggingface/huggingface_hub#3725."""
    assert reason("torch=2.13,musl=1.2", f"torch213-cpu-{LINUX}") == "compiled for glibc, this system uses musl libc"


def test_the_cpp_abi_is_compared_before_anything_is_loaded() -> None:
    """REF Dao-AILab/flash-attention#854, #723, #919, #975, #1612: "undefined symbol _ZN..." at import."""
    assert "C++ ABI" in (reason("torch=2.6,cuda=12.4", f"torch26-cxx98-cu124-{LINUX}") or "")


def test_another_machine_is_judged_by_its_description_not_by_this_one() -> None:
    """REF huggingface/kernels#708: the variant was picked for the Torch of the build machine."""
    names = [f"torch2{minor}-cxx11-cu130-{LINUX}" for minor in (12, 13)]
    assert best("torch=2.12,cuda=13.0", *names) == names[0]
    assert best("torch=2.13,cuda=13.0", *names) == names[1]


# GPU architectures

CAPABILITIES = ["7.5", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]
COVERED = [
    ("8.0", ["8.0", "8.6", "8.9"]),
    ("8.6", ["8.6", "8.9"]),
    ("9.0", ["9.0"]),
    ("9.0a", ["9.0"]),
    ("10.0", ["10.0", "10.3"]),
    ("10.0a", ["10.0"]),
    ("10.0f", ["10.0", "10.3"]),
    ("10.3f", ["10.3"]),
    ("12.0f", ["12.0", "12.1"]),
    ("7.5+PTX", CAPABILITIES),
    ("9.0+PTX", ["9.0", "10.0", "10.3", "11.0", "12.0", "12.1"]),
    ("9.0a+PTX", ["9.0"]),
    ("10.0f+PTX", ["10.0", "10.3"]),
    ("12.0", ["12.0", "12.1"]),
    ("12.1", ["12.1"]),
    ("6.0", []),
    ("12.9", []),
]


@pytest.mark.parametrize(("arch", "covered"), COVERED)
def test_an_architecture_covers_exactly_its_devices(arch: str, covered: list[str]) -> None:
    """REF vllm-project/vllm#46002, lightseekorg/tokenspeed#5, Dao-AILab/flash-attention#2593: ">= 10" is also 12.

    REF karpathy/nanochat#475, #540: "major >= 9" is not Hopper.
    """
    verdicts = {device: judge_archs([arch], replace(H200, gpus=(Gpu(device),))) for device in CAPABILITIES}
    assert [device for device, verdict in verdicts.items() if verdict.reason is None] == covered
    assert all(verdict.note is None for verdict in verdicts.values())


H200 = machine("torch=2.13,cuda=13.0,sm=90")
MI300 = machine("torch=2.13,rocm=7.0,gfx=gfx942")


def test_a_new_gpu_is_refused_before_its_first_launch() -> None:
    """REF huggingface/diffusers#13043, sgl-project/sglang#7249, vllm-project/vllm#20193: "no kernel image"."""
    environment = replace(H200, gpus=(Gpu("12.0", "NVIDIA GeForce RTX 5090"),))
    verdict = judge_archs(["8.0", "8.9", "9.0"], environment)
    assert verdict.reason == "no code for GPU 12.0 (NVIDIA GeForce RTX 5090) on x86_64, only for 8.0, 8.9, 9.0"
    assert judge_archs(["8.0", "9.0+PTX"], environment).reason is None


def test_the_reason_names_the_architecture_and_the_cpu() -> None:
    """REF Dao-AILab/flash-attention#1969: GB10 is sm_121 on aarch64."""
    environment = machine("torch=2.13,cuda=13.0,sm=121,cpu=aarch64")
    assert judge_archs(["9.0a"], environment).reason == "no code for GPU 12.1 on aarch64, only for 9.0a"


@pytest.mark.parametrize(
    ("archs", "fits"),
    [
        (["gfx942"], True),
        (["gfx90a", "gfx942"], True),
        (["gfx942:sramecc+:xnack-"], True),
        (["gfx90a:sramecc+:xnack-"], False),
        (["gfx1151"], False),
        (["gfx94"], None),
        (["gfx9-4-generic"], None),
        (["9.0"], None),
    ],
)
def test_rocm_compares_gfx_names_without_feature_flags(archs: list[str], fits: bool | None) -> None:
    """REF huggingface/kernels#502, #834, huggingface/kernels-community#1149: a build without code for the device."""
    verdict = judge_archs(archs, MI300)
    assert (verdict.reason is None) is (fits is not False)
    assert (verdict.note is not None) is (fits is None)
    assert verdict.reason is None or "no code for GPU gfx942" in verdict.reason


def test_a_device_with_feature_flags_is_compared_without_them() -> None:
    assert judge_archs(["gfx90a"], replace(MI300, gpus=(Gpu("gfx90a:sramecc+:xnack-"),))).reason is None


@pytest.mark.parametrize("arch", ["sm_90", "90", "9", "9.0b", "9.0+ptx", "compute_90", "Hopper", "9.0\x1b[2J"])
def test_an_unknown_spelling_cannot_be_judged_and_is_noted(arch: str) -> None:
    verdict = judge_archs(["8.0", arch], H200)
    assert verdict.reason is None
    assert verdict.note is not None
    assert verdict.note.startswith("cannot judge architectures 8.0, ")
    assert verdict.note.isprintable()


def test_a_known_spelling_that_fits_needs_no_note() -> None:
    assert judge_archs(["9.0", "Hopper"], H200) == (None, None)


def test_nothing_listed_or_no_device_is_nothing_to_judge() -> None:
    assert judge_archs([], H200) == (None, None)
    assert judge_archs(["9.0"], machine("torch=2.13")) == (None, None)


def test_a_long_list_of_architectures_is_cut() -> None:
    verdict = judge_archs([f"8.{minor % 10}" for minor in range(100)], H200)
    assert verdict.reason is not None
    assert verdict.reason.endswith("8.9 and 80 more")


@pytest.mark.parametrize(
    ("devices", "archs", "uncovered"),
    [
        (["9.0", "9.0"], ["9.0"], None),
        (["9.0", "12.0"], ["9.0", "12.0"], None),
        (["9.0", "12.0"], ["9.0+PTX"], None),
        (["9.0", "12.0"], ["9.0"], (1, "12.0")),
        (["7.5", "9.0"], ["9.0a"], (0, "7.5")),
        (["9.0", "8.0", "7.5"], ["8.0", "9.0"], (2, "7.5")),
    ],
)
def test_a_build_must_cover_every_visible_device(
    devices: list[str], archs: list[str], uncovered: tuple[int, str] | None
) -> None:
    verdict = judge_archs(archs, replace(H200, gpus=tuple(map(Gpu, devices))))
    if uncovered is None:
        assert verdict.reason is None
    else:
        index, device = uncovered
        assert verdict.reason is not None
        assert f"no code for GPU {device} on x86_64" in verdict.reason
        assert f"it is device {index}, and CUDA_VISIBLE_DEVICES can hide it" in verdict.reason


def test_hiding_a_device_is_advised_only_where_it_helps() -> None:
    verdict = judge_archs(["9.0"], replace(H200, gpus=(Gpu("7.5"), Gpu("8.0"))))
    assert verdict.reason == "no code for GPU 7.5 on x86_64, only for 9.0"
    rocm = judge_archs(["gfx942"], replace(MI300, gpus=(Gpu("gfx942"), Gpu("gfx1151"))))
    assert rocm.reason is not None
    assert "HIP_VISIBLE_DEVICES" in rocm.reason


def test_a_device_that_cannot_be_judged_does_not_hide_one_that_can() -> None:
    verdict = judge_archs(["9.0", "Ampere"], replace(H200, gpus=(Gpu("9.0"), Gpu("8.0"))))
    assert (verdict.reason, verdict.note) == (None, "cannot judge architectures 9.0, Ampere")
    assert judge_archs(["9.0"], replace(H200, gpus=(Gpu("sm_90"),))).note is not None


# Properties

NAMES = st.lists(
    st.sampled_from([*EVERYTHING, "torch-stable-abi210-cu130-x86_64-linux", "x", "Torch-CPU"]), unique=True
)
ENVIRONMENTS = st.sampled_from(
    [machine(f"torch={torch}{',' * bool(backend)}{backend}") for torch in ("2.12", "2.13") for backend, *_ in MACHINES]
)


@given(NAMES, ENVIRONMENTS, st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_the_order_of_the_listing(
    names: list[str], environment: Environment, shuffler: random.Random
) -> None:
    shuffled = list(names)
    shuffler.shuffle(shuffled)
    one, other = select(names, environment), select(shuffled, environment)
    assert (one.accepted, one.rejected) == (other.accepted, other.rejected)
    assert [error.value for error in one.unknown] == [error.value for error in other.unknown]


@given(NAMES, ENVIRONMENTS)
def test_every_name_is_accepted_rejected_or_unknown(names: list[str], environment: Environment) -> None:
    selection = select(names, environment)
    told = [str(variant) for variant in selection.accepted] + [str(row.variant) for row in selection.rejected]
    assert sorted([*told, *(str(error.value) for error in selection.unknown)]) == sorted(names)
    assert all(first_reason(variant, environment) is None for variant in selection.accepted)
    assert all(row.reason for row in selection.rejected)


@given(NAMES, ENVIRONMENTS, st.sampled_from(EVERYTHING))
def test_another_build_never_makes_the_choice_worse(names: list[str], environment: Environment, name: str) -> None:
    """A build that is added is chosen or changes nothing."""
    if name == "torch-cpu" or "Torch-CPU" in names:
        return
    before, after = select(names, environment).best, select([*dict.fromkeys([*names, name])], environment).best
    assert after in (before, Variant.parse(name))


@given(st.lists(st.text(max_size=12), max_size=5), st.lists(st.sampled_from(CAPABILITIES), max_size=3))
def test_any_list_of_architectures_is_judged(archs: list[str], devices: list[str]) -> None:
    verdict = judge_archs(archs, replace(H200, gpus=tuple(map(Gpu, devices))))
    assert verdict.reason is None or verdict.note is None


def test_a_universal_build_serves_any_backend() -> None:
    for backend, *_ in MACHINES:
        environment = machine(f"torch=2.13{',' * bool(backend)}{backend}")
        assert first_reason(Variant.parse("torch-universal"), environment) is None
