from __future__ import annotations

import builtins
import copy
import inspect
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub import errors
from kernelhub.compatibility import select
from kernelhub.environment import Environment
from kernelhub.errors import KernelHubError, did_you_mean, shown

CPU = Environment.parse("torch=2.13")
REJECTED = select(["torch212-cpu-x86_64-linux", "torch-cuda"], CPU).rejected
HOSTILE = "a\x1b[2J\nb\u202e"

EXAMPLES: list[tuple[KernelHubError, str]] = [
    (errors.InvalidRequest("a b", "space"), "invalid kernel request 'a b': space"),
    (errors.InvalidBackend("x", "unknown", "cpu"), "invalid backend 'x': unknown; expected cpu"),
    (errors.InvalidVariant("x", "unknown", origin="a/b"), "invalid build variant 'x' (from a/b): unknown"),
    (errors.InvalidEnvironment("2", "no minor version"), "invalid environment '2': no minor version"),
    (errors.InvalidConfig(None, "did you mean 'x'?", "x"), "invalid kernel config None: did you mean 'x'? expected x"),
    (errors.InvalidLockfile("x", "empty."), "invalid lock file 'x': empty"),
    (errors.LockfileNotFound("x.lock", "no such file"), "invalid lock file 'x.lock': no such file"),
    (errors.InvalidMetadata({}, "empty.", "JSON"), "invalid kernel metadata {}: empty; expected JSON"),
    (errors.InvalidPath("/x", "absolute"), "invalid file path in a kernel build '/x': absolute"),
    (errors.InvalidBundle("x.tar.gz", "truncated"), "invalid kernel bundle 'x.tar.gz': truncated"),
    (errors.InvalidGolden("x.safetensors", "truncated"), "invalid golden file 'x.safetensors': truncated"),
    (errors.PrefetchFailed([("a/b", "gone")], 2), "1 of 2 could not be brought into the store\n  a/b: gone"),
    (errors.RanksDiffer("a/b v", {0: "aa", 1: "bb", 2: "aa"}), "rank 1 differs from rank 0 (sha256: rank 0 aa, rank 1"),
    (errors.RankFailed("loading", {1: "disk full"}), "failed on rank 1, so no rank goes on\n  rank 1: disk full"),
    (errors.PinMismatch("a/b", "c" * 40, "d" * 40, "kernelhub.toml"), "kernelhub.toml pins it to dddd"),
    (errors.RepositoryNotFound("a/b", "https://hub"), "kernel repository 'a/b' not found at https://hub"),
    (errors.FolderNotFound("/a", "this machine", "no such folder"), "no kernel build in folder '/a': no such folder."),
    (errors.RevisionNotFound("a/b", "v9", [1, 3]), "versions are v1, v3. Ask for one of them, e.g. 'a/b@v3'."),
    (errors.RevisionNotFound("a/b", "v9", (), ["main"], "gone"), "(gone): it has no versions"),
    (errors.RevisionNotFound("a/b", "v9"), "branches are none."),
    (errors.NotLocked("a/b", "kernelhub.lock"), "kernelhub.lock has no entry for 'a/b'. Run `kernelhub lock`"),
    (errors.NoCompatibleVariant("a/b", "v1", CPU), "the repository has no builds at this revision"),
    (errors.NoCompatibleVariant("a/b", "v1", CPU, REJECTED, unknown=["x"]), "ignored, not a build variant: 'x'"),
    (errors.NoCompatibleVariant("a/b", "v1", CPU, REJECTED), "No other version has a build that fits"),
    (errors.KernelDependencyError("a cycle", ["a/b@v1", "c/d@v1"]), "a cycle: a/b@v1 -> c/d@v1"),
    (errors.HubUnavailable("https://hub", "timeout"), "cannot reach the Hub at https://hub: timeout"),
    (errors.NotCached("a/b", Path("/store"), "kernelhub prefetch a/b"), "run: kernelhub prefetch a/b"),
    (errors.HubRefused("'a/b'", "https://hub", 410, "it is gone"), "refuses 'a/b': it is gone (HTTP 410)"),
    (errors.IncompleteDownload("a/b", "x.py", "3 of 5 bytes"), "failed: 3 of 5 bytes. Nothing was kept."),
    (errors.CacheError(Path("/store"), "read-only"), "Set KERNELHUB_CACHE to another folder"),
    (errors.CacheFullError(Path("/store"), "full", needed=10, free=5), "10 bytes needed, 5 bytes free"),
    (errors.LockTimeout(Path("/lock"), 600.4), "waited 600 s for the lock /lock (held by unknown)"),
    (errors.DigestMismatch("a/b torch-cpu", "x.py", "is missing"), "file 'x.py' is missing. Nothing was imported."),
    (errors.UnsignedKernel("a/b", "unsigned", "a signature"), "is unsigned, but a signature is required"),
    (errors.UnsignedKernel("a/b", "signed", "one", "by whom?"), "is signed, but one is required: by whom?"),
    (errors.RefreshFailed("https://tuf", "no answer"), "could not be refreshed from https://tuf: no answer. The one"),
    (errors.BadSignature("a/b v", "it is for c"), "kernel build a/b v: its signature is refused: it is for c. Nothing"),
    (errors.OlderBuild("a/b v", "a/b", "signed 1", "one signed 2"), "signed 1, but one signed 2 was seen."),
    (errors.ChangedKernel("a/b c v", "a/b@v1", "c" * 40, "d" * 40), "a/b@v1 moved: commit cccccccccccc at its first"),
    (errors.ChangedKernel("a/b c v", "a/b@v1", "c" * 40, "c" * 40), "has other files at commit cccccccccccc than"),
    (errors.UntrustedPublisher("a/b", "a", "unknown."), "pass trust_remote_code=['a/b']"),
    (errors.ImportFailed("a/b", "x", "Try y."), "importing kernel a/b failed: x. Try y."),
    (errors.ImportFailed("a/b", "x"), "importing kernel a/b failed: x."),
    (errors.SymbolNotFound("a/b", "Nrom", ["Norm"]), "did you mean 'Norm'? It exports: Norm."),
    (errors.SymbolNotFound("a/b", "x", []), "It exports: nothing."),
    (errors.IncompatibleLibrary("a/b", "x.so", "needs glibc 2.38", "Here is 2.36."), "needs glibc 2.38. Here is 2.36."),
    (errors.MissingDependency("a/b", "einops", "einops", "einops"), "run `pip install einops`"),
    (errors.UnknownLayer("RMSNrom", ["RMSNorm"]), "'RMSNrom', did you mean 'RMSNorm'? Layer names"),
    (errors.UnknownLayer("x", []), "Layer names in this model: none."),
    (errors.NoKernel("RMSNorm", "none is mapped"), "no kernel for layer 'RMSNorm': none is mapped"),
    (errors.ContractMismatch("model.norm", "RMSNorm", "a/b", "no weight"), "(RMSNorm): no weight"),
    (errors.NumericsMismatch("model.norm", "a/b", "0.5 off"), "other numbers than model.norm: 0.5 off"),
    (errors.InputsNeeded("Sequential"), "cannot make up inputs for a Sequential"),
    (errors.BrokenFusion("norm + mlp", "one is late"), "norm + mlp run as one kernel, but one is late; leave this"),
]


def drawn() -> list[tuple[int, str, list[str]]]:
    """The tree as the module's text draws it: depth, class, and the built-ins of its line."""
    rows = []
    for line in (errors.__doc__ or "").splitlines():
        if branch := re.match(r"(?P<stem>[│ ]*)[├└] (?P<names>[\w ]+?)(?: +\((?P<builtins>[\w, ]+)\))?$", line):
            depth = len(branch["stem"]) // 2 + 1
            rows += [(depth, name, (branch["builtins"] or "").split(", ")) for name in branch["names"].split()]
    return rows


def test_the_drawing_shows_every_class() -> None:
    defined = {
        name
        for name, cls in inspect.getmembers(errors, inspect.isclass)
        if issubclass(cls, KernelHubError) and cls.__module__ == errors.__name__ and not name.startswith("_")
    }
    assert {name for _, name, _ in drawn()} | {"KernelHubError"} == defined


def test_every_class_stands_where_it_is_drawn() -> None:
    parents: dict[int, type] = {0: KernelHubError}
    for depth, name, names in drawn():
        cls = getattr(errors, name)
        parents[depth] = cls
        assert issubclass(cls, parents[depth - 1]), name
        for builtin in filter(None, names):
            assert issubclass(cls, getattr(builtins, builtin)), name


def test_every_class_has_an_example_here() -> None:
    drawn_leaves = {name for _, name, _ in drawn()} - {
        base.__name__ for example, _ in EXAMPLES for base in type(example).__mro__[1:]
    }
    assert drawn_leaves <= {type(example).__name__ for example, _ in EXAMPLES}


@pytest.mark.parametrize(("error", "words"), EXAMPLES)
def test_an_error_says_what_was_wrong_and_what_to_do(error: KernelHubError, words: str) -> None:
    assert words in str(error)


@pytest.mark.parametrize("error", [error for error, _ in EXAMPLES])
def test_an_error_crosses_process_borders_unchanged(error: KernelHubError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert vars(other) == vars(error)
        assert str(other) == str(error)


def test_no_message_ends_a_sentence_twice() -> None:
    assert not [str(error) for error, _ in EXAMPLES if re.search(r"[.?][.;,?]", str(error).replace("...", ""))]


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest(HOSTILE, "wrong"),
        errors.RepositoryNotFound(HOSTILE, "https://hub"),
        errors.RevisionNotFound(HOSTILE, HOSTILE, branches=[HOSTILE]),
        errors.NotLocked(HOSTILE, "kernelhub.lock"),
        errors.IncompleteDownload("a/b", HOSTILE, "short"),
        errors.DigestMismatch("a/b", HOSTILE, "is missing"),
        errors.UntrustedPublisher(HOSTILE, HOSTILE, "unknown."),
        errors.SymbolNotFound("a/b", HOSTILE, []),
        errors.IncompatibleLibrary("a/b", HOSTILE, "cause"),
        errors.MissingDependency("a/b", HOSTILE, "m", "p"),
        errors.UnknownLayer(HOSTILE, []),
    ],
)
def test_s_39_text_from_outside_cannot_forge_the_terminal(error: KernelHubError) -> None:
    assert str(error).isprintable()


def test_unknown_folders_are_shown_escaped_and_cut() -> None:
    error = errors.NoCompatibleVariant("a/b", "v1", CPU, unknown=[HOSTILE] * 50)
    assert all(line.isprintable() for line in str(error).splitlines())
    assert str(error).count("2J") == 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a", "'a'"),
        ("\u0441\x1b", "'\\u0441\\x1b'"),
        (b"\x00", "b'\\x00'"),
        (None, "None"),
        ("x" * 1000, f"'{'x' * 119}... (1002 characters)"),
        pytest.param(10**5000, "a int too long to show", id="5001 digits"),
    ],
)
def test_a_value_is_shown_escaped_and_cut(value: Any, text: str) -> None:
    assert shown(value) == text


@pytest.mark.parametrize(
    ("name", "end"),
    [("RMSNrom", ", did you mean 'RMSNorm'?"), ("rmsnorm", "."), ("", "."), ("RMSNorm", ", did you mean 'RMSNorm'?")],
)
def test_a_close_name_is_suggested(name: str, end: str) -> None:
    assert did_you_mean(name, ["MLP", "RMSNorm"]) == end


@given(st.text(), st.text(max_size=20), st.text(max_size=20))
def test_any_refused_value_can_be_shown(value: str, problem: str, expected: str) -> None:
    message = str(errors.InvalidRequest(value, problem, expected))
    assert message.startswith("invalid kernel request ")
    assert problem.removesuffix(".") in message


def test_all_that_is_missing_is_one_error_with_one_command_for_each_set_of_options() -> None:
    one, two, other = (
        errors.NotCached(f"kernel {name}", Path("/store"), f"kernelhub prefetch '{name}'{options}")
        for name, options in {"a/b": " --target 'x'", "a/c": " --target 'x'", "a/d": ""}.items()
    )
    assert errors.NotCached.all_of([one]) is one
    assert errors.NotCached.all_of([one, copy.copy(one)]).command == one.command
    told = str(errors.NotCached.all_of([one, two, other, two]))
    assert "kernel a/b and kernel a/c and kernel a/d is not in" in told
    assert told.endswith("run: kernelhub prefetch 'a/b' 'a/c' --target 'x' && kernelhub prefetch 'a/d'")
