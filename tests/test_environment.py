from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kernelhub.backend import BACKENDS, Backend, Release
from kernelhub.environment import PRESETS, Environment
from kernelhub.errors import InvalidBackend, InvalidEnvironment
from kernelhub.machine import Gpu, detect_backend, normalise_cpu, parse_release, parse_torch, read_runtime_version
from kernelhub.variant import CPUS, SYSTEMS

if TYPE_CHECKING:
    from pathlib import Path


def stub(*, backends: dict[str, Any] | None = None, **version: Any) -> Any:
    """Something that looks like a Torch of that kind; attributes not named do not exist."""
    return SimpleNamespace(version=SimpleNamespace(**version), backends=SimpleNamespace(**(backends or {})))


def available(answer: bool) -> SimpleNamespace:
    return SimpleNamespace(is_available=lambda: answer)


# Versions


@pytest.mark.parametrize(
    ("text", "release"),
    [
        ("2.13.0+cu130", (2, 13)),
        ("2.9.1.dev20260101+cu130", (2, 9)),
        ("2.10.0.dev20251009", (2, 10)),
        ("2.9.0a0+50eac811a6.nv25.09", (2, 9)),
        ("2.9.0rc1", (2, 9)),
        ("2.9.0.post1", (2, 9)),
        ("2.9", (2, 9)),
        ("6.3.42131-fa1d09cbd", (6, 3)),
        ("7.14-1a2b", (7, 14)),
        ("8.3.RC1", (8, 3)),
        ("12.8.1", (12, 8)),
    ],
)
def test_a_development_or_vendor_version_is_no_crash(text: str, release: tuple[int, int]) -> None:
    """REF NVlabs/earth2grid#50: a nightly Torch has no ``pre`` part, and reading it crashed."""
    assert parse_release(text) == release


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2", "no minor version"),
        ("13", "no minor version"),
        ("1!2.9.0", "a version with an epoch"),
        ("", "empty version"),
        ("13.x", "unreadable version"),
        ("v2.9", "unreadable version"),
        ("2.9 ", "unreadable version"),
        ("2.9+\x1b[2J", "unreadable version"),
        ("\uff12.9", "unreadable version"),
        ("2." + "9" * 5000, "unreadable version"),
    ],
)
def test_an_unreadable_version_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidEnvironment) as caught:
        parse_release(text)
    assert f"{words}; expected major.minor, e.g. 2.13" in str(caught.value)


@pytest.mark.parametrize(("text", "major"), [("20.1.0", 20), ("0.4.1", 0), ("10.0", 10)])
def test_a_torch_major_without_one_digit_is_refused(text: str, major: int) -> None:
    """Else 20.1 and 2.01 would both be called torch201."""
    with pytest.raises(InvalidEnvironment, match=rf"torch\.__version__\): torch major {major} unsupported"):
        parse_torch(text)
    with pytest.raises(InvalidEnvironment, match=f"torch major {major} unsupported"):
        Environment.parse(f"torch={text}")


@pytest.mark.parametrize(
    ("build", "backend", "notes"),
    [
        ("2.13.0+cu130", "cuda=13.0", []),
        ("2.13.0", "cuda=13.0", []),
        ("2.13.0+cpu", "", []),
        ("2.6.0+cpu.cxx11.abi", "", []),
        ("2.9.1+rocm6.4", "rocm=6.4", []),
        ("2.10.0.dev20251009", "", ["2.10.0.dev20251009 is a pre-release; builds target releases"]),
        ("2.9.0rc1+cpu", "", ["is a pre-release; builds target releases"]),
        ("2.9.1.dev20260101+cu130", "cuda=13.0", ["is a pre-release"]),
        ("2.9.1.dev20260101+cu130", "cuda=12.8", ["is a pre-release", "reports cuda 12.8, not what its version says"]),
        ("2.9.0a0+50eac811a6.nv25.09", "cuda=13.0", ["is a pre-release", "is not an official build"]),
        ("2.9.0+git1a2b3c4", "cuda=13.0", ["is not an official build"]),
    ],
)
def test_a_prerelease_or_vendor_build_of_torch_is_noted(build: str, backend: str, notes: list[str]) -> None:
    """REF coreweave/ml-containers#112: an extension for another nightly of the same minor failed without a hint."""
    environment = Environment.parse(",".join(part for part in (f"torch={build}", backend) if part))
    assert len(environment.notes) == len(notes)
    assert all(words in note for words, note in zip(notes, environment.notes, strict=True))


def test_no_torch_is_nothing_to_note() -> None:
    assert Environment.parse("cpu=x86_64").notes == ()


# The backend of this process


@pytest.mark.parametrize(
    ("torch", "backend"),
    [
        (stub(cuda=None), "cpu"),
        (stub(cuda=None, hip=None), "cpu"),
        (stub(cuda=None, hip=None, xpu=None, backends={"mps": available(False)}), "cpu"),
        (stub(), "cpu"),
        (stub(cuda="13.0"), "cu130"),
        (stub(cuda="12.8.1"), "cu128"),
        (stub(cuda="11.8", hip=None), "cu118"),
        (stub(cuda=None, hip="7.0"), "rocm70"),
        (stub(cuda=None, hip="6.3.42131-fa1d09cbd"), "rocm63"),
        (stub(cuda=None, hip="7.14.0"), "rocm714"),
        (stub(cuda=None, xpu="20250301"), "xpu20253"),
        (stub(cuda=None, xpu="20260000"), "xpu20260"),
        (stub(cuda=None, xpu="2025.3"), "xpu20253"),
        (stub(cuda=None, backends={"mps": available(True)}), "metal"),
        (stub(cuda=None, backends={"tpu": SimpleNamespace()}), "tpu"),
        (stub(cuda="13.0", backends={"tpu": SimpleNamespace()}), "tpu"),
    ],
)
def test_an_attribute_that_torch_lacks_means_not_this_backend(torch: Any, backend: str) -> None:
    """REF huggingface/kernels#163, #165, #166; pytorch/helion#1363: ``torch.version.xpu`` was read blindly."""
    assert str(detect_backend(torch)) == backend


def test_neuron_wins_over_the_cuda_that_torch_was_built_for() -> None:
    torch = stub(cuda="13.0")
    torch.neuron = SimpleNamespace()
    assert detect_backend(torch) == Backend("neuron")


@pytest.mark.parametrize(
    ("cann", "release"), [("8.1", (8, 1)), ("8.3.RC1", (8, 3)), ("", None), ("CANN", None), (None, None)]
)
def test_an_npu_is_cann_even_when_its_version_is_unknown(cann: str | None, release: tuple[int, int] | None) -> None:
    torch = stub(cuda=None) if cann is None else stub(cuda=None, cann=cann)
    torch.npu = SimpleNamespace()
    assert detect_backend(torch) == Backend("cann", Release(*release) if release else None)


@pytest.mark.parametrize("version", ["13", "", "13.x"])
def test_an_unreadable_cuda_version_is_refused_by_its_name(version: str) -> None:
    with pytest.raises(InvalidEnvironment, match=r"from torch\.version\.cuda"):
        detect_backend(stub(cuda=version))


def test_without_torch_or_a_cuda_runtime_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    assert detect_backend(None) == Backend("cpu")


@pytest.mark.parametrize("library", ["no-such-library.so", None])
def test_a_library_that_is_no_cuda_runtime_is_ignored(library: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.util.find_library", lambda name: library or _any_library())
    assert detect_backend(None) == Backend("cpu")


def _any_library() -> str:
    return "libc.so.6" if sys.platform == "linux" else "no-such-library"


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler to make a library")
@pytest.mark.parametrize(("failure", "backend"), [(0, "cu128"), (35, "cpu")])
def test_without_torch_the_cuda_runtime_is_asked(
    failure: int, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libcudart.so"
    code = f"int cudaRuntimeGetVersion(int *version) {{ *version = 12080; return {failure}; }}"
    subprocess.run(["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=code, text=True, check=True)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: str(library))
    monkeypatch.setitem(sys.modules, "torch", None)
    environment = Environment.detect()
    assert (str(environment.backend), environment.gpus) == (backend, ())


@pytest.mark.parametrize(
    ("number", "release"), [(12080, (12, 8)), (13000, (13, 0)), (12100, (12, 10)), (11080, (11, 8))]
)
def test_the_version_of_the_cuda_runtime_is_decoded(number: int, release: tuple[int, int]) -> None:
    assert read_runtime_version(number) == release


# The whole machine


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a Torch that looks as told, on a machine that looks as told, and detect it."""

    def detect(
        torch: Any,
        *,
        system: str = "Linux",
        cpu: str = "x86_64",
        libc: tuple[str, str] = ("glibc", "2.36"),
        macos: str = "",
        config: dict[str, Any] | None = None,
    ) -> Environment:
        module = ModuleType("torch")
        module.__spec__ = ModuleSpec("torch", None)
        vars(module).update(vars(torch))
        monkeypatch.setitem(sys.modules, "torch", module)
        monkeypatch.setattr(platform, "system", lambda: system)
        monkeypatch.setattr(platform, "machine", lambda: cpu)
        monkeypatch.setattr(platform, "libc_ver", lambda: libc)
        monkeypatch.setattr(platform, "mac_ver", lambda: (macos, ("", "", ""), ""))
        monkeypatch.setattr(sysconfig, "get_config_var", (config or {}).get)
        return Environment.detect()

    return detect


def torch_with(version: str, devices: tuple[Any, ...] = (), **attributes: Any) -> Any:
    torch = stub(**attributes)
    torch.__version__ = version
    torch.compiled_with_cxx11_abi = lambda: True
    torch.cuda = SimpleNamespace(
        is_available=lambda: bool(devices), device_count=lambda: len(devices), get_device_properties=devices.__getitem__
    )
    return torch


def test_a_cuda_machine_is_described_with_all_its_devices(machine: Any) -> None:
    devices = (
        SimpleNamespace(major=9, minor=0, name="NVIDIA H200"),
        SimpleNamespace(major=12, minor=1, name="NVIDIA GB10"),
    )
    environment = machine(torch_with("2.13.0+cu130", devices, cuda="13.0"))
    assert environment.gpus == (Gpu("9.0"), Gpu("12.1"))
    assert [gpu.name for gpu in environment.gpus] == ["NVIDIA H200", "NVIDIA GB10"]
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert str(environment) == (
        f"torch=2.13,cuda=13.0,sm=90+121,cpu=x86_64,os=linux,cxx11=1,glibc=2.36,python={python}"
    )
    assert environment.torch_build == "2.13.0+cu130"
    assert Environment.parse(str(environment)) == environment


def test_a_rocm_machine_is_rocm_although_its_devices_are_called_cuda(machine: Any) -> None:
    """REF huggingface/kernels-community#674, #679; feature flags are no part of the architecture."""
    devices = (SimpleNamespace(gcnArchName="gfx90a:sramecc+:xnack-", name="AMD Instinct MI250X"),)
    environment = machine(torch_with("2.9.1+rocm7.0", devices, cuda=None, hip="7.0.51831-a3e329ad8"))
    assert environment.backend == Backend("rocm", Release(7, 0))
    assert environment.gpus == (Gpu("gfx90a"),)
    assert Environment.parse(str(environment)) == environment


@pytest.mark.parametrize(("cpu", "expected"), [("AMD64", "x86_64"), ("ARM64", "aarch64")])
def test_windows_calls_its_cpu_by_other_names_and_has_no_abi_tag(machine: Any, cpu: str, expected: str) -> None:
    """REF huggingface/kernel-builder#243, huggingface/kernels#537, #175, #198."""
    environment = machine(torch_with("2.13.0+cpu", cuda=None), system="Windows", cpu=cpu, libc=("", ""))
    assert (environment.os, environment.cpu, environment.cxx11_abi) == ("windows", expected, None)


def test_a_mac_is_described_with_its_version(machine: Any) -> None:
    torch = torch_with("2.13.0", cuda=None)
    torch.backends.mps = available(True)
    environment = machine(torch, system="Darwin", cpu="arm64", libc=("", ""), macos="26.1")
    assert str(environment).startswith("torch=2.13,metal=1,cpu=aarch64,os=darwin,macos=26.1,python=")
    assert machine(torch, system="Darwin", cpu="arm64", libc=("", ""), macos="26").macos is None


@pytest.mark.parametrize(
    ("libc", "soabi", "expected"),
    [
        (("glibc", "2.36"), "cpython-311-x86_64-linux-gnu", ("glibc", (2, 36))),
        (("", ""), "cpython-311-x86_64-linux-musl", ("musl", (1, 2))),
        (("musl", "1.2.5"), "cpython-315-x86_64-linux-musl", ("musl", (1, 2))),
        (("glibc", ""), "cpython-311-x86_64-linux-gnu", None),
        (("", ""), None, None),
    ],
)
def test_a_musl_system_is_told_from_a_glibc_one(machine: Any, libc: Any, soabi: Any, expected: Any) -> None:
    """REF huggingface/huggingface_hub#3725: a native wheel on musl failed with a flood of missing symbols."""
    assert machine(torch_with("2.13.0", cuda=None), libc=libc, config={"SOABI": soabi}).libc == expected


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("3.13.0 experimental free-threading build (main, Oct  8 2024) [GCC 12.2.0]", True),
        ("3.14.0 free-threading build (main, Oct  7 2025) [Clang 20.1.4]", True),
        ("3.13.0 (main, Oct  8 2024) [GCC 12.2.0]", False),
    ],
)
def test_a_python_without_the_gil_is_seen(
    machine: Any, monkeypatch: pytest.MonkeyPatch, python: str, expected: bool
) -> None:
    """REF huggingface/kernels#312, #494."""
    monkeypatch.setattr(sys, "version", python)
    assert machine(torch_with("2.13.0", cuda=None)).free_threaded is expected


def test_this_python_is_what_its_build_says(machine: Any) -> None:
    built_without = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    assert machine(torch_with("2.13.0", cuda=None)).free_threaded == built_without


def test_an_unreadable_version_of_an_optional_package_is_unknown(
    machine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF huggingface/transformers#31793, #40178: an optional package that is broken must not break the rest."""
    metadata = tmp_path / "apache_tvm_ffi-0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    (tmp_path / "tvm_ffi.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    for version, expected in [("0.1.9", (0, 1)), ("1", None)]:
        metadata.write_text(f"Metadata-Version: 2.1\nName: apache-tvm-ffi\nVersion: {version}\n")
        assert machine(torch_with("2.13.0", cuda=None)).tvm_ffi == expected


def test_a_machine_without_torch_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """REF huggingface/kernels#264, #272."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("ctypes.util.find_library", lambda name: None)
    environment = Environment.detect()
    assert (environment.torch, environment.torch_build, environment.backend.name) == (None, "", "cpu")
    assert (environment.cxx11_abi, environment.gpus) == (None, ())


def test_this_machine_is_described() -> None:
    torch = pytest.importorskip("torch")
    environment = Environment.detect()
    assert environment.torch_build == str(torch.__version__)
    assert Environment.parse(str(environment)) == environment


@pytest.mark.parametrize(
    ("machine", "expected"),
    [("AMD64", "x86_64"), ("x64", "x86_64"), ("arm64", "aarch64"), ("aarch64", "aarch64"), ("riscv64", "riscv64")],
)
def test_the_cpu_has_one_name(machine: str, expected: str) -> None:
    assert normalise_cpu(machine) == expected


# Asking for another backend


CUDA = Environment.parse("torch=2.13,cuda=13.0,sm=90")
CPU = Environment.parse("torch=2.13")


def test_cpu_builds_can_be_asked_for_under_a_cuda_torch() -> None:
    """REF huggingface/kernels#268: detection always picked CUDA."""
    environment = CUDA.with_backend("cpu")
    assert (environment.backend, environment.gpus) == (Backend("cpu"), ())


@pytest.mark.parametrize("name", [None, "cuda"])
def test_the_backend_of_this_process_changes_nothing(name: str | None) -> None:
    assert CUDA.with_backend(name) is CUDA


@pytest.mark.parametrize(
    ("environment", "name", "words"),
    [
        (CUDA, "rocm", "'rocm': not available in this process; expected one of cuda, cpu"),
        (CPU, "cuda", "'cuda': not available in this process; expected one of cpu"),
        (CPU, "npu", "'npu': not available in this process; expected one of cpu"),
        (CPU, "CPU", "unknown name, did you mean 'cpu'? expected one of cann, cpu, cuda"),
        (CPU, "", "unknown name; expected one of cann, cpu, cuda"),
    ],
)
def test_a_backend_that_is_not_here_is_refused_with_those_that_are(
    environment: Environment, name: str, words: str
) -> None:
    """REF huggingface/kernels#268."""
    with pytest.raises(InvalidBackend) as caught:
        environment.with_backend(name)
    assert words in str(caught.value)


def test_npu_and_mps_are_other_names_of_cann_and_metal() -> None:
    cann, metal = Environment.parse("cann=8.1"), Environment.parse("metal=1,os=darwin")
    assert cann.with_backend("npu") is cann
    assert metal.with_backend("mps") is metal


# The text that describes another machine


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("torch=2.13", "torch=2.13,cpu=x86_64,os=linux,cxx11=1"),
        ("torch=2.13,os=windows,cpu=AMD64", "torch=2.13,cpu=x86_64,os=windows"),
        ("torch=2.13,cuda=13.0,sm=90+121", "torch=2.13,cuda=13.0,sm=90+121,cpu=x86_64,os=linux,cxx11=1"),
        ("torch=2.6,rocm=6.3,cxx11=0", "torch=2.6,rocm=6.3,cpu=x86_64,os=linux,cxx11=0"),
        ("rocm=7.0,gfx=gfx90a+gfx1151", "rocm=7.0,gfx=gfx90a+gfx1151,cpu=x86_64,os=linux"),
        ("xpu=2025.3", "xpu=2025.3,cpu=x86_64,os=linux"),
        ("cann=8.1,cpu=aarch64", "cann=8.1,cpu=aarch64,os=linux"),
        ("cann=unknown", "cann=unknown,cpu=x86_64,os=linux"),
        ("metal=1,os=darwin,cpu=arm64,macos=26.0", "metal=1,cpu=aarch64,os=darwin,macos=26.0"),
        ("metal=0", "cpu=x86_64,os=linux"),
        ("neuron=1", "neuron=1,cpu=x86_64,os=linux"),
        ("tpu=1", "tpu=1,cpu=x86_64,os=linux"),
        ("musl=1.2,tvm_ffi=0.1", "cpu=x86_64,os=linux,musl=1.2,tvm_ffi=0.1"),
        ("glibc=2.28", "cpu=x86_64,os=linux,glibc=2.28"),
    ],
)
def test_another_machine_is_described_in_one_line(text: str, canonical: str) -> None:
    """REF huggingface/kernels#708: the target is an explicit argument, not this machine."""
    environment = Environment.parse(f"{text},python=3.12")
    assert set(str(environment).split(",")) == {*canonical.split(","), "python=3.12"}
    assert Environment.parse(str(environment)) == environment


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no preset ''"),
        ("torch", "no preset 'torch'"),
        ("torch=", "part 'torch='"),
        ("torch=2", "torch '2': no minor version"),
        ("torch=1!2.9.0", "torch '1!2.9.0': a version with an epoch"),
        ("torch=2.13,torch=2.12", "key 'torch' given twice"),
        ("cuda=13.0,rocm=7.0", "'rocm' and another key both give the backend"),
        ("cuda=13.0,sm=90,gfx=gfx942", "both give the gpus"),
        ("glibc=2.28,musl=1.2", "both give the libc"),
        ("sm=90", "GPUs of another backend; expected sm= with cuda=, gfx= with rocm="),
        ("rocm=7.0,sm=90", "GPUs of another backend"),
        ("cuda=13.0,gfx=gfx942", "GPUs of another backend"),
        ("cuda=13.0,sm=9.0", "sm '9.0': expected digits of the compute capability"),
        ("rocm=7.0,gfx=gfx90a:xnack-", "expected a gfx name"),
        ("cuda=13", "cuda '13': no minor version"),
        ("cuda=13.x", "cuda '13.x': unreadable version"),
        ("metal=2", "metal '2': expected 0 or 1"),
        ("cpu=riscv64", "cpu 'riscv64': unknown, expected one of aarch64, x86_64"),
        ("os=Linux", "os 'Linux': unknown, expected one of darwin, linux, windows"),
        ("python=t", "python 't': empty version"),
        ("gpu=90", "unknown key 'gpu'; expected one of cann, cpu, cuda, cxx11"),
        ("torch=2.9+\x1b[2J", "torch '2.9+\\x1b[2J': unreadable version"),
    ],
)
def test_a_description_that_cannot_be_read_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(InvalidEnvironment) as caught:
        Environment.parse(text)
    assert words in str(caught.value)
    assert str(caught.value).isprintable()


RELEASES = st.builds(Release, st.integers(0, 40), st.integers(0, 40))


@st.composite
def environments(draw: st.DrawFn) -> Environment:
    kind = draw(st.sampled_from(BACKENDS))
    release = draw(st.none() | RELEASES) if kind.major_digits else None
    capability = st.sampled_from(["7.5", "8.0", "9.0", "10.3", "12.1"])
    archs = {"cuda": capability, "rocm": st.sampled_from(["gfx90a", "gfx942", "gfx1151"])}.get(kind.name, st.nothing())
    system = draw(st.sampled_from(SYSTEMS))
    torch = draw(st.none() | st.builds(Release, st.integers(1, 9), st.integers(0, 40)))
    return Environment(
        backend=Backend(kind.name, release),
        cpu=draw(st.sampled_from(CPUS)),
        os=system,
        torch=torch,
        cxx11_abi=draw(st.booleans()) if torch and system == "linux" else None,
        python=draw(RELEASES),
        free_threaded=draw(st.booleans()),
        libc=draw(st.none() | st.tuples(st.sampled_from(["glibc", "musl"]), RELEASES)),
        macos=draw(st.none() | RELEASES),
        tvm_ffi=draw(st.none() | RELEASES),
        gpus=tuple(draw(st.lists(st.builds(Gpu, archs), max_size=3))) if kind.name in ("cuda", "rocm") else (),
    )


@given(environments())
def test_an_environment_reads_back_from_its_own_text(environment: Environment) -> None:
    assert Environment.parse(str(environment)) == environment


KEYS = st.sampled_from(["torch", "cuda", "rocm", "sm", "gfx", "cpu", "os", "cxx11", "python", "glibc", "metal", "x"])
VALUES = st.sampled_from(["2.13", "13.0", "90", "gfx942", "x86_64", "linux", "1", "0", "3.14t", "unknown"]) | st.text(
    max_size=5
)


@given(st.text() | st.lists(st.builds("{}={}".format, KEYS, VALUES), max_size=6).map(",".join))
@example("cann=unknown,os=windows,cxx11=1")
def test_any_text_is_an_environment_or_refused(text: str) -> None:
    try:
        environment = Environment.parse(text)
    except InvalidEnvironment:
        return
    assert Environment.parse(str(environment)) == environment


# Presets and detection without an import


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_describes_a_machine_that_reads_back(name: str) -> None:
    machine = Environment.parse(name)
    assert Environment.parse(str(machine)) == machine
    assert machine.torch is not None


def test_what_follows_a_preset_changes_it() -> None:
    assert Environment.parse("h100,torch=2.12,glibc=2.28") == Environment.parse(
        "torch=2.12,cuda=13.0,sm=90,cpu=x86_64,os=linux,glibc=2.28"
    )


def test_a_misspelt_preset_suggests_the_nearest() -> None:
    with pytest.raises(InvalidEnvironment, match="did you mean 'h100'"):
        Environment.parse("h1000")


def test_detection_without_importing_torch_agrees_with_the_imported_one() -> None:
    code = (
        "import sys; from kernelhub import Environment;"
        "quick = Environment.detect(without_import=True); assert 'torch' not in sys.modules; print(quick)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    quick = Environment.parse(done.stdout.strip())
    full = Environment.detect()
    assert (quick.torch, quick.backend, quick.cpu, quick.os) == (full.torch, full.backend, full.cpu, full.os)
