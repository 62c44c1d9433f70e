"""Signed builds through a whole load: whom the policy expects, what was asked for, and what was seen before."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

import pytest
import torch
from authority import ISSUER, NOW, SIGNER, Authority
from kernel_repository import trust, write_build

import kernelhub
from kernelhub.errors import BadSignature, DigestMismatch, OlderBuild, UnsignedKernel
from kernelhub.index import ContentHash, ListedFile
from kernelhub.loader import loaded_kernels
from kernelhub.manifest import Manifest, StoredFile
from kernelhub.request import KernelRequest
from kernelhub.revision import Revision
from kernelhub.serve import LocalHub
from kernelhub.signer import MAX_BYTES
from kernelhub.verify import hash_file, verify_listed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.session import Session
    from kernelhub.verify import VerifiedBuild

AUTHORITY = Authority()
BODY = {"__init__.py": "answer = 1\n"}
LATER = NOW + timedelta(days=1)
DAY = 24 * 3600.0

POLICY = f"""
[signatures]
acme = "RULE"

[identities.acme]
issuer = "{ISSUER}"
signers = ["{SIGNER}"]
"""


@pytest.fixture
def root_file(tmp_path: Path) -> Path:
    """The trust root, refreshed just now."""
    return write_root(tmp_path / "trust-root.json", AUTHORITY, 0)


def write_root(path: Path, authority: Authority, days: float) -> Path:
    moment = datetime.fromtimestamp(time.time() - days * DAY, NOW.tzinfo).strftime("%Y-%m-%dT%H:%M:%SZ")
    path.write_text(json.dumps({"schema": 1, "time": moment, "source": "test", "trusted_root": authority.root}))
    return path


@pytest.fixture
def under(
    session: Session, root_file: Path, hub_root: Path, tmp_path: Path, forget_kernels: Callable[[], None]
) -> Callable[..., Session]:
    """A session under a policy that looks at the signatures of acme: ``under("require")``."""
    trust(hub_root, "acme")

    def change(rule: str = "require", more: str = "", *, whole: str = "", **options: Any) -> Session:
        forget_kernels()
        path = tmp_path / "kernelhub.toml"
        path.write_text(whole or POLICY.replace("RULE", rule) + (more or f'[trust_root]\nfile = "{root_file}"\n'))
        return replace(session, policy_file=path, **options)

    return change


def write_signed(
    hub_root: Path, repo_id: str = "acme/relu", branch: str = "v1", variant: str = "torch-cpu", **how: Any
) -> Path:
    """A signed build; ``time`` and other keywords of the authority say how, the rest is for the build."""
    ours = {key: how.pop(key) for key in ("time", "signer", "issuer", "logged") if key in how}
    files = how.pop("files", BODY)
    authority = how.pop("authority", AUTHORITY)
    build = write_build(hub_root, repo_id, branch, variant, files, **how)
    (build / "metadata.json.sigstore").write_bytes(authority.sign((build / "metadata.json").read_bytes(), **ours))
    return build


def obtain(session: Session, request: str = "acme/relu") -> VerifiedBuild:
    return session.obtain(session.resolve(KernelRequest.parse(request), trust=True))


@pytest.fixture
def no_verifier(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Takes sigstore away, as if the extra were not installed: what loads then was not verified again."""

    def block() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "sigstore"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "sigstore", None)

    return block


# Signed or not


@pytest.mark.parametrize("rule", ["require", "warn"])
def test_s_24_a_signed_build_is_loaded_and_says_so(
    under: Callable[..., Session], hub_root: Path, rule: str, reporter: Recorder
) -> None:
    write_signed(hub_root)
    module = kernelhub.load_kernel("acme/relu", session=under(rule))
    assert module.answer == 1
    assert [kernel.state for kernel in loaded_kernels() if kernel.module is module] == ["signed"]
    assert not [warning for warning in reporter.warnings if "license" not in warning]


def test_s_24_a_build_without_a_signature_is_refused_told_or_not_looked_at(
    under: Callable[..., Session], hub_root: Path, reporter: Recorder
) -> None:
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", BODY)
    with pytest.raises(UnsignedKernel, match=r"is self-attested, but a signature .* is required: it carries no sig"):
        obtain(under("require"))
    assert obtain(under("warn")).state.value == "self-attested"
    assert [text for text in reporter.warnings if "not signed: it carries no signature" in text]
    reporter.warnings.clear()
    assert obtain(under("off")).state.value == "self-attested"
    assert not [text for text in reporter.warnings if "sign" in text]


def test_a_signature_is_not_looked_at_where_signatures_are_off(
    under: Callable[..., Session], hub_root: Path, no_verifier: Callable[[], None]
) -> None:
    write_signed(hub_root, signer=SIGNER.replace("acme", "evil"))
    no_verifier()
    assert obtain(under("off")).state.value == "self-attested"


@pytest.mark.parametrize("rule", ["require", "warn"])
@pytest.mark.parametrize(
    "how",
    [
        {"signer": SIGNER.replace("acme", "evil")},
        {"issuer": "https://accounts.evil.test"},
        {"logged": NOW + timedelta(hours=1)},
        {"authority": Authority()},
    ],
    ids=["signer", "issuer", "expired", "authority"],
)
def test_a_bad_signature_is_refused_also_where_a_missing_one_is_only_told(
    under: Callable[..., Session], hub_root: Path, rule: str, how: dict[str, Any], imported: Callable[[], list[str]]
) -> None:
    write_signed(hub_root, **how)
    with pytest.raises(BadSignature, match=r"acme/relu@[0-9a-f]{12} torch-cpu: its signature is refused"):
        kernelhub.load_kernel("acme/relu", session=under(rule))
    assert not imported()


@pytest.mark.parametrize("damage", ["truncated", "oversized", "empty", "other"])
def test_a_damaged_bundle_is_refused(under: Callable[..., Session], hub_root: Path, damage: str) -> None:
    bundle = write_signed(hub_root) / "metadata.json.sigstore"
    data = bundle.read_bytes()
    other = write_signed(hub_root, "acme/gelu") / "metadata.json.sigstore"
    damaged = {"truncated": data[:-20], "oversized": data + b" " * MAX_BYTES, "empty": b"", "other": other.read_bytes()}
    bundle.write_bytes(damaged[damage])
    with pytest.raises(BadSignature):
        obtain(under())


def test_metadata_that_was_changed_after_it_was_signed_is_refused(
    under: Callable[..., Session], hub_root: Path
) -> None:
    build = write_signed(hub_root)
    bundle = (build / "metadata.json.sigstore").read_bytes()
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", {"__init__.py": "answer = 2\n"})
    (build / "metadata.json.sigstore").write_bytes(bundle)
    with pytest.raises(BadSignature, match="mismatch"):
        obtain(under())


def test_a_signature_over_metadata_without_digests_says_nothing_of_the_files(
    under: Callable[..., Session], hub_root: Path
) -> None:
    write_signed(hub_root, digest=False)
    with pytest.raises(BadSignature, match="lists no digests"):
        obtain(under())


def test_kernels_depended_on_are_judged_each_by_its_own_publisher(
    under: Callable[..., Session], hub_root: Path
) -> None:
    write_build(hub_root, "acme/inner", "v1", "torch-cpu", BODY)
    depends = {"kernel-depends": [{"repo-id": "acme/inner", "version": 1}]}
    write_signed(hub_root, metadata_overrides=depends)
    trust(hub_root, "acme")
    with pytest.raises(UnsignedKernel, match="acme/inner"):
        obtain(under())


def test_r_45_a_bad_signature_is_never_a_reason_to_fall_back(under: Callable[..., Session], hub_root: Path) -> None:
    layers = {"__init__.py": "", "layers.py": "from torch import nn\nclass Norm(nn.Module):\n    pass\n"}
    write_signed(hub_root, files=layers, signer=SIGNER.replace("acme", "evil"))
    model = torch.nn.Sequential(torch.nn.RMSNorm(4))
    with pytest.raises(BadSignature):
        kernelhub.kernelize(model, {"RMSNorm": "acme/relu:Norm"}, session=under(), strict=False)


def test_a_publisher_of_whom_nobody_said_who_signs_is_not_judged(under: Callable[..., Session], hub_root: Path) -> None:
    write_signed(hub_root, "other/relu")
    with pytest.raises(UnsignedKernel, match=r"nothing says by whom: add \[identities.other\] to the policy"):
        obtain(under(whole='[signatures]\n"*" = "require"\n'), "other/relu")


def test_the_workflows_of_a_known_publisher_need_not_be_told(
    under: Callable[..., Session], hub_root: Path, root_file: Path
) -> None:
    name = "https://github.com/huggingface/kernels-community/.github/workflows/build.yaml@refs/heads/main"
    build = write_build(hub_root, "kernels-community/relu", "v1", "torch-cpu", BODY)
    source = name.partition("/.github")[0]
    bundle = AUTHORITY.sign((build / "metadata.json").read_bytes(), signer=name, source=source)
    (build / "metadata.json.sigstore").write_bytes(bundle)
    policy = f'[signatures]\n"*" = "require"\n[trust_root]\nfile = "{root_file}"\n'
    assert obtain(under(whole=policy), "kernels-community/relu").state.value == "signed"


def test_builds_read_in_place_have_no_publisher(under: Callable[..., Session], hub_root: Path) -> None:
    session = under(whole='[signatures]\n"*" = "require"\n[digests]\n"*" = "require"\n')
    assert obtain(session, "builtin:RMSNorm").state.value == "self-attested"
    folder = write_build(hub_root, "acme/relu", "v1", "torch-cpu", BODY, digest=False)
    assert obtain(session, str(folder)).state.value == "unverified"


def test_a_policy_may_require_digests(under: Callable[..., Session], hub_root: Path, reporter: Recorder) -> None:
    write_build(hub_root, "acme/relu", "v1", "torch-cpu", BODY, digest=False)
    with pytest.raises(UnsignedKernel, match="is unverified, but a digest of each file"):
        obtain(under("off", '[digests]\nacme = "require"\n'))
    assert obtain(under("off", '[digests]\nacme = "warn"\n"*" = "require"\n')).state.value == "unverified"
    assert [text for text in reporter.warnings if "unverified" in text]


# For what was asked


@pytest.mark.parametrize(
    ("request_", "how", "problem"),
    [
        ("acme/relu", {"name": "gelu"}, "for a kernel named 'gelu', not 'relu'"),
        ("acme/relu", {"version": 2}, "it is for version 2, not for v1"),
        ("acme/relu@>=1,<2", {"version": 2}, "it is for version 2, not for <2,>=1"),
        ("acme/relu@latest", {"version": 0}, "it is for version 0, not for latest"),
        ("acme/relu", {"backend": "cuda"}, r"it is for cuda, not for cpu \(torch-cpu\)"),
    ],
    ids=["name", "version", "range", "latest", "backend"],
)
def test_s_23_a_build_signed_for_something_else_is_refused(
    under: Callable[..., Session], hub_root: Path, request_: str, how: dict[str, Any], problem: str
) -> None:
    write_signed(hub_root, **how)
    session = under()
    for _ in range(2):  # also when the signature itself was found good before
        with pytest.raises(BadSignature, match=problem):
            obtain(session, request_)


def test_s_23_a_build_of_another_repository_is_refused(under: Callable[..., Session], hub_root: Path) -> None:
    """A mirror hands out one signed kernel under the name of another one."""
    write_signed(hub_root, "acme/gelu")
    shutil.copytree(hub_root / "acme/gelu", hub_root / "acme/relu")
    with pytest.raises(BadSignature, match="'gelu', not 'relu'"):
        obtain(under(), "acme/relu")


def test_a_kernel_may_have_another_name_than_its_repository_if_the_user_says_so(
    under: Callable[..., Session], hub_root: Path, root_file: Path
) -> None:
    write_signed(hub_root, "acme/relu-kernel", name="relu")
    names = f'[names]\n"acme/relu-kernel" = "relu"\n[trust_root]\nfile = "{root_file}"\n'
    with pytest.raises(BadSignature, match=r'under \[names\] in the policy: "acme/relu-kernel" = "relu"'):
        obtain(under(), "acme/relu-kernel")
    assert obtain(under("require", names), "acme/relu-kernel").state.value == "signed"


@pytest.mark.parametrize("repository", ["acme/flash-attn", "acme/Flash_Attn"])
def test_names_are_compared_as_the_hub_spells_them(
    under: Callable[..., Session], hub_root: Path, repository: str
) -> None:
    write_signed(hub_root, repository, name="flash-attn")
    assert obtain(under(), repository).state.value == "signed"


# Once a stored build


def test_a_stored_build_is_verified_once(
    under: Callable[..., Session], hub_root: Path, no_verifier: Callable[[], None]
) -> None:
    write_signed(hub_root)
    obtain(under())
    no_verifier()
    assert obtain(under()).state.value == "signed"
    assert obtain(under(offline=True)).state.value == "signed"
    write_signed(hub_root, branch="v2", version=2)
    with pytest.raises(UnsignedKernel, match=r"run `pip install 'kernelhub\[sign\]'`"):
        obtain(under(), "acme/relu@v2")


@pytest.mark.parametrize("change", ["identity", "root", "kept", "copied"])
def test_what_was_found_is_found_again_when_anything_about_it_changed(
    under: Callable[..., Session],
    hub_root: Path,
    root_file: Path,
    tmp_path: Path,
    no_verifier: Callable[[], None],
    change: str,
) -> None:
    write_signed(hub_root)
    session = under()
    obtain(session)
    if change == "identity":
        policy = tmp_path / "kernelhub.toml"
        policy.write_text(policy.read_text().replace('signers = ["', 'signers = ["someone@acme.test", "'))
    elif change == "root":
        root = json.loads(root_file.read_text())
        root["trusted_root"]["tlogs"].append(Authority().root["tlogs"][0])
        root_file.write_text(json.dumps(root))
    elif change == "kept":
        next((tmp_path / "store").rglob("signature.json")).write_text("{")
    else:
        shutil.copytree(tmp_path / "store", tmp_path / "copy")
        session = replace(session, cache_dir=tmp_path / "copy")
    no_verifier()
    with pytest.raises(UnsignedKernel, match="pip install"):
        obtain(replace(session))


def test_s_18_a_shared_store_claims_nothing(
    under: Callable[..., Session], hub_root: Path, tmp_path: Path, no_verifier: Callable[[], None]
) -> None:
    write_signed(hub_root)
    session = under(shared_cache=True)
    assert obtain(session).state.value == "signed"
    assert not list((tmp_path / "store").rglob("signature.json"))
    assert obtain(replace(session)).state.value == "signed"
    no_verifier()
    with pytest.raises(UnsignedKernel, match="pip install"):
        obtain(replace(session))


def test_a_manifest_that_was_rewritten_is_no_match_for_the_signed_digests(
    under: Callable[..., Session], hub_root: Path, tmp_path: Path
) -> None:
    """In a shared store somebody changes a file and, to match, what the store says of it."""
    write_signed(hub_root)
    session = under(shared_cache=True)
    obtain(session)
    [manifest] = (tmp_path / "store").rglob("manifest.json")
    evil = b"answer = 2\n"
    facts = json.loads(manifest.read_text())
    for file in facts["files"]:
        if file["path"] == "__init__.py":
            file["sha256"] = hashlib.sha256(evil).hexdigest()
    for path, data in ((manifest, json.dumps(facts).encode()), (manifest.parent / "files/__init__.py", evil)):
        path.chmod(0o644)
        path.write_bytes(data)
    with pytest.raises(DigestMismatch, match=r"does not match the sha256 in metadata\.json"):
        obtain(replace(session, offline=True))


# Never back


def test_s_23_a_build_signed_earlier_than_one_that_was_seen_is_refused(
    under: Callable[..., Session], hub_root: Path, monkeypatch: pytest.MonkeyPatch, reporter: Recorder, root_file: Path
) -> None:
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.000001")
    write_signed(hub_root)
    obtain(under())
    write_signed(hub_root, files={"__init__.py": "answer = 2\n"}, time=LATER)
    obtain(under())
    write_signed(hub_root)  # the Hub, or a mirror, goes back
    problem = "signed 2026-03-01 12:00:05 UTC, but one signed 2026-03-02 12:00:05 UTC was seen"
    for offline in (False, True):
        with pytest.raises(OlderBuild, match=problem):
            obtain(under(offline=offline))
    found = under().resolve(KernelRequest.parse("acme/relu"))
    for name in (found.commit, found.commit[:9]):
        asked = replace(found.request, revision=Revision.parse(name))
        assert under().obtain(replace(found, request=asked)).state.value == "signed"
    assert obtain(under(allow_older=True)).state.value == "signed"
    for name in ("acme", "acme/relu"):
        more = f'[older]\nallow = ["{name}"]\n[trust_root]\nfile = "{root_file}"\n'
        assert obtain(under("require", more)).state.value == "signed"
    assert len([text for text in reporter.warnings if "is older than before" in text]) == 3
    monkeypatch.setenv("KERNELHUB_ALLOW_OLDER", "1")
    assert obtain(under()).state.value == "signed"


def test_s_23_a_range_never_gives_a_lower_version_than_before(
    under: Callable[..., Session], hub_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KERNELHUB_FRESH_SECONDS", "0.000001")
    write_signed(hub_root)
    write_signed(hub_root, branch="v2", version=2)
    assert obtain(under(), "acme/relu@>=1")
    shutil.rmtree(hub_root / "acme/relu/v2")
    with pytest.raises(OlderBuild, match="version 1, but version 2 was seen"):
        obtain(under(), "acme/relu@latest")
    assert obtain(under(), "acme/relu@v1")  # asked for by name
    assert obtain(under(), "acme/relu@<2")  # the one that was seen is not in this range


def test_what_one_hub_gave_is_no_measure_for_another(
    under: Callable[..., Session], hub_root: Path, tmp_path: Path
) -> None:
    write_signed(hub_root, time=LATER)
    obtain(under())
    other = tmp_path / "other"
    trust(other, "acme")
    write_signed(other)
    with LocalHub(other) as hub:
        assert obtain(under(endpoint=hub.url)).state.value == "signed"


def test_variants_and_branches_are_compared_with_themselves_only(under: Callable[..., Session], hub_root: Path) -> None:
    write_signed(hub_root, time=LATER)
    write_signed(hub_root, branch="main")
    assert obtain(under())
    assert obtain(under(), "acme/relu@main").state.value == "signed"


# The trust root


def test_s_24_an_old_trust_root_is_told_and_a_very_old_one_proves_nothing(
    under: Callable[..., Session], hub_root: Path, root_file: Path, reporter: Recorder
) -> None:
    write_signed(hub_root)
    write_root(root_file, AUTHORITY, 6)
    assert obtain(under()).state.value == "signed"
    assert not [text for text in reporter.warnings if "trust root" in text]
    write_root(root_file, AUTHORITY, 8)
    assert obtain(under()).state.value == "signed"
    assert [text for text in reporter.warnings if "8 days old" in text and "run `kernelhub trust-root refresh`" in text]
    write_root(root_file, AUTHORITY, 91)
    with pytest.raises(UnsignedKernel, match="older than 90 days: run `kernelhub trust-root refresh`"):
        obtain(under())
    assert obtain(under("warn")).state.value == "self-attested"
    more = f'[trust_root]\nfile = "{root_file}"\nwarn_days = 365\nfail_days = 1000\n'
    reporter.warnings.clear()
    assert obtain(under("require", more)).state.value == "signed"
    assert not [text for text in reporter.warnings if "trust root" in text]


@pytest.mark.parametrize("text", ["", "{}", '{"mediaType": "application/vnd.dev.sigstore.trustedroot+json"}'])
def test_a_trust_root_that_cannot_be_read_proves_nothing(
    under: Callable[..., Session], hub_root: Path, root_file: Path, text: str
) -> None:
    write_signed(hub_root)
    root_file.write_text(text)
    with pytest.raises(UnsignedKernel, match="trust root"):
        obtain(under())


# Locked


def test_states_say_whether_a_lock_lists_the_files(
    under: Callable[..., Session], hub_root: Path, tmp_path: Path, no_verifier: Callable[[], None]
) -> None:
    write_signed(hub_root)
    lock = under().make_lock([KernelRequest.parse("acme/relu@v1")])
    lock.write(tmp_path / "kernelhub.lock")
    locked = {"lockfile": tmp_path / "kernelhub.lock"}
    assert obtain(under("off", **locked), "acme/relu@v1").state.value == "locked"
    assert obtain(under("require", **locked), "acme/relu@v1").state.value == "locked+signed"
    no_verifier()
    assert obtain(under("require", **locked), "acme/relu@v1").state.value == "locked+signed"


@pytest.mark.parametrize("change", [{}, {"size": 5}, {"hash": ContentHash("sha256", "0" * 64)}, {"path": "other.py"}])
def test_every_file_that_a_lock_lists_is_compared(
    under: Callable[..., Session], hub_root: Path, change: dict[str, Any]
) -> None:
    write_signed(hub_root)
    session = under("off")
    commit = obtain(session).kernel.partition("@")[2]
    [stored] = [build for build in session.store.builds() if build.manifest.commit.startswith(commit)]
    listed = [ListedFile(file.path, file.size, ContentHash("sha256", file.sha256)) for file in stored.manifest.files]
    listed[0] = listed[0]._replace(**change)
    if not change:
        verify_listed(stored, "acme/relu", tuple(listed))
        return
    with pytest.raises(
        DigestMismatch, match="is missing" if "path" in change else "is not the one that the lock lists"
    ):
        verify_listed(stored, "acme/relu", tuple(listed))


def test_a_lock_of_the_peer_lists_no_files(under: Callable[..., Session], hub_root: Path, tmp_path: Path) -> None:
    write_signed(hub_root)
    commit = under().resolve(KernelRequest.parse("acme/relu@v1")).commit
    entry = {"dependency": {"repo-id": "acme/relu", "version": 1}, "lock": {"commit": commit}}
    (tmp_path / "kernels.lock").write_text(json.dumps([entry]))
    assert obtain(under("off", lockfile=tmp_path / "kernels.lock"), "acme/relu@v1").state.value == "self-attested"


def test_a_lock_counts_for_a_build_that_was_stored_without_it(
    under: Callable[..., Session], hub_root: Path, tmp_path: Path, reporter: Recorder
) -> None:
    """The store has other bytes at the locked commit: they go, and what the lock lists is fetched."""
    build = write_build(hub_root, "acme/relu", "v1", "torch-cpu", BODY)
    session = under("off")
    lock = session.make_lock([KernelRequest.parse("acme/relu@v1")])
    [kernel] = lock.kernels
    lock.write(tmp_path / "kernelhub.lock")
    stored = session.store.find("acme/relu", kernel.commit, "torch-cpu")
    assert stored is None
    with session.store.staging() as staged:
        shutil.copytree(build, staged / "files")
        (staged / "files/__init__.py").write_text("answer = 2\n")
        paths = ("__init__.py", "metadata.json")
        files = [(path, staged / "files" / path) for path in paths]
        listed = tuple(StoredFile(path, file.stat().st_size, hash_file(file)) for path, file in files)
        session.store.publish(staged, Manifest("acme/relu", kernel.commit, "torch-cpu", session.store.endpoint, listed))
    found = obtain(under("off", lockfile=tmp_path / "kernelhub.lock"), "acme/relu@v1")
    assert (found.folder / "__init__.py").read_text() == "answer = 1\n"
    assert found.state.value == "locked"
    assert [text for text in reporter.warnings if "'__init__.py' is not the one that the lock lists" in text]
