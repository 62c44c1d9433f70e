"""The whole path over HTTP: a mapping string becomes a module or a symbol."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from kernel_repository import trust, write_build

from kernelhub import KernelConfig, kernelize, load_kernel
from kernelhub.errors import (
    CacheError,
    DigestMismatch,
    IncompatibleLibrary,
    InvalidBackend,
    InvalidRequest,
    MissingDependency,
    NoCompatibleVariant,
    NotCached,
    NumericsMismatch,
    RepositoryNotFound,
    RevisionNotFound,
    SymbolNotFound,
    UntrustedPublisher,
)
from kernelhub.request import KernelRequest

if TYPE_CHECKING:
    from collections.abc import Callable

    from compiled_kernel import CompiledKernel
    from conftest import Recorder

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

REPO = "acme/relu"
FILES: dict[str, str | bytes] = {
    "__init__.py": "from . import layers\nfrom .parts.plain import relu\n\nVERSION = 1\n",
    "layers.py": "from torch import nn\n\nclass ReLU(nn.Module):\n    def forward(self, x):\n        return x.relu()\n",
    "parts/__init__.py": "",
    "parts/plain.py": "from ..parts import table\n\n\ndef relu(x):\n    return x.relu() * table.ONE\n",
    "parts/table.py": "ONE = 1\n",
    "parts/table.txt": "one\n",
}


@pytest.fixture
def root(hub_root: Path) -> Path:
    """Versions 1, 2 and 10 of one kernel of a trusted publisher."""
    trust(hub_root, "acme")
    for version in (1, 2, 10):
        files = FILES | {"__init__.py": f"{FILES['__init__.py']!s}VERSION = {version}\n"}
        write_build(hub_root, REPO, f"v{version}", "torch-cpu", files, version=version)
    return hub_root


def again(session: Session, **changes: Any) -> Session:
    """The same store seen by the next process."""
    return dataclasses.replace(session, **changes)


def build_folder(session: Session) -> Path:
    [stored] = session.store.builds()
    return stored.files_folder


def publish(root: Path, repo_id: str = REPO, **files: str | bytes) -> Path:
    """One trusted build, given as ``__init__`` and other modules."""
    trust(root, repo_id.partition("/")[0])
    return write_build(root, repo_id, "v1", "torch-cpu", {f"{name}.py": text for name, text in files.items()})


def test_a_string_becomes_a_module(root: Path, session: Session) -> None:
    module = load_kernel("acme/relu@v2", session=session)
    assert module.VERSION == 2
    assert module.relu(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 2.0]
    assert Path(module.__file__) == build_folder(session) / "__init__.py"


def test_a_string_with_a_symbol_becomes_a_layer_or_a_function(root: Path, session: Session) -> None:
    assert load_kernel("acme/relu:ReLU", session=session)().forward(torch.tensor([-1.0])).item() == 0.0
    assert load_kernel("acme/relu:relu", session=session).__name__ == "relu"
    assert load_kernel("acme/relu:parts.plain.relu", session=session).__name__ == "relu"
    assert load_kernel("acme/relu:VERSION", session=session) == 1


def test_version_revision_and_the_string_say_the_same(root: Path, session: Session) -> None:
    (root / REPO / "repository.json").write_text(json.dumps({"tags": {"release": "v10"}}))
    assert load_kernel(REPO, session=session).VERSION == 1
    assert load_kernel(REPO, version=2, session=session).VERSION == 2
    assert load_kernel(REPO, revision="v10", session=session).VERSION == 10
    assert load_kernel(REPO, revision="release", session=session).VERSION == 10
    assert load_kernel("acme/relu@latest", session=session).VERSION == 10
    assert load_kernel("acme/relu@>=2,<10", session=session).VERSION == 2
    with pytest.raises(InvalidRequest, match="one of them"):
        load_kernel("acme/relu@v2", version=2, session=session)


def test_the_same_content_is_the_same_module(root: Path, session: Session) -> None:
    module = load_kernel("acme/relu@v2", session=session)
    commit = session.resolve(KernelRequest.parse("acme/relu@v2")).commit
    assert load_kernel(f"acme/relu@{commit}", session=again(session)) is module


def test_backend_cpu_is_always_there_and_another_one_is_refused(root: Path, session: Session) -> None:
    assert load_kernel(REPO, backend="cpu", session=session).VERSION == 1
    with pytest.raises(InvalidBackend, match=r"'rocm': not available in this process; expected one of .*cpu"):
        load_kernel(REPO, backend="rocm", session=session)


def test_the_first_load_asks_three_times_and_once_per_file(
    root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    """REF huggingface/kernels#167, #637, #781: a call that only counts loads; there is none."""
    load_kernel(REPO, session=session)
    requests = asked()
    bodies = [request for request in requests if "/resolve/" in request]
    assert len(bodies) == len(FILES) + 1  # and metadata.json
    assert len(requests) - len(bodies) == 3


def test_a_new_major_is_not_taken_by_itself_and_a_check_finds_that_its_backward_fails(
    hub_root: Path, session: Session
) -> None:
    """REF huggingface/kernels-community#1085, #997; axolotl-ai-cloud/axolotl#3968; huggingface/trl#6979.

    A new major ran forward and failed in backward, and training broke with the default.
    """
    norm = """
        import torch
        from torch import nn
        class Guard(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()
            @staticmethod
            def backward(ctx, gradient):
                {backward}
        class Norm(nn.Module):
            def forward(self, x):
                return Guard.apply(nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps))
        """
    trust(hub_root, "acme")
    for version, backward in ((1, "return gradient"), (2, "raise RuntimeError('no grouped heads')")):
        files = {"__init__.py": "", "layers.py": textwrap.dedent(norm).replace("{backward}", backward)}
        write_build(hub_root, "acme/norm", f"v{version}", "torch-cpu", files, version=version)
    model, x = torch.nn.Sequential(torch.nn.RMSNorm(4)).train(), torch.randn(3, 4)
    kernelize(model, {"RMSNorm": "acme/norm:Norm"}, session=session, check="bind", inputs=x)
    model(x).sum().backward()
    with pytest.raises(NumericsMismatch, match="no grouped heads"):
        kernelize(model, {"RMSNorm": ("acme/norm:Norm", {"version": 2})}, session=session, check="bind", inputs=x)
    model(x).sum().backward()  # what was bound before is bound again


def test_nothing_is_asked_for_until_a_kernel_is_used_and_then_only_that_one(
    hub_root: Path, session: Session, asked: Callable[[], list[str]]
) -> None:
    """REF huggingface/diffusers#14298, #12475: kernels came because the package was there, and all instead of one."""
    norm = "from torch import nn\nclass Norm(nn.Module):\n    def forward(self, x):\n        return 7 * x\n"
    for name in ("norm", "gate"):
        publish(hub_root, f"acme/{name}", __init__="from . import layers\n", layers=norm)
    config = KernelConfig({"RMSNorm": "acme/norm:Norm", "SwiGLUMLP": {"cuda": "acme/gate:Norm"}})
    model = torch.nn.Sequential(torch.nn.RMSNorm(4), torch.nn.Linear(4, 4))
    model(torch.ones(1, 4))
    assert asked() == []
    kernelize(model, config, session=session, strict=False)
    assert model[0](torch.ones(4)).tolist() == [7.0] * 4
    requests = asked()
    assert [request for request in requests if "/acme/norm/" in request]
    assert not [request for request in requests if "/acme/gate" in request]


def test_a_warm_load_asks_nothing(root: Path, session: Session, asked: Callable[[], list[str]]) -> None:
    load_kernel(REPO, session=session)
    commit = session.resolve(KernelRequest.parse(REPO)).commit
    asked()
    for request in (REPO, "acme/relu@v1", f"acme/relu@{commit}"):
        load_kernel(request, session=again(session))
    assert asked() == []


def test_a_commit_is_never_asked_about_again(
    root: Path, session: Session, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF pytorch/vision#4156; pytorch/hub#212; pytorch/pytorch#61755: each load asked about a pinned version."""
    commit = session.resolve(KernelRequest.parse(REPO)).commit
    load_kernel(f"acme/relu@{commit}", session=session)
    asked()
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.001")
    time.sleep(0.01)
    load_kernel(f"acme/relu@{commit}", session=again(session))
    assert asked() == []


def test_a_stopped_hub_is_not_missed(root: Path, session: Session, hub: LocalHub, reporter: Recorder) -> None:
    load_kernel(REPO, session=session)
    hub.stop()
    assert load_kernel(REPO, session=again(session)).VERSION == 1
    assert reporter.warnings == []


def test_an_older_answer_serves_with_a_warning_when_the_hub_is_down(
    root: Path, session: Session, hub: LocalHub, reporter: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    load_kernel(REPO, session=session)
    hub.stop()
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.001")
    time.sleep(0.01)
    assert load_kernel(REPO, session=again(session)).VERSION == 1
    assert any("using what the Hub said of kernel acme/relu 0.0 hours ago" in text for text in reporter.warnings)


def test_offline_loads_what_is_stored(root: Path, session: Session, asked: Callable[[], list[str]]) -> None:
    load_kernel("acme/relu@v2", session=session)
    asked()
    offline = again(session, offline=True)
    assert load_kernel("acme/relu@v2", session=offline).VERSION == 2
    assert load_kernel("acme/relu@>=2,<10", session=offline).VERSION == 2
    with pytest.raises(NotCached, match=r"With network access, run: kernelhub prefetch 'acme/relu@"):
        load_kernel("acme/relu@v10", session=offline)
    assert asked() == []


def test_offline_with_nothing_stored_names_the_command(root: Path, session: Session) -> None:
    with pytest.raises(NotCached, match="run: kernelhub prefetch 'acme/relu'"):
        load_kernel(REPO, session=again(session, offline=True))
    with pytest.raises(NotCached, match="run: kernelhub prefetch 'acme/relu@v2'"):
        load_kernel("acme/relu@v2", session=again(session, offline=True), trust_remote_code=True)


def test_the_environment_says_where_the_hub_and_the_store_are(
    root: Path, hub: LocalHub, session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """REF modelscope/modelscope#1707; modelscope/ms-swift#9447: to use another Hub, private functions had to be
    replaced.
    """
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("KERNELHUB_CACHE", str(tmp_path / "elsewhere"))
    assert load_kernel("acme/relu@v2").VERSION == 2
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert load_kernel("acme/relu@v2", offline=None).VERSION == 2
    assert (tmp_path / "elsewhere" / "hubs").is_dir()


def test_an_unknown_repository(root: Path, session: Session) -> None:
    with pytest.raises(RepositoryNotFound, match=r"'acme/rleu' not found at http://127\.0\.0\.1:"):
        load_kernel("acme/rleu", session=session)


def test_an_unknown_version_lists_the_versions_in_numeric_order(root: Path, session: Session) -> None:
    with pytest.raises(RevisionNotFound, match=r"versions are v1, v2, v10\. .*'acme/relu@v10'"):
        load_kernel("acme/relu@v3", session=session)


def test_no_build_fits_says_why_for_each_and_which_version_would(root: Path, session: Session) -> None:
    for variant in ("torch-cuda", "torch25-cxx11-cpu-x86_64-linux", "torch29-cpu-aarch64-darwin"):
        write_build(root, REPO, "v11", variant, FILES, version=11)
    (root / REPO / "v11" / "build" / "not-a-variant").mkdir()
    (root / REPO / "v11" / "build" / "not-a-variant" / "README.md").write_text("")
    with pytest.raises(NoCompatibleVariant) as caught:
        load_kernel("acme/relu@v11", session=session)
    text = str(caught.value)
    assert f"fits this environment ({session.detected})" in text
    assert "torch-cuda" in text
    assert "torch25-cxx11-cpu-x86_64-linux" in text
    assert "ignored, not a build variant: 'not-a-variant'" in text
    assert "Version v10 has a build that fits: ask for 'acme/relu@v10'." in text


def test_an_unknown_symbol_lists_what_there_is(root: Path, session: Session) -> None:
    with pytest.raises(SymbolNotFound, match=r"did you mean 'ReLU'\? It exports: .*ReLU.*relu"):
        load_kernel("acme/relu:RelU", session=session)
    with pytest.raises(SymbolNotFound, match="is not one that is defined by"):
        load_kernel("acme/relu:layers.nn", session=session)


def test_an_untrusted_publisher_needs_an_opt_in(hub_root: Path, session: Session) -> None:
    """REF huggingface/kernels#508, #512, #538, #735: the error did not say who publishes it and what to pass."""
    write_build(hub_root, "someone/relu", "v1", "torch-cpu", FILES)
    with pytest.raises(UntrustedPublisher, match=r"publisher 'someone'.*trust_remote_code=\['someone/relu'\]"):
        load_kernel("someone/relu", session=session)
    with pytest.raises(UntrustedPublisher):
        load_kernel("someone/relu", trust_remote_code=["someone/other"], session=session)
    assert not list(session.store.builds())
    assert load_kernel("someone/relu", trust_remote_code=True, session=session).VERSION == 1
    assert load_kernel("someone/relu", trust_remote_code=["someone/relu"], session=again(session)).VERSION == 1


def test_a_compiled_kernel_runs(compiled: CompiledKernel, hub_root: Path, session: Session) -> None:
    trust(hub_root, "acme")
    write_build(
        hub_root, "acme/rms-norm", "v1", compiled.variant, compiled.files, metadata_overrides={"id": compiled.id}
    )
    layer = load_kernel("acme/rms-norm@v1:RMSNorm", session=session)()
    layer.weight, layer.variance_epsilon = torch.nn.Parameter(torch.rand(8)), 1e-6
    x = torch.randn(4, 8)
    expected = torch.nn.functional.rms_norm(x, (8,), layer.weight, 1e-6)
    torch.testing.assert_close(layer(x), expected)
    module = load_kernel("acme/rms-norm", session=again(session, offline=True))
    torch.testing.assert_close(module.rms_norm(x, layer.weight, 1e-6), expected)


def test_r_41_an_undefined_symbol_is_an_incompatible_library(hub_root: Path, session: Session, tmp_path: Path) -> None:
    from compiled_kernel import broken_library

    trust(hub_root, "acme")
    library = broken_library(tmp_path, "_broken_cpu_0")
    files = {"__init__.py": "from . import _broken_cpu_0\n", "_broken_cpu_0.abi3.so": library}
    write_build(hub_root, "acme/broken", "v1", "torch-cpu", files)
    before = dict(sys.modules)
    commit = session.resolve(KernelRequest.parse("acme/broken")).commit[:12]
    words = rf"acme/broken@{commit} torch-cpu.*_broken_cpu_0\.abi3\.so.*undefined symbol: gone_in_this_torch"
    with pytest.raises(IncompatibleLibrary, match=rf"{words}.*kernelhub explain"):
        load_kernel("acme/broken", session=session)
    assert not [name for name in sys.modules if name.startswith("kernelhub_k_") and name not in before]


def test_r_41_a_missing_python_dependency_is_told_before_anything_is_imported(hub_root: Path, session: Session) -> None:
    trust(hub_root, "acme")
    files = {"__init__.py": "raise RuntimeError('imported')\n"}
    write_build(hub_root, "acme/needs", "v1", "torch-cpu", files, metadata_overrides={"python-depends": ["helion"]})
    with pytest.raises(MissingDependency, match=r"acme/needs.*'helion' \(import helion\).*`pip install helion`"):
        load_kernel("acme/needs", session=session)


def test_a_build_without_metadata_loads_unverified_with_a_warning(
    hub_root: Path, session: Session, reporter: Recorder
) -> None:
    trust(hub_root, "acme")
    write_build(hub_root, "acme/old-relu", "v1", "torch-cpu", FILES)
    (hub_root / "acme/old-relu/v1/build/torch-cpu/metadata.json").unlink()
    module = load_kernel("acme/old-relu", session=session)
    assert module.VERSION == 1
    assert module.__name__.endswith(".old_relu")
    assert [text for text in reporter.warnings if "lists no digests: its files are loaded unverified" in text]


def test_an_older_build_with_a_nested_package_loads(hub_root: Path, session: Session) -> None:
    trust(hub_root, "acme")
    nested = {f"relu/{path}": text for path, text in FILES.items()}
    write_build(hub_root, REPO, "v1", "torch-cpu", nested)
    assert load_kernel("acme/relu:ReLU", session=session).__name__ == "ReLU"


# Integrity


def test_a_build_that_differs_from_its_own_digest_is_not_kept(
    root: Path, session: Session, imported: Callable[[], list[str]]
) -> None:
    write_build(root, REPO, "v1", "torch-cpu", FILES)
    (root / REPO / "v1/build/torch-cpu/parts/table.py").write_text("ONE = 2\n")
    with pytest.raises(DigestMismatch, match=r"'parts/table\.py' does not match the sha256.*Nothing was imported"):
        load_kernel(REPO, session=session)
    assert not list(session.store.builds())
    assert not list((session.store.root / "tmp").iterdir())
    assert not imported()


@pytest.mark.parametrize("path", ["parts/table.py", "metadata.json"])
@pytest.mark.parametrize("damage", ["changed", "missing", "extra", "emptied", "linked"])
def test_r_34_a_damaged_stored_build_is_fetched_again(
    path: str, damage: str, root: Path, session: Session, reporter: Recorder
) -> None:
    load_kernel(REPO, session=session)
    damaged = _damage(build_folder(session) / path, damage)
    assert load_kernel(REPO, session=again(session)).VERSION == 1
    assert any(f"'{damaged}'" in text and "stored copy was removed" in text for text in reporter.warnings)
    load_kernel(REPO, session=again(session, offline=True))


@pytest.mark.parametrize("path", ["parts/table.py", "metadata.json"])
@pytest.mark.parametrize("damage", ["changed", "missing", "extra", "emptied", "linked"])
def test_r_34_a_damaged_stored_build_is_an_error_offline(
    path: str,
    damage: str,
    root: Path,
    session: Session,
    forget_kernels: Callable[[], None],
    imported: Callable[[], list[str]],
) -> None:
    load_kernel(REPO, session=session)
    forget_kernels()
    damaged = _damage(build_folder(session) / path, damage)
    with pytest.raises(DigestMismatch, match=damaged):
        load_kernel(REPO, session=again(session, offline=True))
    assert not imported()


def _damage(path: Path, damage: str) -> str:
    """Damage a stored file; returns the name that the error has to name."""
    if damage == "missing":
        path.unlink()
    elif damage == "extra":
        path = path.with_name("extra.py")
        path.write_text("")
    elif damage == "linked":
        path.rename(path.parents[4] / "moved")
        path.symlink_to(path.parents[4] / "moved")
    else:
        path.chmod(0o644)
        path.write_bytes(b"" if damage == "emptied" else path.read_bytes() + b" ")
    return path.relative_to(next(parent for parent in path.parents if parent.name == "files")).as_posix()


# Many at once, and what must not be written


def test_r_40_many_threads_import_a_kernel_once(hub_root: Path, session: Session) -> None:
    """REF huggingface/transformers#31019, #27421; huggingface/huggingface_hub#2534: parallel first loads met half-made
    files.
    """
    source = (
        "import builtins\nbuiltins.kernel_imports = getattr(builtins, 'kernel_imports', 0) + 1\nfrom . import layers\n"
    )
    publish(hub_root, __init__=source, layers="import time\ntime.sleep(0.2)\nclass Layer: pass\n")
    barrier, modules = threading.Barrier(64), list[Any]()

    def run() -> None:
        barrier.wait()
        modules.append(load_kernel("acme/relu:Layer", session=again(session)))

    threads = [threading.Thread(target=run) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    import builtins

    try:
        assert builtins.kernel_imports == 1  # type: ignore[attr-defined]
        assert len(modules) == 64
        assert len(set(modules)) == 1
    finally:
        del builtins.kernel_imports  # type: ignore[attr-defined]


def test_r_7_r_8_a_read_only_store_is_loaded_from_and_not_written(
    root: Path, session: Session, tmp_path: Path, reporter: Recorder, forget_kernels: Callable[[], None]
) -> None:
    """Through a read-only mount: file modes would not stop root."""
    load_kernel(REPO, session=session)
    view = tmp_path / "view"
    view.mkdir()
    if subprocess.run(["mount", "--bind", session.store.root, view], capture_output=True).returncode:
        pytest.skip("needs the right to mount a folder")  # root's, in most containers too
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", view], check=True)
        forget_kernels()
        assert load_kernel(REPO, session=again(session, cache_dir=view)).VERSION == 1
        assert load_kernel(REPO, session=again(session, cache_dir=view, offline=True)).VERSION == 1
        assert reporter.warnings == []
        with pytest.raises(CacheError, match=f"kernel store {view}: cannot be written .*Read-only file system"):
            load_kernel("acme/relu@v2", session=again(session, cache_dir=view))
    finally:
        subprocess.run(["umount", view], check=True)


def test_r_7_a_warm_load_writes_nothing_and_takes_no_lock(
    root: Path, session: Session, forget_kernels: Callable[[], None]
) -> None:
    load_kernel(REPO, session=session)

    def state() -> dict[Path, tuple[int, int]]:
        paths = [session.store.root, *session.store.root.rglob("*")]
        return {path: (path.lstat().st_mtime_ns, path.lstat().st_ctime_ns) for path in paths}

    before = state()
    forget_kernels()
    load_kernel("acme/relu:ReLU", session=again(session))
    assert state() == before


@pytest.mark.parametrize("kind", ["file", "link to nothing"])
def test_r_9_a_store_that_is_no_folder_is_named(kind: str, root: Path, session: Session, tmp_path: Path) -> None:
    path = tmp_path / "not-a-folder"
    path.write_text("") if kind == "file" else path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(CacheError, match=f"kernel store {path}: cannot be used"):
        load_kernel(REPO, session=again(session, cache_dir=path))


def test_r_37_a_store_of_a_newer_layout_serves_what_it_holds(root: Path, session: Session) -> None:
    load_kernel(REPO, session=session)
    (session.store.root / "store.json").write_text('{"schema": 99}')
    assert load_kernel(REPO, session=again(session)).VERSION == 1
    with pytest.raises(CacheError, match=r"was written by another layout \(schema 99,"):
        load_kernel("acme/relu@v2", session=again(session))
