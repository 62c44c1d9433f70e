from __future__ import annotations

import base64
import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernelhub.errors import InvalidMetadata, InvalidPath
from kernelhub.metadata import MAX_BYTES, Digest, KernelDependency, Metadata, seal
from kernelhub.revision import Revision

EINOPS = (Path(__file__).parent / "data" / "metadata-einops-cpu.json").read_bytes()
HASH = base64.b64encode(hashlib.sha256(b"").digest()).decode()
FULL: dict[str, Any] = {
    "name": "probe",
    "id": "_probe_cpu_1a2b3c4",
    "version": 1,
    "license": "MIT",
    "backend": {"type": "cpu"},
    "digest": {"algorithm": "sha256", "files": {"__init__.py": HASH}},
}


def parse(**changes: Any) -> Metadata:
    return Metadata.parse(json.dumps(FULL | changes).encode(), "org/repo@1a2b3c4")


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidMetadata) as caught:
        Metadata.parse(data, "org/repo@1a2b3c4")
    assert "(from org/repo@1a2b3c4)" in str(caught.value)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def refusal_of(**changes: Any) -> str:
    return refusal(json.dumps(FULL | changes).encode())


def raw(key: str, value: str) -> bytes:
    """The full document with ``value`` written in place of a key's value, as no JSON writer would."""
    return json.dumps(FULL | {key: "PLACE"}).replace('"PLACE"', value).encode()


def test_a_published_metadata_is_read() -> None:
    metadata = Metadata.parse(EINOPS, "kernels-community/einops")
    assert (metadata.name, metadata.id, metadata.version) == ("einops", "_einops_cpu_d45adda", 1)
    assert (metadata.license, metadata.backend, metadata.archs) == ("MIT", "cpu", ())
    assert metadata.upstream == "https://github.com/arogozhnikov/einops.git"
    assert (metadata.python_depends, metadata.kernel_depends, metadata.notes) == ((), (), ())
    assert metadata.digest is not None
    assert metadata.digest.algorithm == "sha256"
    assert len(metadata.digest.files) == 18
    assert metadata.digest.files["experimental/__init__.py"] == hashlib.sha256(b"").digest()
    assert metadata.provenance["kernel"]["dirty"] is False


def test_an_old_build_lacks_most_keys() -> None:
    assert Metadata.parse(b'{"python-depends": ["einops"]}') == Metadata(python_depends=("einops",))


def test_all_keys_are_read() -> None:
    metadata = parse(
        **{
            "python-depends": ["einops", "tvm-ffi"],
            "kernel-depends": [{"repo-id": "a/b", "version": 2}, {"repo-id": "c/d", "revision": "main"}],
            "backend": {"type": "cuda", "archs": ["9.0a", "10.0f"]},
            "kernels-minver": "0.12.0",
        }
    )
    assert metadata.python_depends == ("einops", "tvm-ffi")
    assert metadata.kernel_depends == (
        KernelDependency("a/b", Revision.version(2)),
        KernelDependency("c/d", Revision.parse("main")),
    )
    assert (metadata.backend, metadata.archs) == ("cuda", ("9.0a", "10.0f"))
    assert metadata.kernels_minver == "0.12.0"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty (0 bytes)"),
        (b" \n", "empty (2 bytes)"),
        (b"null", "invalid kernel metadata None"),
        (b"[]", "invalid kernel metadata []"),
        (b"{}", "invalid kernel metadata {}"),
        (b'"x"', "not a filled JSON object"),
        (b"\xef\xbb\xbf{}", "BOM at byte 0"),
        ('{"name": "x"}'.encode("utf-16"), "not UTF-8 at byte 0"),
        (b'{"name": "\xff"}', "not UTF-8 at byte 10"),
        (b'{"version": 1} x', "Extra data at 1:16"),
        (b'{"version": 1}\n{"version": 2}', "Extra data at 2:1"),
        (b'{\n  // comment\n  "version": 1}', "at 2:3"),
        (b"{'version': 1}", "at 1:2"),
        (b'{"version": 1', "at 1:14"),
        (b'{"name": "a", "name": "b"}', "duplicate key 'name'"),
        (b'{"id": "a", "id": "b"}', "duplicate key 'id'"),
        (b'{"digest": 1, "digest": 1}', "duplicate key 'digest'"),
        (b'{"x": {"y": [{"z": 1, "z": 1}]}}', "duplicate key 'z'"),
        (b'{"%s": 1, "%s": 2}' % (b"k" * 1000, b"k" * 1000), "duplicate key 'kkkk"),
        (b'{"name": "\\ud800"}', "lone surrogate at 1:11"),
        (b'{\n"name": "\\ud83d\\ude00",\n"id": "\\\\ud800 \\ude00"}', "lone surrogate at 3:16"),
        (b'{"\\udfff": 1}', "lone surrogate at 1:3"),
        pytest.param(b"[" * 200_000 + b"]" * 200_000, "nested deeper than 32 levels", id="200000 arrays"),
        pytest.param(b'{"x":' * 130 + b"1" + b"}" * 130, "nested deeper than 32 levels", id="130 levels"),
        pytest.param(b'{"x": "' + b" " * MAX_BYTES + b'"}', f"more than {MAX_BYTES}", id="a megabyte"),
    ],
)
def test_what_is_no_plain_json_is_refused_with_its_place(data: bytes, words: str) -> None:
    assert words in refusal(data)


def test_brackets_in_a_string_are_no_nesting() -> None:
    assert parse(license="[" * 100 + '\\"{').license == "[" * 100 + '\\"{'


def test_a_string_that_never_ends_costs_no_more_than_its_length() -> None:
    """Each escaped quote used to start a new search to the end of the text: a megabyte took hours."""
    assert "Unterminated string" in refusal(b'{"x": "' + b'\\"' * 400_000)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("NaN", "NaN is not JSON"),
        ("Infinity", "Infinity is not JSON"),
        ("-Infinity", "-Infinity is not JSON"),
        ("1e400", "metadata inf "),
        ("1.0", "metadata 1.0 "),
        ("1e0", "metadata 1.0 "),
        ("-1", "metadata -1 "),
        ("-0", "metadata Decimal('-0') "),
        ("true", "metadata True "),
        ('"1"', "metadata '1' "),
        (str(2**64), f"metadata {2**64} "),
        (str(2**63), f"metadata {2**63} "),
        ("1000000", "metadata 1000000 "),
        pytest.param("1" + "0" * 4400, "metadata Decimal('1000", id="4401 digits"),
    ],
)
def test_a_version_is_a_plain_small_integer(value: str, words: str) -> None:
    message = refusal(raw("version", value))
    assert words in message
    assert "is not JSON" in message or "key 'version'; expected an integer from 0 to 999999" in message


@pytest.mark.parametrize(("value", "version"), [("0", 0), ("7", 7), ("999999", 999999)])
def test_a_version_in_range_is_read(value: str, version: int) -> None:
    assert Metadata.parse(raw("version", value)).version == version


@pytest.mark.parametrize("key", ["name", "id", "version"])
def test_a_build_with_a_digest_has_to_say_what_it_is(key: str) -> None:
    document = {name: value for name, value in FULL.items() if name != key}
    assert f"key '{key}' is missing" in refusal(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Probe", "metadata 'Probe'"),
        ("../x", "metadata '../x'"),
        ("ab\n", "metadata 'ab\\n'"),
        ("a", "metadata 'a'"),
        ("a--b", "metadata 'a--b'"),
        ("a" * 65, "key 'name'"),
        pytest.param("a" * 1_000_000, "(1000002 characters)", id="a million characters"),
        (5, "metadata 5"),
    ],
)
def test_a_name_follows_the_rule(name: Any, words: str) -> None:
    message = refusal_of(name=name)
    assert words in message
    assert "key 'name'; expected 2 to 64 lower-case letters, digits and dashes" in message


@pytest.mark.parametrize("name", ["ab", "flash-attn", "flash-attn3", "a.b_c", "relu2"])
def test_an_ordinary_name_is_accepted(name: str) -> None:
    assert parse(name=name).name == name


@pytest.mark.parametrize(
    "value", ["", "a\x00b", "a b", "../../etc/x", "\u00e9", "1abc", "a" * 5000, "a-b", "a.b", 5, ["a"]]
)
def test_an_id_is_an_identifier(value: Any) -> None:
    assert "key 'id' is not an identifier" in refusal_of(id=value)


@pytest.mark.parametrize("backend", [{"type": "cuda13"}, {"type": ["cuda"]}, {"type": None}, {}, "cuda", [], None])
def test_an_unknown_backend_is_refused(backend: Any) -> None:
    assert "key 'backend.type'; expected one of cann, cpu, cuda, metal" in refusal_of(backend=backend)


@pytest.mark.parametrize(
    ("archs", "key"), [("9.0", "'archs'"), ([9.0], "archs"), ([""], "archs"), (["x" * 65], "archs")]
)
def test_architectures_are_a_list_of_names(archs: Any, key: str) -> None:
    assert key in refusal_of(backend={"type": "cuda", "archs": archs})


@pytest.mark.parametrize("digest", [None, "absent"])
def test_a_missing_digest_is_an_unverified_build(digest: str | None) -> None:
    document = {name: value for name, value in FULL.items() if name != "digest"} | ({} if digest else {"digest": None})
    assert Metadata.parse(json.dumps(document).encode()).digest is None


def test_an_empty_digest_is_read_and_left_to_the_comparison_with_the_files() -> None:
    assert parse(digest={"algorithm": "sha256", "files": {}}).digest == Digest("sha256", {})


@pytest.mark.parametrize(
    "digest",
    [
        [],
        "sha256",
        {},
        {"algorithm": "md5", "files": {}},
        {"algorithm": [], "files": {}},
        {"algorithm": {}, "files": {}},
        {"algorithm": None, "files": {}},
    ],
)
def test_an_unknown_hash_is_refused(digest: Any) -> None:
    assert "key 'digest.algorithm'; expected one of sha256, sha512" in refusal_of(digest=digest)


TOO_MANY = {f"f{number}": HASH for number in range(10_001)}


@pytest.mark.parametrize("files", [None, [], "x", TOO_MANY])
def test_the_files_of_a_digest_are_an_object_of_bounded_size(files: Any) -> None:
    assert "key 'digest.files'" in refusal_of(digest={"algorithm": "sha256", "files": files})


@pytest.mark.parametrize(
    "value",
    [
        hashlib.sha256(b"").hexdigest(),
        "!" + HASH[1:],
        HASH[:-1],
        HASH + "=",
        HASH + "\n",
        HASH[:-2] + "V=",  # the same bytes with another padding
        base64.b64encode(hashlib.sha512(b"").digest()).decode(),
        "\u00e9" * 44,
        "",
        None,
        5,
    ],
)
def test_a_hash_is_canonical_base64_of_its_length(value: Any) -> None:
    message = refusal_of(digest={"algorithm": "sha256", "files": {"a.py": value}})
    assert "digest of 'a.py'; expected canonical base64 of 32 bytes" in message


def test_sha512_is_read() -> None:
    value = base64.b64encode(hashlib.sha512(b"x").digest()).decode()
    digest = parse(digest={"algorithm": "sha512", "files": {"a.py": value}}).digest
    assert digest == Digest("sha512", {"a.py": hashlib.sha512(b"x").digest()})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/a.py", "segment ''"),
        ("../x.py", "segment '..'"),
        ("a\\b.py", "backslash"),
        ("./a.py", "segment '.'"),
        ("a//b.py", "segment ''"),
        ("metadata.json", "lists the metadata itself"),
        ("metadata.json.sigstore", "lists the metadata itself"),
        ("x.pyc", "Python bytecode"),
        ("__pycache__/x", "Python bytecode"),
        ("A.py", "same name as 'a.py' but for letter case"),
        ("a.py/b", "a file and a folder of one name"),
    ],
)
def test_a_digest_lists_paths_by_the_one_rule(path: str, words: str) -> None:
    assert words in refusal_of(digest={"algorithm": "sha256", "files": {"a.py": HASH, path: HASH}})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"einops": 1}, "key 'python-depends' is a dict; expected a list"),
        ("einops", "key 'python-depends' is a str; expected a list"),
        ([5], "entry of 'python-depends'"),
        (["Evil Pkg"], "metadata 'Evil Pkg'"),
        (["evil-pkg==1; import os"], "metadata 'evil-pkg==1; import os'"),
        (["x" * 65], "entry of 'python-depends'"),
    ],
)
def test_python_dependencies_are_a_list_of_names(value: Any, words: str) -> None:
    """REF huggingface/kernels#182, #194, #364. Which of them are known is the loader's to say."""
    assert words in refusal_of(**{"python-depends": value})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"repo-id": "a/b"}, "entry of 'kernel-depends'"),
        ({"repo-id": "a/b", "version": 1, "revision": "main"}, "entry of 'kernel-depends'"),
        ({"repo-id": "a/b", "version": 1, "trust": True}, "entry of 'kernel-depends'"),
        ({"version": 1}, "entry of 'kernel-depends'"),
        ("a/b", "entry of 'kernel-depends'"),
        ({"repo-id": "a/b", "version": True}, "version out of range"),
        ({"repo-id": "a/b", "revision": 5}, "a revision is text, not a int"),
        ({"repo-id": "a/b", "revision": None}, "a revision is text, not a NoneType"),
        ({"repo-id": "a/b", "revision": ""}, "empty revision"),
        ({"repo-id": "../b", "version": 1}, "segment '..'"),
        ({"repo-id": "/etc/passwd", "version": 1}, "segment ''"),
        ({"repo-id": 5, "version": 1}, "a int, not a string"),
    ],
)
def test_a_kernel_dependency_names_a_repository_and_one_version(value: Any, words: str) -> None:
    assert words in refusal_of(**{"kernel-depends": [value]})


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("javascript:alert(1)", "scheme 'javascript' of 'upstream'"),
        ("JavaScript:alert(1)", "scheme 'javascript'"),
        ("file:///etc/passwd", "scheme 'file'"),
        ("http://[", "key 'upstream'"),
        (5, "key 'upstream' is a int"),
    ],
)
def test_an_upstream_that_is_no_web_address_is_refused(value: Any, words: str) -> None:
    assert words in refusal_of(upstream=value)


@pytest.mark.parametrize("value", ["https://github.com/x/y.git", "git@github.com:x/y.git", "github.com/x", ""])
def test_an_upstream_may_be_written_as_git_writes_it(value: str) -> None:
    assert parse(upstream=value).upstream == value


@pytest.mark.parametrize("license_", [None, ""])
def test_a_missing_license_is_noted(license_: str | None) -> None:
    assert parse(license=license_).notes == ("the kernel states no license",)


@pytest.mark.parametrize("value", ["abc", "", "9" * 5000, 1, ["1.0"]])
def test_an_unreadable_minimum_version_is_refused_by_its_name(value: Any) -> None:
    assert "'kernels-minver'" in refusal_of(**{"kernels-minver": value})


def test_a_minimum_version_of_the_other_loader_is_kept_and_not_compared() -> None:
    assert parse(**{"kernels-minver": "99.0"}).kernels_minver == "99.0"


@pytest.mark.parametrize("key", ["license", "provenance"])
def test_a_key_of_another_type_is_refused(key: str) -> None:
    assert f"key '{key}' is a list" in refusal_of(**{key: []})


def test_a_sealed_build_reads_back() -> None:
    files = {"__init__.py": b"x = 1\n", "parts/a.py": b""}
    metadata = Metadata.parse(seal(files, {key: FULL[key] for key in ("name", "id", "version", "backend", "license")}))
    assert metadata.digest is not None
    assert metadata.digest.files == {path: hashlib.sha256(body).digest() for path, body in files.items()}
    with pytest.raises(InvalidPath):
        seal({"../x": b""}, {})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@given(
    st.dictionaries(st.sampled_from([*FULL, "python-depends", "kernel-depends", "upstream", "kernels-minver"]), JSON)
)
def test_any_document_is_read_or_refused(changes: dict[str, Any]) -> None:
    with contextlib.suppress(InvalidMetadata):
        Metadata.parse(json.dumps(FULL | changes).encode())


@given(st.binary() | st.text('{}[]",:\\u0d8 \n-1eE.truefalsn').map(str.encode))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with contextlib.suppress(InvalidMetadata):
        Metadata.parse(data)
