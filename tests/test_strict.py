"""The strict mode runs the bytes that were hashed, whatever happens to the files afterwards."""

from __future__ import annotations

import builtins
import ctypes
import inspect
import json
import os
import sys
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from compiled_kernel import marking_library
from kernel_repository import trust, write_build

from kernelhub import Session, load_kernel, loaded_kernels
from kernelhub.errors import DigestMismatch, ImportFailed, IncompatibleLibrary, InvalidConfig, UnsignedKernel
from kernelhub.loader import load
from kernelhub.request import KernelRequest
from kernelhub.source import SealedSource
from kernelhub.verify import VerificationState

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_kernel import CompiledKernel
    from conftest import Recorder

    from kernelhub.verify import VerifiedBuild

FILES: dict[str, str | bytes] = {
    "__init__.py": "from .part import f\nfrom .plain.two import TWO\n",
    "part.py": "def f():\n    return 'hashed'  # ä\n",
    "plain/two.py": "TWO = 2\n",
    "data/table.txt": "text",
}


@pytest.fixture
def strict(tmp_path: Path, forget_kernels: object) -> Session:
    return Session(cache_dir=tmp_path / "store", endpoint="http://127.0.0.1:9", token=False, strict=True)


def obtain(folder: Path, session: Session) -> VerifiedBuild:
    return session.obtain(session.resolve(KernelRequest.parse(str(folder))))


def test_a_kernel_loads_as_ever(tmp_path: Path, strict: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", FILES)
    module = load_kernel(str(folder), session=strict)
    assert (module.f(), module.TWO) == ("hashed", 2)
    assert module.__file__ == str(folder / "__init__.py")
    assert module.part.__file__ == str(folder / "part.py")
    assert [kernel.state for kernel in loaded_kernels() if kernel.module is module] == ["self-attested, strict"]
    assert load_kernel(str(folder), session=strict) is module


def test_s_17_what_is_written_after_the_hash_is_not_run_and_not_shown(tmp_path: Path, strict: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", {**FILES, "late.py": "WHO = 'hashed'\n"})
    module = load_kernel(str(folder), session=strict)
    for path in ("late.py", "part.py"):
        (folder / path).write_text("WHO = 'somebody'\ndef f():\n    return 'somebody'\n")
    assert inspect.getsource(module.f) == "def f():\n    return 'hashed'  # ä\n"
    late = __import__(f"{module.__name__}.late", fromlist=["WHO"])
    assert late.WHO == "hashed"
    assert module.__spec__.loader.get_data(str(folder / "part.py")) == str(FILES["part.py"]).encode()


def test_the_lines_of_a_traceback_are_those_that_ran(tmp_path: Path, strict: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", {"__init__.py": "def f():\n    raise LookupError\n"})
    module = load_kernel(str(folder), session=strict)
    (folder / "__init__.py").write_text("def f():\n    pretended()\n")
    with pytest.raises(LookupError) as caught:
        module.f()
    assert "    raise LookupError\n" in "".join(traceback.format_exception(caught.value))


def test_data_is_hashed_again_when_it_is_read_through_the_loader(tmp_path: Path, strict: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", FILES)
    loader = load_kernel(str(folder), session=strict).__spec__.loader
    assert loader.get_data(str(folder / "data/table.txt")) == b"text"
    (folder / "data/table.txt").write_text("other")
    with pytest.raises(DigestMismatch, match=r"'data/table\.txt' changed after it was verified"):
        loader.get_data(str(folder / "data/table.txt"))


@pytest.mark.parametrize("path", ["part.py", "data/table.txt", "metadata.json", "new.py"])
def test_s_17_a_change_between_verification_and_load_is_found(path: str, tmp_path: Path, strict: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", {**FILES, "__init__.py": "import nowhere\n"})
    build = obtain(folder, strict)
    (folder / path).write_text("{}")
    with pytest.raises(DigestMismatch, match="changed after it was verified"):
        load(build)


def test_a_link_that_took_the_place_of_a_file_is_not_followed(tmp_path: Path, strict: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", FILES)
    build = obtain(folder, strict)
    (folder / "part.py").rename(tmp_path / "moved.py")
    (folder / "part.py").symlink_to(tmp_path / "moved.py")
    with pytest.raises(DigestMismatch, match=r"'part\.py' cannot be read"):
        load(build)


def test_unverified_builds_are_refused(tmp_path: Path, strict: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", FILES, digest=False)
    with pytest.raises(UnsignedKernel, match=r"is unverified, but a digest of each file \(strict mode\) is required"):
        load_kernel(str(folder), session=strict)


def test_the_environment_switches_it_on(tmp_path: Path, hubless: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", FILES)
    assert not obtain(folder, hubless).strict
    monkeypatch.setenv("KERNELHUB_STRICT", "1")
    assert obtain(folder, hubless).strict
    monkeypatch.setenv("KERNELHUB_STRICT", "perhaps")
    with pytest.raises(InvalidConfig, match="KERNELHUB_STRICT"):
        obtain(folder, hubless)


def test_a_load_that_was_not_strict_does_not_count_as_one(tmp_path: Path, strict: Session, hubless: Session) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", FILES)
    plain = load_kernel(str(folder), session=hubless)
    assert load_kernel(str(folder), session=strict) is not plain
    assert load_kernel(str(folder), session=hubless) is plain


def test_a_kernel_that_meddles_with_other_modules_is_refused(tmp_path: Path, strict: Session) -> None:
    files: dict[str, str | bytes] = {"__init__.py": "import sys\nsys.modules['colorsys'] = sys\n"}
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", files)
    import colorsys

    with pytest.raises(ImportFailed, match="replaced the module colorsys"):
        load_kernel(str(folder), session=strict)
    assert sys.modules["colorsys"] is colorsys


# Native libraries


@pytest.mark.skipif(sys.platform != "linux", reason="sealed files are what Linux has")
def test_a_native_module_is_opened_from_sealed_bytes(tmp_path: Path, strict: Session) -> None:
    body = marking_library(tmp_path, "_probe")
    files: dict[str, str | bytes] = {"__init__.py": "from . import _probe\n", "_probe.abi3.so": body}
    folder = write_build(tmp_path / "local", "acme/probe", "v1", "torch-cpu", files)
    build = obtain(folder, strict)
    sealed = Path(SealedSource(build).library(folder / "_probe.abi3.so"))
    assert sealed.read_bytes() == body
    with pytest.raises(PermissionError):
        os.pwrite(int(sealed.name), b"x", 0)
    with pytest.raises(PermissionError):
        os.ftruncate(int(sealed.name), 1)
    module = load(build)
    assert module._probe.__file__ == str(folder / "_probe.abi3.so")
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if "_probe.abi3.so" in line]
    assert mapped
    assert all("memfd:_probe.abi3.so" in line for line in mapped if str(folder) in line or "memfd" in line)
    assert not [line for line in mapped if str(folder) in line]
    (folder / "_probe.abi3.so").unlink()
    assert load(build) is module


@pytest.mark.skipif(sys.platform != "linux", reason="sealed files are what Linux has")
def test_what_was_taken_is_given_back_when_it_is_not_what_was_verified(tmp_path: Path, strict: Session) -> None:
    files: dict[str, str | bytes] = {"__init__.py": "", "_given_back.abi3.so": b"body", "part.py": ""}
    folder = write_build(tmp_path, "acme/probe", "v1", "torch-cpu", files)
    build = obtain(folder, strict)
    (folder / "part.py").write_text("ONE = 1\n")
    with pytest.raises(DigestMismatch, match=r"'part\.py' changed"):
        SealedSource(build)
    assert not [path for path in Path("/proc/self/fd").iterdir() if "memfd:_given_back" in os.path.realpath(path)]


@pytest.mark.skipif(sys.platform != "linux", reason="sealed files are what Linux has")
def test_an_operator_runs_from_sealed_bytes(compiled: CompiledKernel, tmp_path: Path) -> None:
    """In a process of its own, as the operator may be registered in this one already."""
    import subprocess

    failing = f"{compiled.files['__init__.py']!s}\nimport os\nif 'FAIL' in os.environ: raise ValueError('once')\n"
    files = {**compiled.files, "__init__.py": failing}
    folder = write_build(tmp_path, "acme/rms", "v1", compiled.variant, files, metadata_overrides={"id": compiled.id})
    code = f"""
import os
import torch
from kernelhub import Session, load_kernel
from kernelhub.errors import ImportFailed
os.environ["FAIL"] = "1"
try:
    load_kernel({str(folder)!r}, backend="cpu", session=Session(strict=True))
except ImportFailed as error:
    print(error.cause)
del os.environ["FAIL"]
module = load_kernel({str(folder)!r}, backend="cpu", session=Session(strict=True))
print(module.rms_norm(torch.ones(2), torch.ones(2), 0.0).tolist())
print(load_kernel({str(folder)!r}, backend="cpu") is module)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ValueError: once\n[1.0, 1.0]\nTrue\n"


@pytest.mark.skipif(sys.platform != "linux", reason="sealed files are what Linux has")
def test_a_sealed_library_is_judged_before_it_is_opened(tmp_path: Path, strict: Session) -> None:
    files: dict[str, str | bytes] = {"__init__.py": "from . import _x\n", "_x.abi3.so": b"\x7fELF" + bytes(60)}
    with pytest.raises(IncompatibleLibrary, match=r"_x\.abi3\.so"):
        load_kernel(str(write_build(tmp_path, "acme/probe", "v1", "torch-cpu", files)), session=strict)


def test_elsewhere_libraries_are_copied_to_a_private_folder(
    tmp_path: Path, strict: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = write_build(
        tmp_path / "local", "acme/probe", "v1", "torch-cpu", {"__init__.py": "", "_x.abi3.so": b"body"}
    )
    copy = Path(SealedSource(obtain(folder, strict)).library(folder / "_x.abi3.so"))
    assert copy.read_bytes() == b"body"
    assert not copy.is_relative_to(folder)
    assert copy.parent.stat().st_mode & 0o077 == 0
    build = obtain(folder, strict)
    (folder / "__init__.py").write_text("ONE = 1\n")
    with pytest.raises(DigestMismatch):
        SealedSource(build)
    assert [path for path in tmp_path.glob("kernelhub-*") if path != copy.parent] == []


def test_a_kernel_that_opens_its_library_by_itself_is_refused(tmp_path: Path, strict: Session) -> None:
    body = marking_library(tmp_path, "_probe")
    source = "import ctypes, pathlib\nctypes.CDLL(str(pathlib.Path(__file__).with_name('_probe.abi3.so')))\n"
    folder = write_build(
        tmp_path / "l", "acme/probe", "v1", "torch-cpu", {"__init__.py": source, "_probe.abi3.so": body}
    )
    with pytest.raises(ImportFailed, match="which the strict mode does not allow"):
        load_kernel(str(folder), session=strict)
    assert ctypes.CDLL(None)  # others are not disturbed


def test_what_others_may_write_runs_from_the_bytes_that_were_hashed(
    hub_root: Path, session: Session, forget_kernels: object
) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/shared", "v1", "torch-cpu", {"__init__.py": "", "late.py": "WHO = 'hashed'\n"})
    session.shared_cache = True
    module = load_kernel("acme/shared", session=session)
    assert [kernel.state for kernel in loaded_kernels() if kernel.module is module] == ["self-attested, strict"]
    late = Path(str(module.__file__)).with_name("late.py")
    late.chmod(0o644)
    late.write_text("WHO = 'somebody'\n")
    assert __import__(f"{module.__name__}.late", fromlist=["WHO"]).WHO == "hashed"


# A writer that never rests


def test_s_17_a_writer_never_gets_its_code_run(
    hub_root: Path, session: Session, forget_kernels: Callable[[], None]
) -> None:
    """A thread swaps the files of a stored build for others, by rename and in place, during 1,000 strict loads."""
    good = {"__init__.py": "from .part import WHO\n", "part.py": "WHO = 'good'\n"}
    evil = "import builtins\nbuiltins.kernelhub_test_evil = True\nWHO = 'evil'\n"
    trust(hub_root, "acme")
    write_build(hub_root, "acme/swapped", "v1", "torch-cpu", good)
    session.strict = True
    resolution = session.resolve(KernelRequest.parse("acme/swapped"))
    build = session.obtain(resolution)
    stop = threading.Event()
    writer = threading.Thread(target=_swap, args=(build.folder, good, evil, stop))
    writer.start()
    loaded = refused = 0
    try:
        for _ in range(1000):
            forget_kernels()
            try:
                assert load(build).WHO == "good"
                loaded += 1
            except DigestMismatch:
                refused += 1
    finally:
        stop.set()
        writer.join()
    assert not hasattr(builtins, "kernelhub_test_evil")
    assert loaded
    assert refused


def _swap(folder: Path, good: dict[str, str], evil: str, stop: threading.Event) -> None:
    turn = 0
    while not stop.wait(0.0005):
        turn += 1
        for path, text in good.items():
            target = folder / path
            if turn % 3 == 0:  # in place
                target.chmod(0o644)
                target.write_text(evil)
                target.write_text(text)
            else:
                body = evil if turn % 3 == 1 else text
                (folder.parent / "swap").write_text(body)
                (folder.parent / "swap").rename(target)


@pytest.mark.parametrize("digest", ["missing", "null"])
def test_metadata_without_a_digest_proves_nothing(
    digest: str, tmp_path: Path, strict: Session, hubless: Session, reporter: Recorder
) -> None:
    folder = write_build(tmp_path, "acme/relu", "v1", "torch-cpu", FILES, digest=False)
    if digest == "null":
        metadata = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps({**metadata, "digest": None}))
    with pytest.raises(UnsignedKernel, match="is unverified"):
        load_kernel(str(folder), session=strict)
    assert obtain(folder, hubless).state is VerificationState.UNVERIFIED
    assert [warning for warning in reporter.warnings if "lists no digests" in warning]
