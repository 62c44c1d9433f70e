"""Libraries that cannot be loaded here are refused with the reason, and before anything of them runs."""

from __future__ import annotations

import dataclasses
import io
import pickle
import re
import shutil
import struct
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
from compiled_kernel import marking_library
from kernel_repository import trust, write_build

from kernelhub import load_kernel
from kernelhub.backend import Release
from kernelhub.elf import Library, Machine, VersionNeed
from kernelhub.errors import IncompatibleLibrary
from kernelhub.host import Host, fingerprint, this_host
from kernelhub.preflight import LibraryReport, PreflightReport, preflight, preflight_folder

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from compiled_kernel import CompiledKernel

    from kernelhub.session import Session

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is looked at")

X86 = Machine("x86_64", 64, True)
HOST = Host(
    X86,
    Release(3, 11),
    libc=("glibc", Release(2, 31)),
    versions={"libstdc++.so.6": frozenset({"GLIBCXX_3.4.9", "GLIBCXX_3.4.28", "CXXABI_1.3.12"})},
    places={"libstdc++.so.6": "/opt/conda/lib/libstdc++.so.6"},
    torch_build="2.13.0+cpu",
)
MODULE = "_probe"
NAME = f"{MODULE}.abi3.so"


def judged(library: Library, host: Host = HOST, name: str = NAME, monkeypatch: Any = None) -> tuple[str, ...]:
    monkeypatch.setattr("kernelhub.preflight.read_library", lambda file: library)
    report = preflight(
        "acme/relu torch29-cxx11-cpu-x86_64-linux", "torch29-cxx11-cpu-x86_64-linux", [name], opened, host
    )
    return report.libraries[0].reasons


def opened(path: str) -> Any:
    return io.BytesIO(b"")


def needs(**versions: str) -> tuple[VersionNeed, ...]:
    names = {"libc": "libc.so.6", "cxx": "libstdc++.so.6"}
    return tuple(VersionNeed(names[key], version) for key, text in versions.items() for version in text.split())


FITTING = Library(X86, ("libc.so.6", "libc10.so"), ("$ORIGIN",), needs(libc="GLIBC_2.31", cxx="GLIBCXX_3.4.28"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"machine": Machine("aarch64", 64, True)}, "it is for aarch64 (64 bit), this process is x86_64 (64 bit)"),
        ({"versions": needs(libc="GLIBC_2.2.5 GLIBC_2.32 GLIBC_2.4")}, "it needs glibc >= 2.32, this system has 2.31"),
        ({"versions": (VersionNeed("libm.so.6", "GLIBC_2.100"),)}, "it needs glibc >= 2.100, this system has 2.31"),
        (
            {"versions": needs(cxx="GLIBCXX_3.4.30 GLIBCXX_3.4.9 GLIBCXX_3.4.32")},
            "it needs GLIBCXX >= 3.4.32, the libstdc++.so.6 in this process (/opt/conda/lib/libstdc++.so.6) "
            "has GLIBCXX_3.4.28 at most",
        ),
        ({"versions": needs(cxx="CXXABI_1.3.15")}, "has CXXABI_1.3.12 at most"),
        (
            {"versions": needs(cxx="CXXABI_FLOAT128")},
            "it needs 'CXXABI_FLOAT128', which libstdc++.so.6 here does not have",
        ),
        ({"versions": (VersionNeed("libgomp.so.1", "GOMP_99"),)}, None),
        ({"needed": ("libc.musl-x86_64.so.1",)}, "it is made for musl, and glibc runs here"),
        ({"needed": ("/tmp/evil.so",)}, "it needs the library '/tmp/evil.so' by its path"),
        ({"needed": ("lib/evil.so",)}, "it needs the library 'lib/evil.so' by its path"),
        ({"search_paths": ("/tmp",)}, "its RPATH searches an absolute folder ('/tmp')"),
        ({"search_paths": ("$ORIGIN", "")}, "its RPATH searches a folder relative to the current one ('')"),
        ({"search_paths": ("lib",)}, "a folder relative to the current one ('lib')"),
        ({"search_paths": ("$ORIGINAL/x",)}, "a folder relative to the current one"),
        ({"search_paths": ("$ORIGIN/../lib", "${ORIGIN}")}, None),
        ({"search_paths": ("/x\x1b[2J",)}, r"('/x\x1b[2J')"),
    ],
)
def test_one_reason_for_each_thing_that_does_not_fit(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF Dao-AILab/flash-attention#1708, #1762, #2225: "GLIBC_2.32 not found" from the dynamic loader, without a way
    on.
    """
    reasons = judged(dataclasses.replace(FITTING, **changes), monkeypatch=monkeypatch)
    if reason is None:
        assert reasons == ()
    else:
        assert len(reasons) == 1
        assert reason in reasons[0]


def test_glibc_builds_are_not_for_musl(monkeypatch: pytest.MonkeyPatch) -> None:
    host = dataclasses.replace(HOST, libc=("musl", Release(1, 2)))
    [reason] = judged(FITTING, host, monkeypatch=monkeypatch)
    assert reason == "it is made for glibc, and musl runs here: musl is not supported by this build"


def test_a_torch_that_lacks_a_symbol_is_named_with_the_one_that_the_build_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def lacks(names: Any) -> list[str]:
        asked.extend(listed := list(names))
        return [name for name in listed if "gone" in name]

    names = (
        "_ZN3c104goneEv",
        "_ZNK2at8gone_tooEv",
        "_ZN2at3addEv",
        "fopen",
        "aoti_torch_new",
        "PyList_New",
        "_ZN5other4goneEv",
    )
    host = dataclasses.replace(HOST, lacks=lacks)
    [reason] = judged(dataclasses.replace(FITTING, undefined=names), host, monkeypatch=monkeypatch)
    assert reason == (
        "undefined symbol '_ZN3c104goneEv' and 1 more: built for torch 2.9 (cxx11), and torch 2.13.0+cpu runs here"
    )
    assert asked == ["PyList_New", "_ZN3c104goneEv", "_ZNK2at8gone_tooEv", "_ZN2at3addEv", "aoti_torch_new"]


def test_the_stable_abi_needs_a_python_with_a_gil(monkeypatch: pytest.MonkeyPatch) -> None:
    host = dataclasses.replace(HOST, python=Release(3, 14), free_threaded=True)
    [reason] = judged(FITTING, host, monkeypatch=monkeypatch)
    assert reason == "it is of the stable Python ABI, which free-threaded Python 3.14 does not have"
    assert not judged(FITTING, dataclasses.replace(host, python=Release(3, 15)), monkeypatch=monkeypatch)


def test_a_library_for_another_python_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    [reason] = judged(FITTING, name="x.cpython-310-x86_64-linux-gnu.so", monkeypatch=monkeypatch)
    assert reason == "it is for Python 3.10, this is 3.11"
    assert not judged(FITTING, name="x.cpython-311-x86_64-linux-gnu.so", monkeypatch=monkeypatch)


def test_beside_the_library_for_this_python_others_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernelhub.preflight.read_library", lambda file: FITTING)
    names = [f"x.cpython-3{minor}-x86_64-linux-gnu.so" for minor in (10, 11)]
    report = preflight("b", "torch-cpu", names, opened, HOST)
    assert report.refused is None
    assert report.libraries[0].notes == ("it is for Python 3.10, this is 3.11",)


def test_elsewhere_than_on_linux_nothing_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    report = preflight("b", "torch-cpu", [NAME, "__init__.py"], opened)
    assert report == PreflightReport("b", (LibraryReport(NAME, registers=True),))


def test_a_torch_that_is_no_release_is_noted_with_the_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "kernelhub.preflight.read_library", lambda file: dataclasses.replace(FITTING, needed=("/x.so",))
    )
    host = dataclasses.replace(HOST, notes=("torch 2.14.0.dev20260101 is a pre-release; builds target releases",))
    with pytest.raises(
        IncompatibleLibrary, match=r"by its path\. Ask\. Note: torch 2\.14\.0\.dev20260101 is a pre-rel"
    ):
        preflight("b", "torch-cpu", [NAME], opened, host).check("Ask.")


def test_a_file_is_read_once(tmp_path: Path, library: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / NAME).write_bytes(library)
    first = preflight_folder("b", "torch-cpu", tmp_path)
    monkeypatch.setattr("kernelhub.preflight.read_library", None)
    assert preflight_folder("b", "torch-cpu", tmp_path) == first
    assert not first.libraries[0].registers


def test_what_registers_operators_is_known(compiled: CompiledKernel, tmp_path: Path) -> None:
    for path, body in compiled.files.items():
        if isinstance(body, bytes):
            (tmp_path / path).write_bytes(body)
    report = preflight_folder("b", "torch-cpu", tmp_path, names=[compiled.id, "another_name"])
    [judged_library] = report.libraries
    assert judged_library.registers
    assert judged_library.reasons == ()
    assert judged_library.namespaces == (compiled.id,)
    assert report.lines() == [f"'{judged_library.path}': can be loaded here; registers torch.ops.{compiled.id}"]


def test_this_process_is_asked() -> None:
    host = this_host()
    assert host.torch_build
    assert any(version.startswith("GLIBCXX_") for version in host.versions["libstdc++.so.6"])
    names = ["_ZN3c1012gone_nowhereEv", "Py_GoneNowhere", "PyList_New", "_ZN3c106detail14torchCheckFailEPKcS2_jS2_"]
    assert host.lacks(names)[:2] == ["_ZN3c1012gone_nowhereEv", "Py_GoneNowhere"]
    assert "PyList_New" not in host.lacks(names)


FIRST_COPY = """
import ctypes, sys
copy, moment = sys.argv[1:]
if moment == "before torch":
    ctypes.CDLL(copy)
import torch
if moment == "after torch":
    ctypes.CDLL(copy)
from kernelhub.host import fingerprint, this_host
print(this_host().places["libstdc++.so.6"], fingerprint(), sep="\\n")
"""


def test_of_two_copies_of_a_library_the_first_one_counts(tmp_path: Path) -> None:
    """A kernel gets the copy that was loaded first, conda's or the system's; the other does not help it."""
    usual = this_host().places["libstdc++.so.6"]
    copy = tmp_path / "libstdc++.so.6"
    shutil.copy(usual, copy)

    def told(moment: str) -> list[str]:
        command = [sys.executable, "-c", FIRST_COPY, str(copy), moment]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()

    assert told("after torch") == told("never") == [usual, fingerprint()]
    place, other = told("before torch")
    assert place == str(copy)
    assert other != fingerprint()


# Real libraries: each would leave a mark if it were opened.


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return marking_library(tmp_path_factory.mktemp("marking"), MODULE)


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KERNELHUB_TEST_MARK", str(tmp_path / "mark"))
    return tmp_path / "mark"


def write(root: Path, library: bytes, name: str = "probe", variant: str = "torch-cpu") -> Path:
    return write_build(root, f"acme/{name}", "v1", variant, {"__init__.py": f"from . import {MODULE}\n", NAME: library})


def for_another_machine(library: bytes) -> bytes:
    return library[:18] + struct.pack("<H", 183 if library[18] != 183 else 62) + library[20:]


def with_newer_glibc(library: bytes) -> bytes:
    forged = re.sub(rb"GLIBC_2\.([0-9.]+)\0", lambda match: b"GLIBC_2." + b"9" * len(match[1]) + b"\0", library)
    assert forged != library
    return forged


def with_newer_cxx(library: bytes) -> bytes:
    forged = re.sub(rb"GLIBCXX_3\.4\.[0-9]{2}\0", b"GLIBCXX_3.4.99\0", library)
    assert forged != library
    return forged


def test_a_library_that_fits_leaves_its_mark(library: bytes, tmp_path: Path, hubless: Session, mark: Path) -> None:
    module = load_kernel(str(write(tmp_path, library)), session=hubless)
    assert mark.exists()
    assert module._probe.__file__.endswith(NAME)


@pytest.mark.parametrize(
    ("forge", "problem"),
    [
        (for_another_machine, r"it is for (aarch64|x86_64) \(64 bit\), this process is"),
        (with_newer_glibc, r"it needs glibc >= 2\.9+, this system has 2\."),
        (with_newer_cxx, r"it needs GLIBCXX >= 3\.4\.99, the libstdc\+\+\.so\.6 in this process \(/.*\) has GLIBCXX_3"),
        (lambda data: data[: len(data) // 2], "damaged ELF file"),
    ],
)
def test_s_28_a_library_that_does_not_fit_is_refused_before_it_is_opened(
    forge: Callable[[bytes], bytes],
    problem: str,
    library: bytes,
    tmp_path: Path,
    hubless: Session,
    mark: Path,
    imported: Callable[[], list[str]],
) -> None:
    build = write(tmp_path, forge(library))
    with pytest.raises(IncompatibleLibrary, match=problem) as caught:
        load_kernel(str(build), session=hubless)
    assert caught.value.library == NAME
    assert not mark.exists()
    assert not imported()


def test_an_undefined_symbol_of_torch_is_foretold_with_builds_that_may_do(
    tmp_path: Path, hub_root: Path, session: Session, mark: Path
) -> None:
    body = marking_library(tmp_path, MODULE, declare="namespace c10 { void gone(int); }", before="c10::gone(1);")
    trust(hub_root, "acme")
    variant = f"torch{session.detected.torch.major}{session.detected.torch.minor}"  # type: ignore[union-attr]
    variant = f"{variant}-cxx11-cpu-{session.detected.cpu}-linux"
    for name, files in (
        (variant, {"__init__.py": f"from . import {MODULE}\n", NAME: body}),
        ("torch-cpu", {"__init__.py": ""}),
    ):
        write_build(hub_root, "acme/probe", "v1", name, files)
    with pytest.raises(IncompatibleLibrary) as caught:
        load_kernel("acme/probe", session=session)
    text = str(caught.value)
    assert "undefined symbol '_ZN3c104goneEi': built for torch 2." in text
    assert f"and torch {session.detected.torch_build} runs here" in text
    assert "Other builds of this version that may do: torch-cpu." in text
    assert not mark.exists()


def test_what_another_library_of_the_build_defines_is_not_missing(tmp_path: Path) -> None:
    marking_library(tmp_path, "_user", declare="namespace c10 { void gone(int); }", before="c10::gone(1);")
    definition = 'namespace c10 { __attribute__((visibility("default"))) void gone(int) {} }'
    assert preflight_folder("b", "torch-cpu", tmp_path).refused is not None
    marking_library(tmp_path, "_definer", declare=definition)
    assert preflight_folder("b", "torch-cpu", tmp_path).refused is None


def test_s_29_a_real_search_path_and_an_executable_stack(tmp_path: Path) -> None:
    marking_library(tmp_path, "_one", "-Wl,-rpath,/tmp/lib")
    marking_library(tmp_path, "_two", "-Wl,-z,execstack", "-Wl,-rpath,$ORIGIN")
    report = preflight_folder("b", "torch-cpu", tmp_path)
    one, two = report.libraries
    assert one.reasons == ("its RPATH searches an absolute folder ('/tmp/lib'); only $ORIGIN is allowed",)
    assert (two.reasons, two.notes) == ((), ("asks for an executable stack",))
    assert pickle.loads(pickle.dumps(report)) == report


def test_a_library_for_a_newer_python_and_an_odd_variant_name(monkeypatch: pytest.MonkeyPatch) -> None:
    host = dataclasses.replace(
        HOST, lacks=lambda names: [name for name in names if name in ("PyNew_Thing", "_ZN2at1fEv")]
    )
    library = dataclasses.replace(FITTING, undefined=("PyNew_Thing", "_ZN2at1fEv"), text_relocations=True)
    monkeypatch.setattr("kernelhub.preflight.read_library", lambda file: library)
    for variant in ("torch-cpu", "somebody-s-own"):
        report = preflight("b", variant, [NAME], opened, host)
        assert report.to_dict() == {
            NAME: [
                "undefined symbol 'PyNew_Thing': it is for another Python than 3.11",
                "undefined symbol '_ZN2at1fEv': built for another torch, and torch 2.13.0+cpu runs here",
            ]
        }
        assert report.lines()[0].endswith("; changes its code while it is loaded (text relocations)")


def test_a_library_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    def fail(path: str) -> Any:
        raise PermissionError(13, "Permission denied")

    [judged_library] = preflight("b", "torch-cpu", [NAME], fail, HOST).libraries
    assert judged_library.reasons == ("cannot be read (Permission denied)",)


def test_a_library_beside_one_that_is_none(tmp_path: Path) -> None:
    marking_library(tmp_path, "_user", declare="namespace c10 { void gone(int); }", before="c10::gone(1);")
    (tmp_path / "_none.so").write_bytes(b"text")
    none, user = preflight_folder("b", "torch-cpu", tmp_path).libraries
    assert none.reasons == ("not an ELF file (it starts with b'text')",)
    assert user.reasons[0].startswith("undefined symbol '_ZN3c104goneEi'")
