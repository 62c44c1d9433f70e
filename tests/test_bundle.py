"""Bundles: the same bytes for the same builds, installed whole or not at all, and hostile ones refused."""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import stat
import tarfile
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build

from kernelhub import load_kernel
from kernelhub.archive import ArchiveReader, ArchiveWriter
from kernelhub.bundle import CONTENTS, Bundle, BundledBuild, create, inspect, install
from kernelhub.environment import Environment
from kernelhub.errors import (
    CacheError,
    CacheFullError,
    DigestMismatch,
    InvalidBundle,
    InvalidMetadata,
    KernelHubError,
    NotCached,
    PinMismatch,
    UnsignedKernel,
    UntrustedPublisher,
)
from kernelhub.index import Refs
from kernelhub.lockfile import LOCK_NAME, Lock
from kernelhub.prefetch import plan_prefetch
from kernelhub.request import KernelRequest
from kernelhub.store import StoredFile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Recorder

    from kernelhub.serve import LocalHub
    from kernelhub.session import Session

H100 = Environment.parse("h100")
CUDA = "torch213-cxx11-cu130-x86_64-linux"
REPOSITORIES = ["org/kernel", "org/base"]
COMMIT = "c" * 40


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "org")
    needs = {"kernel-depends": [{"repo-id": "org/base", "version": 2}]}
    for variant in ("torch-cpu", CUDA):
        files = {"__init__.py": f"BUILD = {variant!r}\n", "shared.py": "SHARED = 1\n", "sub/empty.py": ""}
        write_build(hub_root, "org/kernel", "v1", variant, files, metadata_overrides=needs)
        write_build(hub_root, "org/base", "v2", variant, files)
    return hub_root


@pytest.fixture
def make(root: Path, session: Session, tmp_path: Path) -> Callable[..., Path]:
    """Prefetches and writes a bundle."""

    def made(
        *requests: str,
        lock: Lock | None = None,
        name: str = "kernels.tar.gz",
        session: Session = session,
        **options: Any,
    ) -> Path:
        wanted = [KernelRequest.parse(text) for text in requests or ("org/kernel@v1",)]
        plan = plan_prefetch(wanted, session, **options)
        report = plan.run()
        assert not report.failures, str(report)
        create(plan.resolutions, session, tmp_path / name, lock)
        return tmp_path / name

    return made


@pytest.fixture
def island(session: Session, tmp_path: Path) -> Session:
    """A machine that has never seen the Hub."""
    return replace(session, cache_dir=tmp_path / "island", offline=True)


# There and back


def test_the_same_builds_give_the_same_bytes(make: Callable[..., Path], session: Session, tmp_path: Path) -> None:
    first = make(all_variants=True, name="first.tar.gz")
    second = make("org/base@v2", "org/kernel@v1", all_variants=True, name="second.tar.gz")
    assert first.read_bytes() == second.read_bytes()
    again = replace(session, cache_dir=tmp_path / "other")
    plan = plan_prefetch([KernelRequest.parse("org/kernel@v1")], again, all_variants=True)
    plan.run()
    os.utime(tmp_path)
    create(plan.resolutions, again, tmp_path / "third.tar.gz")
    assert (tmp_path / "third.tar.gz").read_bytes() == first.read_bytes()


def test_any_tar_reads_a_bundle_and_each_content_is_in_it_once(make: Callable[..., Path]) -> None:
    path = make(all_variants=True)
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    assert [member.name for member in members[:2]] == [CONTENTS, LOCK_NAME]
    assert {(member.mtime, member.uid, member.gid, member.uname, member.mode) for member in members} == {
        (0, 0, 0, "", 0o444)
    }
    names = [member.name for member in members[2:]]
    assert names == sorted(set(names))
    listed = [file for build in inspect(path).builds for file in build.files]
    assert len(listed) > len(names)


def test_inspecting_lists_everything_and_writes_nothing(make: Callable[..., Path], tmp_path: Path) -> None:
    path = make(targets=[H100])
    before = sorted(tmp_path.rglob("*"))
    told = str(inspect(path))
    assert sorted(tmp_path.rglob("*")) == before
    assert f"{CUDA}  4 files" in told
    assert "locked    org/kernel@v1 at " in told
    assert json.loads(json.dumps(inspect(path).to_dict()))["locked"]


@pytest.mark.parametrize("request_", ["org/kernel", "org/kernel@v1", "org/kernel@>=1", "org/kernel@latest", "COMMIT"])
def test_installed_builds_load_offline(
    request_: str, make: Callable[..., Path], island: Session, hub: LocalHub
) -> None:
    bundle, installed = install(make(), island, trust=REPOSITORIES)
    assert [row.is_new for row in installed] == [True, True]
    hub.clear()
    commit = next(build.commit for build in bundle.builds if build.repo_id == "org/kernel")
    request = f"org/kernel@{commit}" if request_ == "COMMIT" else request_
    assert load_kernel(request, session=island, trust_remote_code=REPOSITORIES).BUILD == "torch-cpu"
    assert hub.requests == []


def test_installed_builds_follow_the_lock_of_the_bundle(
    make: Callable[..., Path], island: Session, tmp_path: Path
) -> None:
    bundle, _ = install(make(), island, trust=REPOSITORIES)
    assert bundle.lock is not None
    bundle.lock.write(tmp_path / "kernelhub.lock")
    locked = replace(island, lockfile=tmp_path / "kernelhub.lock")
    assert load_kernel("org/kernel@v1", session=locked, trust_remote_code=REPOSITORIES).BUILD == "torch-cpu"


def test_a_bundle_made_under_a_lock_holds_that_lock(
    make: Callable[..., Path], session: Session, island: Session, tmp_path: Path
) -> None:
    lock = session.make_lock([KernelRequest.parse("org/kernel@v1")])
    lock.write(tmp_path / "kernelhub.lock")
    session.lockfile = tmp_path / "kernelhub.lock"
    bundle, _ = install(make(lock=lock), island, trust=REPOSITORIES)
    assert bundle.lock == lock
    assert load_kernel("org/kernel@v1", session=island, trust_remote_code=REPOSITORIES).BUILD == "torch-cpu"


def test_two_versions_of_one_kernel_go_into_a_bundle_without_a_lock(
    root: Path, make: Callable[..., Path], island: Session
) -> None:
    write_build(root, "org/kernel", "v2", "torch-cpu", {"__init__.py": "BUILD = 2\n"})
    bundle, _ = install(make("org/kernel@v1", "org/kernel@v2"), island, trust=REPOSITORIES)
    assert bundle.lock is None
    assert load_kernel("org/kernel@v2", session=island, trust_remote_code=REPOSITORIES).BUILD == 2


def test_another_machine_finds_the_builds_for_it(make: Callable[..., Path], island: Session) -> None:
    install(make(targets=[H100]), island, trust=REPOSITORIES)
    there = replace(island, environment=H100)
    found = there.resolve(KernelRequest.parse("org/kernel@v1"), trust=REPOSITORIES)
    assert there.obtain(found).dependencies[0].variant == CUDA


def test_installing_twice_changes_nothing(make: Callable[..., Path], island: Session) -> None:
    path = make()
    install(path, island, trust=REPOSITORIES)
    _, installed = install(path, island, trust=REPOSITORIES)
    assert [(row.is_new, row.verification) for row in installed] == [(False, "stored already")] * 2
    assert list((island.store.root / "tmp").iterdir()) == []


def test_a_newer_bundle_moves_a_branch_and_says_so(
    root: Path, make: Callable[..., Path], session: Session, island: Session, reporter: Recorder, tmp_path: Path
) -> None:
    install(make("org/base@v2"), island, trust=REPOSITORIES)
    for variant in ("torch-cpu", CUDA):
        (root / "org" / "base" / "v2" / "build" / variant / "sub" / "empty.py").unlink()
        write_build(root, "org/base", "v2", variant, {"__init__.py": "BUILD = 'new'\n", "shared.py": ""})
    newer = make("org/base@v2", name="new.tar.gz", session=replace(session, cache_dir=tmp_path / "fresh"))
    install(newer, island, trust=REPOSITORIES)
    assert any("org/base: branch v2 moves from " in text for text in reporter.warnings)
    assert load_kernel("org/base@v2", session=island, trust_remote_code=REPOSITORIES).BUILD == "new"


def test_only_what_was_prefetched_can_be_bundled(root: Path, session: Session, tmp_path: Path) -> None:
    plan = plan_prefetch([KernelRequest.parse("org/kernel@v1")], session)
    with pytest.raises(InvalidBundle, match="is not in the store"):
        create(plan.resolutions, session, tmp_path / "kernels.tar.gz")
    with pytest.raises(InvalidBundle, match="is on this machine"):
        create([session.resolve(KernelRequest.parse("builtin"))], session, tmp_path / "kernels.tar.gz")
    assert not list(tmp_path.glob("*kernels.tar.gz*"))


def test_a_stored_file_that_changed_is_not_bundled(make: Callable[..., Path], session: Session, tmp_path: Path) -> None:
    path = make()
    for build in session.store.builds():
        file = build.files_folder / "__init__.py"
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[::-1])
    plan = plan_prefetch([KernelRequest.parse("org/kernel@v1")], session)
    before = path.read_bytes()
    with pytest.raises(DigestMismatch):
        create(plan.resolutions, session, path)
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".kernels*"))


def test_a_bundle_that_cannot_be_written_is_told(make: Callable[..., Path]) -> None:
    with pytest.raises(InvalidBundle, match="cannot be written"):
        make(name="absent/kernels.tar.gz")


def test_a_build_that_was_asked_for_by_commit_only_is_bundled_without_network(
    make: Callable[..., Path], root: Path, session: Session, island: Session, tmp_path: Path
) -> None:
    commit = session.resolve(KernelRequest.parse("org/base@v2")).commit
    fresh = replace(session, cache_dir=tmp_path / "fresh")
    plan_prefetch([KernelRequest.parse(f"org/base@{commit}")], fresh).run()
    bundle, _ = install(make(f"org/base@{commit}", session=replace(fresh, offline=True)), island, trust=REPOSITORIES)
    assert bundle.repositories == {"org/base": Refs()}
    assert load_kernel(f"org/base@{commit}", session=island, trust_remote_code=REPOSITORIES).BUILD == "torch-cpu"


def test_a_name_that_is_no_branch_is_remembered_too(
    make: Callable[..., Path], root: Path, session: Session, island: Session
) -> None:
    """The Hub looks up short commits and pull requests; here an earlier answer of it serves."""
    commit = session.resolve(KernelRequest.parse("org/base@v2")).commit
    for name in ("refs/pr/3", commit[:10]):
        session.store.record("revisions", f"org/base@{name}", {"commit": commit})
        install(make(f"org/base@{name}", trust=REPOSITORIES), island, trust=REPOSITORIES)
        found = load_kernel(f"org/base@{name}", session=island, trust_remote_code=REPOSITORIES)
        assert found.BUILD == "torch-cpu"


@pytest.mark.parametrize(("code", "error"), [(errno.ENOSPC, CacheFullError), (errno.EIO, CacheError)])
def test_a_disk_that_fails_leaves_nothing_behind(
    code: int, error: type[Exception], make: Callable[..., Path], island: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make()

    def fail(*arguments: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr("shutil.copyfileobj", fail)
    with pytest.raises(error):
        install(path, island, trust=REPOSITORIES)
    assert nothing_installed(island)


def test_a_member_that_is_not_read_is_skipped_and_one_of_another_size_is_not_written() -> None:
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    writer.add("one", 3, [b"abc"])
    writer.add("two", 3, [b"d", b"ef"])
    writer.close()
    file.seek(0)
    reader = ArchiveReader(file, "test")
    with reader.member("one", 3):
        pass
    with reader.member("two", 3) as chunks:
        assert b"".join(chunks) == b"def"
    reader.finish()
    with pytest.raises(InvalidBundle, match="2 bytes, 3 were announced"):
        ArchiveWriter(io.BytesIO()).add("short", 3, [b"ab"])


# Trust and policy


def nothing_installed(session: Session) -> bool:
    return not list(session.store.builds()) and not list(session.store.root.glob("tmp/*"))


@pytest.mark.parametrize("given", [[], ["org/kernel"], ["other/kernel"]])
def test_a_bundle_grants_no_trust_whoever_its_publisher_is(
    given: list[str], make: Callable[..., Path], island: Session
) -> None:
    with pytest.raises(UntrustedPublisher, match="a bundle does not prove who made it"):
        install(make(), island, trust=given)
    assert nothing_installed(island)


def test_that_the_hub_trusts_a_publisher_does_not_count_for_a_bundle(
    make: Callable[..., Path], session: Session
) -> None:
    path = make()
    assert session.store.recorded("publishers", "org")
    with pytest.raises(UntrustedPublisher):
        install(path, session)


def test_installing_does_not_let_the_code_run(make: Callable[..., Path], island: Session) -> None:
    install(make(), island, trust=REPOSITORIES)
    with pytest.raises(UntrustedPublisher, match="never asked online"):
        load_kernel("org/kernel@v1", session=island)


def policy(session: Session, tmp_path: Path, text: str) -> Session:
    (tmp_path / "policy.toml").write_text(text)
    return replace(session, policy_file=tmp_path / "policy.toml")


def test_a_policy_file_lets_bundles_in_and_their_code_run(
    make: Callable[..., Path], island: Session, tmp_path: Path
) -> None:
    trusting = policy(island, tmp_path, '[trust]\npublishers = ["org"]\n')
    install(make(), trusting)
    assert load_kernel("org/kernel@v1", session=trusting).BUILD == "torch-cpu"


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('[trust]\nrepositories = ["org/base"]\nonly = true\n', UntrustedPublisher, "only = true"),
        (f'[pins]\n"org/base" = "{COMMIT}"\n', PinMismatch, "pins it to cccc"),
        ('[signatures]\n"org" = "require"\n', UnsignedKernel, "a signature"),
    ],
)
def test_what_the_policy_refuses_a_bundle_cannot_bring(
    text: str, error: type[KernelHubError], words: str, make: Callable[..., Path], island: Session, tmp_path: Path
) -> None:
    strict = policy(island, tmp_path, text)
    with pytest.raises(error, match=words):
        install(make(), strict, trust=REPOSITORIES)
    assert nothing_installed(strict)


def test_a_digest_lets_one_bundle_in_and_no_other(make: Callable[..., Path], island: Session) -> None:
    path = make()
    digest = inspect(path).digest
    with pytest.raises(InvalidBundle, match=f"its digest is sha256:{digest}"):
        install(path, island, trust=REPOSITORIES, digest="sha256:" + "0" * 64)
    assert nothing_installed(island)
    install(path, island, trust=REPOSITORIES, digest=f"sha256:{digest}")


def test_a_bundle_of_another_hub_is_refused(make: Callable[..., Path], island: Session) -> None:
    elsewhere = replace(island, endpoint="https://hub.example.org")
    with pytest.raises(InvalidBundle, match=r"set HF_ENDPOINT=http://127\.0\.0\.1"):
        install(make(), elsewhere, trust=REPOSITORIES)


def test_a_store_with_other_files_for_the_same_commit_is_told(
    make: Callable[..., Path], island: Session, session: Session
) -> None:
    evil = forged(session.store.endpoint, {"__init__.py": b"import os\n"}, inspect(make()).builds[1])
    (island.store.root.parent / "evil.tar.gz").write_bytes(evil)
    install(make(), island, trust=REPOSITORIES)
    with pytest.raises(DigestMismatch, match="the store has other files for this commit"):
        install(island.store.root.parent / "evil.tar.gz", island, trust=REPOSITORIES)


# Hostile bundles

BODY = b"VALUE = 1\n"
METADATA = b'{"name": "kernel"}'


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def contents(endpoint: str, files: dict[str, bytes], build: BundledBuild | None = None) -> Bundle:
    listed = tuple(StoredFile(path, len(body), sha(body)) for path, body in sorted(files.items()))
    repo_id, commit, variant = build[:3] if build else ("org/kernel", COMMIT, "torch-cpu")
    made = BundledBuild(repo_id, commit, variant, listed)
    return Bundle(endpoint, (made,), {repo_id: Refs({"v1": commit})})


def packed(bundle: Bundle, bodies: dict[str, bytes], data: bytes | None = None) -> bytes:
    """An archive as the writer makes it, of contents that it would not make."""
    file = io.BytesIO()
    writer = ArchiveWriter(file)
    data = bundle.contents if data is None else data
    writer.add(CONTENTS, len(data), [data])
    for name, body in bodies.items():
        writer.add(name, len(body), [body])
    writer.close()
    return file.getvalue()


def forged(endpoint: str, files: dict[str, bytes], build: BundledBuild | None = None) -> bytes:
    bodies = {f"files/{sha(body)}": body for body in sorted(files.values(), key=sha)}
    return packed(contents(endpoint, files, build), bodies)


@pytest.fixture
def refused(island: Session, tmp_path: Path) -> Callable[[bytes], str]:
    """Installs and inspects hostile bytes; the error's text, after making sure that nothing was left behind."""

    def attempt(data: bytes) -> str:
        path = tmp_path / "hostile.tar.gz"
        path.write_bytes(data)
        with pytest.raises(KernelHubError) as caught:
            install(path, island, trust=REPOSITORIES)
        assert nothing_installed(island)
        return f"{type(caught.value).__name__}: {caught.value}"

    return attempt


@pytest.fixture
def endpoint(island: Session) -> str:
    return island.store.endpoint


def test_what_the_tests_below_start_from_is_accepted(island: Session, endpoint: str, tmp_path: Path) -> None:
    (tmp_path / "good.tar.gz").write_bytes(forged(endpoint, {"__init__.py": BODY, "metadata.json": METADATA}))
    _, [row] = install(tmp_path / "good.tar.gz", island, trust=REPOSITORIES)
    assert row.verification == "unverified"
    assert load_kernel("org/kernel@v1", session=island, trust_remote_code=REPOSITORIES).VALUE == 1


@pytest.mark.parametrize(
    "path",
    [
        "../x.py", "/etc/x.py", "a/../../x.py", "C:/x.py", "a\\b.py", "//server/x.py", "a\0b.py", "a\nb.py", "x" * 300,
        "é.py", "con.py", "a/./b.py", "a//b.py", ".hidden", "x.pyc", "__pycache__/x.py", "x.pth", "a.py ", "a.py.", "",
    ],
)  # fmt: skip
def test_a_path_that_no_build_may_have_is_refused(path: str, endpoint: str, refused: Callable[[bytes], str]) -> None:
    assert "invalid kernel bundle" in refused(forged(endpoint, {path: BODY}))


@pytest.mark.parametrize("files", [{"a.py": BODY, "A.py": b""}, {"a": BODY, "a/b.py": b""}])
def test_paths_that_cannot_lie_side_by_side_are_refused(
    files: dict[str, bytes], endpoint: str, refused: Callable[[bytes], str]
) -> None:
    assert "but for letter case" in (told := refused(forged(endpoint, files))) or "a file and a folder" in told


def raw(endpoint: str, change: Callable[[tarfile.TarFile, tarfile.TarInfo], None]) -> bytes:
    """A bundle whose only body is added by ``change``, which gets the member that belongs there."""
    bundle = contents(endpoint, {"__init__.py": BODY})
    file = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=file, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w", format=tarfile.GNU_FORMAT) as archive,  # type: ignore[call-overload]
    ):
        archive.addfile(member(CONTENTS, len(bundle.contents)), io.BytesIO(bundle.contents))
        change(archive, member(f"files/{sha(BODY)}", len(BODY)))
    return file.getvalue()


def member(name: str, size: int, **facts: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o444, 0
    for key, value in facts.items():
        setattr(info, key, value)
    return info


def with_facts(**facts: Any) -> Callable[[tarfile.TarFile, tarfile.TarInfo], None]:
    def change(archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        for key, value in facts.items():
            setattr(info, key, value)
        archive.addfile(info, io.BytesIO(BODY) if info.isreg() else None)

    return change


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"type": tarfile.SYMTYPE, "linkname": "/etc/passwd", "size": 0}, "is a symbolic link"),
        ({"type": tarfile.LNKTYPE, "linkname": "bundle.json", "size": 0}, "is a hard link"),
        ({"type": tarfile.FIFOTYPE, "size": 0}, "is a named pipe"),
        ({"type": tarfile.CHRTYPE, "size": 0, "devmajor": 1, "devminor": 3}, "is a character device"),
        ({"type": tarfile.BLKTYPE, "size": 0}, "is a block device"),
        ({"type": tarfile.DIRTYPE, "size": 0}, "is a folder"),
        ({"type": tarfile.CONTTYPE}, "an extended or unknown entry"),
        ({"type": b"Z"}, "an extended or unknown entry"),
        ({"name": "../../evil.py"}, "member '../../evil.py' where"),
        ({"name": "/etc/evil"}, "member '/etc/evil' where"),
        ({"name": f"files/{'0' * 64}"}, "where 'files/"),
        ({"name": "x" * 200}, "an extended or unknown entry"),
        ({"mode": 0o4755}, "an owner, mode, time or form"),
        ({"uid": 1000}, "an owner, mode, time or form"),
        ({"uname": "root"}, "an owner, mode, time or form"),
        ({"mtime": 1}, "an owner, mode, time or form"),
        ({"size": len(BODY) - 1}, "are listed"),
    ],
)
def test_a_member_that_is_not_the_one_listed_is_refused(
    facts: dict[str, Any], words: str, endpoint: str, refused: Callable[[bytes], str]
) -> None:
    assert words in refused(raw(endpoint, with_facts(**facts)))


def test_an_extended_header_is_refused_before_it_is_read(endpoint: str, refused: Callable[[bytes], str]) -> None:
    def change(archive: tarfile.TarFile, info: tarfile.TarInfo) -> None:
        archive.addfile(member("pax", 8 << 30, type=tarfile.XHDTYPE))

    assert "an extended or unknown entry" in refused(raw(endpoint, change))


def test_a_missing_and_an_additional_member_are_told(endpoint: str, refused: Callable[[bytes], str]) -> None:
    assert "it ends before member 'files/" in refused(raw(endpoint, lambda archive, info: None))
    bundle = contents(endpoint, {"__init__.py": BODY})
    more = packed(bundle, {f"files/{sha(BODY)}": BODY, "files/evil.py": b"x"})
    assert "member 'files/evil.py' is not listed" in refused(more)
    twice = raw(endpoint, lambda archive, info: [with_facts()(archive, info) for _ in range(2)] and None)
    assert "is not listed" in refused(twice)


def test_a_body_that_is_not_what_is_listed_is_refused(endpoint: str, refused: Callable[[bytes], str]) -> None:
    bundle = contents(endpoint, {"__init__.py": BODY})
    assert refused(packed(bundle, {f"files/{sha(BODY)}": BODY[::-1]})).startswith("DigestMismatch")


def test_hidden_data_is_refused(endpoint: str, refused: Callable[[bytes], str]) -> None:
    plain = bytearray(gzip.decompress(forged(endpoint, {"__init__.py": BODY})))
    plain[plain.index(BODY) + len(BODY)] = 1
    assert "hidden data behind a member" in refused(gzip.compress(bytes(plain)))
    good = gzip.decompress(forged(endpoint, {"__init__.py": BODY}))
    assert "data after its end" in refused(gzip.compress(good + b"more"))
    assert "data after its end" in refused(gzip.compress(good[:-1] + b"\1"))
    assert "not readable as gzip" in refused(gzip.compress(good) + b"garbage")


def test_every_truncation_is_refused(endpoint: str, refused: Callable[[bytes], str]) -> None:
    good = forged(endpoint, {"__init__.py": BODY, "metadata.json": METADATA})
    for length in sorted({0, 1, 9, 10, 20, *range(30, len(good), 37), len(good) - 1, len(good) - 8, len(good) - 9}):
        assert refused(good[:length]).startswith("InvalidBundle"), length
    plain = gzip.decompress(good)
    for length in range(0, len(plain), 512):
        assert refused(gzip.compress(plain[:length])).startswith("InvalidBundle"), length


def test_no_flipped_bit_goes_unnoticed(endpoint: str, refused: Callable[[bytes], str]) -> None:
    good = gzip.decompress(forged(endpoint, {"__init__.py": BODY, "metadata.json": METADATA}))
    for position in range(0, len(good), 89):
        plain = bytearray(good)
        plain[position] ^= 1 << position % 8
        assert refused(gzip.compress(bytes(plain), 1))


@pytest.mark.parametrize(
    "data",
    [b"", b"PK\3\4", b"\x1f\x8b", bytes(range(256)) * 2, gzip.compress(b"", mtime=0), gzip.compress(b"x", mtime=0)],
)
def test_what_is_no_bundle_is_refused(data: bytes, refused: Callable[[bytes], str]) -> None:
    assert refused(data).startswith("InvalidBundle")


@pytest.mark.parametrize("kind", ["absent", "folder", "pipe", "link"])
def test_what_is_no_plain_file_is_refused(kind: str, island: Session, tmp_path: Path) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link":
        path.symlink_to(tmp_path / "bundle.tar.gz")
    with pytest.raises(InvalidBundle, match="cannot be read"):
        install(path, island)


def test_a_bomb_is_refused_before_it_explodes(endpoint: str, refused: Callable[[bytes], str]) -> None:
    zeros = bytes(32 << 20)
    assert "more than 200 times its size" in refused(forged(endpoint, {"__init__.py": zeros}))
    build = contents(endpoint, {"__init__.py": os.urandom(100_000)}).builds[0]
    many = tuple(build._replace(commit=f"{number:040x}") for number in range(4096))
    bundle = Bundle(endpoint, many, {"org/kernel": Refs()})
    [body] = build.files
    assert "more than 1000 times its size" in refused(packed(bundle, {f"files/{body.sha256}": bytes(body.size)}))


def test_a_list_of_contents_that_never_ends_is_refused(refused: Callable[[bytes], str]) -> None:
    file = io.BytesIO()
    with gzip.GzipFile(fileobj=file, mode="wb") as zipped:
        zipped.write(member(CONTENTS, 1 << 40).tobuf(tarfile.GNU_FORMAT))
        zipped.write(bytes(1 << 20))
    assert f"has {1 << 40} bytes, more than" in refused(file.getvalue())


def edited(endpoint: str, change: Callable[[Any], Any]) -> bytes:
    """A bundle whose contents say something else."""
    bundle = contents(endpoint, {"__init__.py": BODY})
    document = json.loads(bundle.contents)
    changed = change(document)
    data = json.dumps(document if changed is None else changed, indent=1, sort_keys=True).encode() + b"\n"
    return packed(bundle, {f"files/{sha(BODY)}": BODY}, data)


def put(*keys: Any, value: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        document[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        lambda document: [],
        lambda document: {},
        put("schema", value=2),
        put("schema", value=True),
        put("more", value=1),
        put("endpoint", value=1),
        put("endpoint", value="https://evil.example.org"),
        put("builds", value=[]),
        put("builds", value=[[]]),
        put("builds", value={}),
        put("builds", 0, "repo_id", value="../x"),
        put("builds", 0, "repo_id", value="org\x1b[2J/x"),
        put("builds", 0, "repo_id", value=1),
        put("builds", 0, "commit", value="main"),
        put("builds", 0, "commit", value="../" + "c" * 37),
        put("builds", 0, "variant", value="../../x"),
        put("builds", 0, "variant", value="torch-cpu\n"),
        put("builds", 0, "variant", value=None),
        put("builds", 0, "files", value=[]),
        put("builds", 0, "files", value=[["a.py", 1]]),
        put("builds", 0, "files", 0, 0, value=1),
        put("builds", 0, "files", 0, 1, value=-1),
        put("builds", 0, "files", 0, 1, value=1.0),
        put("builds", 0, "files", 0, 1, value=True),
        put("builds", 0, "files", 0, 1, value=1 << 40),
        put("builds", 0, "files", 0, 2, value="A" * 64),
        put("builds", 0, "files", 0, 2, value=None),
        put("builds", 0, "more", value=1),
        lambda document: document["builds"].append(document["builds"][0]),
        lambda document: document["builds"][0]["files"].append(document["builds"][0]["files"][0]),
        lambda document: document["builds"][0]["files"].append(["z.py", 3, document["builds"][0]["files"][0][2]]),
        put("repositories", value={}),
        put("repositories", value=[]),
        put("repositories", "other/kernel", value={"type": "kernel", "branches": {}, "tags": {}}),
        put("repositories", "org/kernel", "type", value="dataset"),
        put("repositories", "org/kernel", "branches", value=[]),
        put("repositories", "org/kernel", "branches", value={"v1": "d" * 40}),
        put("repositories", "org/kernel", "branches", value={"../v1": COMMIT}),
        put("repositories", "org/kernel", "tags", value={"t": 1}),
        put("repositories", "org/kernel", "moved_to", value="evil/kernel"),
        put("lock", value=[1]),
        put("lock", value=[-1, "0" * 64]),
        put("lock", value=[5 << 20, "0" * 64]),
        put("lock", value=[1, "x"]),
        put("lock", value="yes"),
    ],
)
def test_contents_that_say_anything_else_are_refused(
    change: Callable[[Any], Any], endpoint: str, refused: Callable[[bytes], str]
) -> None:
    told = refused(edited(endpoint, change))
    assert told.startswith("InvalidBundle")
    assert told.isprintable()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data.replace(b'"schema": 1', b'"schema": 1, "schema": 1'),
        lambda data: data.replace(b" ", b""),
        lambda data: data + b" ",
        lambda data: b"\xef\xbb\xbf" + data,
        lambda data: data.replace(b"1", b"NaN", 1),
        lambda data: b"[" * 200_000,
        lambda data: b"9" * 10_000,
        lambda data: b"\xff\xfe",
        lambda data: b"",
    ],
)
def test_contents_in_another_form_are_refused(
    spoil: Callable[[bytes], bytes], endpoint: str, refused: Callable[[bytes], str]
) -> None:
    bundle = contents(endpoint, {"__init__.py": BODY})
    assert "InvalidBundle" in refused(packed(bundle, {f"files/{sha(BODY)}": BODY}, spoil(bundle.contents)))


@pytest.mark.parametrize(
    ("metadata", "error"),
    [
        (b"{", InvalidMetadata),
        (b'{"name": "kernel", "name": "kernel"}', InvalidMetadata),
        (b" " * ((1 << 20) + 1), InvalidMetadata),
        (b'{"name": "kernel", "id": "_k", "version": 1, "backend": {"type": "cpu"}, "digest": {"algorithm": "sha256", '
         b'"files": {}}}', DigestMismatch),
    ],
)  # fmt: skip
def test_a_build_that_its_own_metadata_contradicts_is_refused(
    metadata: bytes, error: type[Exception], endpoint: str, refused: Callable[[bytes], str]
) -> None:
    files = {"__init__.py": os.urandom(20_000), "metadata.json": metadata}
    assert refused(forged(endpoint, files)).startswith(error.__name__)


def locked(endpoint: str, text: str) -> bytes:
    bundle = replace(contents(endpoint, {"__init__.py": BODY}), lock_bytes=text.encode())
    return packed(bundle, {LOCK_NAME: text.encode(), f"files/{sha(BODY)}": BODY})


LOCKED = '[[kernel]]\nrequest = "org/kernel@v1"\ncommit = "{}"\n[kernel.variants.torch-cpu]\n"__init__.py" = "{} {}"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("schema = 9\n", "unknown schema version"),
        ("", "empty file"),
        ("schema = 1\n" + LOCKED.format("d" * 40, f"sha256:{sha(BODY)}", len(BODY)), "a lock of the kernels in the"),
        ("schema = 1\n" + LOCKED.format(COMMIT, f"sha256:{sha(b'')}", len(BODY)), "is not the one that the bundle's"),
        ("schema = 1\n" + LOCKED.format(COMMIT, "git:" + "a" * 40, len(BODY)), "is not the one that the bundle's lock"),
        (
            "schema = 1\n" + LOCKED.format(COMMIT, f"sha256:{sha(BODY)}", len(BODY)).replace("__init__", "other"),
            "lists other files than the bundle has",
        ),
    ],
)
def test_a_lock_that_is_not_of_these_builds_is_refused(
    text: str, words: str, endpoint: str, refused: Callable[[bytes], str]
) -> None:
    assert words in refused(locked(endpoint, text))


def test_a_full_disk_is_told_before_anything_is_unpacked(
    make: Callable[..., Path], island: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make()
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(total=10, used=0, free=10))
    with pytest.raises(KernelHubError, match="10 bytes free"):
        install(path, island, trust=REPOSITORIES)


def test_installed_files_are_private_and_read_only(make: Callable[..., Path], island: Session) -> None:
    install(make(), island, trust=REPOSITORIES)
    for build in island.store.builds():
        for path in build.files_folder.rglob("*.py"):
            assert stat.S_IMODE(path.stat().st_mode) == 0o444
            assert path.stat().st_nlink == 1


def test_without_an_install_nothing_is_there(island: Session) -> None:
    with pytest.raises(NotCached):
        load_kernel("org/kernel@v1", session=island, trust_remote_code=REPOSITORIES)
