"""What a Hub says, and what it must not be believed."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from kernel_repository import trust, write_build
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from kernelhub import load_kernel
from kernelhub.errors import (
    HubUnavailable,
    IncompleteDownload,
    InvalidPath,
    RepositoryNotFound,
    RevisionNotFound,
)
from kernelhub.hub import HubIndex
from kernelhub.serve import LocalHub, PortInUse

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from starlette.requests import Request

    from kernelhub.api import Session

REPO = "acme/relu"
FILES: dict[str, str | bytes] = {"__init__.py": "ONE = 1\n", "table.safetensors": b"\0"}


@pytest.fixture
def root(hub_root: Path) -> Path:
    trust(hub_root, "acme")
    for version in (1, 2, 10):
        write_build(hub_root, REPO, f"v{version}", "torch-cpu", FILES | {"v.py": f"V = {version}\n"}, version=version)
    return hub_root


@pytest.fixture
def index(root: Path, hub: LocalHub) -> HubIndex:
    return HubIndex(hub.url, token=False)


def settings(root: Path, repo_id: str, **values: Any) -> None:
    (root / repo_id).mkdir(parents=True, exist_ok=True)
    (root / repo_id / "repository.json").write_text(json.dumps(values))


def answering(part: str, response: Callable[[], Response]) -> Callable[[Request], Response | None]:
    return lambda request: response() if part in request.url.path else None


def test_refs_have_versions_in_numeric_order(index: HubIndex, root: Path) -> None:
    settings(root, REPO, tags={"release": "v2"})
    refs = index.refs(REPO)
    assert list(refs.versions) == [1, 2, 10]
    assert refs.find("release") == refs.versions[2]
    assert refs.repo_type == "kernel"


@pytest.mark.parametrize("branch", ["v01", "V1", "v1.0", "v", "v-1", "v1_0", "v9999999", "version1"])
def test_s_33_other_branch_names_are_no_versions(index: HubIndex, root: Path, branch: str) -> None:
    write_build(root, REPO, branch, "torch-cpu", FILES)
    refs = index.refs(REPO)
    assert list(refs.versions) == [1, 2, 10]
    assert branch in refs.branches


def test_files_have_sizes_and_hashes(index: HubIndex) -> None:
    commit = index.refs(REPO).branches["v1"]
    files = {file.path: file for file in index.builds(REPO, commit)["torch-cpu"] or ()}
    assert files["__init__.py"].hash.algorithm == "git"
    assert files["table.safetensors"].hash.algorithm == "sha256"
    assert files["__init__.py"].matches(b"ONE = 1\n")
    assert not files["__init__.py"].matches(b"ONE = 2\n")
    assert set(index.files(REPO, commit, "torch-cpu")) == set(files.values())


def test_a_long_listing_is_asked_for_build_by_build(
    root: Path, hub: LocalHub, index: HubIndex, asked: Callable[[], list[str]], session: Session
) -> None:
    for number in range(20, 70):
        files = FILES | {f"f{i}.py": "" for i in range(20)}
        write_build(root, "acme/large", "v1", f"torch2{number}-cpu-x86_64-linux", files)
    write_build(root, "acme/large", "v1", "torch-cpu", FILES)
    commit = index.refs("acme/large").branches["v1"]
    asked()
    builds = index.builds("acme/large", commit)
    assert len(builds) == 51
    assert set(builds.values()) == {None}
    assert len(asked()) == 2
    assert load_kernel("acme/large", session=session).ONE == 1


def test_a_kernel_of_type_model_is_found(root: Path, session: Session) -> None:
    settings(root, "acme/older", type="model")
    write_build(root, "acme/older", "v1", "torch-cpu", FILES)
    assert load_kernel("acme/older", session=session).ONE == 1


def test_a_revision_beside_the_branches_is_looked_up(index: HubIndex) -> None:
    commit = index.refs(REPO).branches["v2"]
    assert index.commit(REPO, commit) == commit
    with pytest.raises(RevisionNotFound, match="'refs/pr/7'"):
        index.commit(REPO, "refs/pr/7")


def test_a_gated_repository_says_so(root: Path, session: Session) -> None:
    settings(root, REPO, gated=True)
    with pytest.raises(RepositoryNotFound, match=r"it is gated.*hf auth login"):
        load_kernel(REPO, session=session)


def test_a_private_repository_is_not_found(root: Path, session: Session) -> None:
    settings(root, REPO, private=True)
    with pytest.raises(RepositoryNotFound, match="private or gated repository needs a token"):
        load_kernel(REPO, session=session)


# S-20


@pytest.mark.parametrize(
    "endpoint", ["http://hub.example", "http://127.0.0.1.example", "ftp://localhost", "http://10.0.0.1"]
)
def test_s_20_plain_http_is_for_this_machine_only(endpoint: str, tmp_path: Path, session: Session) -> None:
    with pytest.raises(HubUnavailable, match=r"only https is accepted \(http for this machine"):
        HubIndex(endpoint)


@pytest.mark.parametrize(
    "endpoint", ["https://hub.example", "http://localhost:1", "http://[::1]:1", "http://127.8.0.1"]
)
def test_s_20_https_and_loopback_are_accepted(endpoint: str) -> None:
    assert HubIndex(f"{endpoint}/").name == endpoint


def test_no_token_goes_to_a_hub_without_being_asked_to(
    root: Path, hub: LocalHub, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    load_kernel(REPO, session=session)
    ours = [record for record in hub.requests if "agent-harnesses" not in record.path]
    assert not [record for record in ours if "authorization" in record.headers]


# S-22


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("ETag", '"../../etc/passwd"'),
        ("ETag", "W/" + '"' + "a" * 40 + '"'),
        ("ETag", '"' + "a" * 41 + '"'),
        ("ETag", ""),
        ("X-Linked-Etag", '"nothing"'),
        ("X-Repo-Commit", "b" * 40),
        ("X-Repo-Commit", "main"),
    ],
)
@pytest.mark.parametrize("name", ["metadata.json", "__init__.py"])
def test_s_22_a_wrong_header_is_an_error_that_names_it(
    header: str, value: str, name: str, root: Path, hub: LocalHub, session: Session
) -> None:
    body = (root / REPO / "v1/build/torch-cpu" / name).read_bytes()
    headers = {"ETag": '"' + "a" * 40 + '"'} | {header: value}
    hub.hook = answering(f"/torch-cpu/{name}", lambda: Response(body, headers=headers))
    shown = "ETag" if "tag" in header.lower() else header
    with pytest.raises(IncompleteDownload, match=f"{name}.*header {shown} is {re.escape(repr(value))}"):
        load_kernel(REPO, session=session)
    assert not list(session.store.builds())
    hub.hook = None
    assert load_kernel(REPO, session=session).ONE == 1


def test_s_22_a_missing_etag_is_an_error(root: Path, hub: LocalHub, session: Session) -> None:
    hub.hook = answering("/torch-cpu/__init__.py", lambda: Response(b"ONE = 1\n"))
    with pytest.raises(IncompleteDownload, match="header ETag is None"):
        load_kernel(REPO, session=session)


@pytest.mark.parametrize("commit", ["main", "A" * 40, "a" * 39, "", None, 7, "a" * 40 + "\n"])
def test_s_22_a_branch_points_to_forty_hex_digits(commit: object, root: Path, hub: LocalHub, session: Session) -> None:
    answer = {"branches": [{"name": "v1", "targetCommit": commit}], "tags": []}
    hub.hook = answering("/refs", lambda: JSONResponse(answer))
    with pytest.raises(HubUnavailable, match="not 40 hex digits"):
        load_kernel(REPO, session=session)


# Answers that are not the Hub's


@pytest.mark.parametrize("part", ["/refs", "/tree/", "/overview"])
@pytest.mark.parametrize(
    "answer",
    [
        lambda: HTMLResponse("<html>Please log in to this network</html>"),
        lambda: JSONResponse([{"unexpected": 1}]),
        lambda: JSONResponse(1),
        lambda: Response(b"\xff\xfe", media_type="application/json"),
    ],
)
def test_an_answer_that_is_not_the_hubs_is_a_failed_request(
    part: str, answer: Callable[[], Response], root: Path, hub: LocalHub, session: Session
) -> None:
    hub.hook = answering(part, answer)
    with pytest.raises(
        HubUnavailable, match=r"cannot reach the Hub at http://127\.0\.0\.1:.*does not answer as a Hub does"
    ):
        load_kernel(REPO, session=session)
    hub.hook = None
    assert load_kernel(REPO, session=session).ONE == 1


@pytest.mark.parametrize(
    ("key", "value"), [("size", -1), ("size", "8"), ("size", 8.0), ("oid", "main"), ("oid", None), ("oid", "a" * 41)]
)
def test_a_listing_has_sizes_and_hashes_or_is_refused(
    key: str, value: object, root: Path, hub: LocalHub, session: Session, change_tree: Any
) -> None:
    def change(rows: list[dict[str, Any]]) -> None:
        next(row for row in rows if row["path"].endswith("__init__.py"))[key] = value

    change_tree(REPO, change)
    with pytest.raises(HubUnavailable, match="__init__"):
        load_kernel(REPO, session=session)


@pytest.mark.parametrize("path", ["../x.py", "/etc/passwd", "buildx/torch-cpu/x.py", "README.md"])
def test_s_10_a_listing_of_builds_names_builds_only(
    path: str, root: Path, hub: LocalHub, session: Session, change_tree: Any
) -> None:
    change_tree(REPO, lambda rows: rows.append({"type": "file", "oid": "a" * 40, "size": 1, "path": path}))
    with pytest.raises(InvalidPath) as caught:
        load_kernel(REPO, session=session)
    assert repr(path) in str(caught.value)
    assert not [record for record in hub.requests if "/resolve/" in record.path]


@pytest.mark.parametrize("status", [400, 410, 429, 500, 503])
@pytest.mark.parametrize("part", ["/refs", "/tree/", "/overview", "/torch-cpu/__init__.py"])
def test_an_error_of_the_hub_is_typed_and_names_the_status(
    part: str, status: int, root: Path, hub: LocalHub, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub waits between its attempts
    hub.hook = answering(part, lambda: Response(status_code=status))
    with pytest.raises(HubUnavailable, match=f"HTTP {status} for /"):
        load_kernel(REPO, session=session)
    assert not list(session.store.builds())


def test_a_hub_that_is_not_there_is_told_with_its_cause(tmp_path: Path, hub: LocalHub, session: Session) -> None:
    hub.stop()
    with pytest.raises(HubUnavailable, match=r"at http://127\.0\.0\.1:\d+: .*[Rr]efused"):
        load_kernel(REPO, session=session)


def test_a_listed_file_that_is_not_there_is_told(root: Path, hub: LocalHub, session: Session, change_tree: Any) -> None:
    row = {"type": "file", "oid": "a" * 40, "size": 1, "path": "build/torch-cpu/gone.py"}
    change_tree(REPO, lambda rows: rows.append(row))
    with pytest.raises(IncompleteDownload, match=r"gone\.py.*the Hub lists it but does not have it"):
        load_kernel(REPO, session=session)


# Redirects


def test_s_04_a_renamed_organization_is_not_trusted_by_its_old_name(root: Path, hub: LocalHub, index: HubIndex) -> None:
    hub.hook = answering("/acme/overview", lambda: RedirectResponse("/api/organizations/other/overview"))
    assert index.trusts("acme") is False


@pytest.mark.parametrize(
    "location", ["/api/kernels/other/name/refs", "https://evil.example/api/kernels/other/name/refs"]
)
def test_s_04_a_redirect_is_told_and_not_followed(
    location: str, root: Path, hub: LocalHub, index: HubIndex, asked: Callable[[], list[str]]
) -> None:
    hub.hook = answering("/refs", lambda: RedirectResponse(location))
    asked()
    assert index.refs(REPO).moved_to == "other/name"
    assert len(asked()) == 1


@pytest.mark.parametrize("location", ["/", "/login", "/api/kernels/..%2f..%2fx/refs", "/api/kernels/a/b c/refs"])
def test_s_04_a_redirect_to_something_else_is_an_error(
    location: str, root: Path, hub: LocalHub, session: Session
) -> None:
    hub.hook = answering("/refs", lambda: RedirectResponse(location))
    with pytest.raises(HubUnavailable, match="redirected to"):
        load_kernel(REPO, session=session)


def test_s_04_a_pinned_commit_is_not_taken_from_another_repository(root: Path, session: Session) -> None:
    write_build(root, "evil/relu", "v1", "torch-cpu", FILES)
    commit = HubIndex(session.endpoint, token=False).refs("evil/relu").branches["v1"]
    settings(root, REPO, redirect="evil/relu")
    with pytest.raises(RepositoryNotFound, match="it has moved to evil/relu: ask for that name"):
        load_kernel(f"{REPO}@{commit}", session=session)


def test_a_port_in_use_is_told(root: Path, hub: LocalHub) -> None:
    with pytest.raises(PortInUse, match=f"{hub.host}:{hub.port} is in use: choose another port"):
        LocalHub(root, port=hub.port).start()
    with urllib.request.urlopen(f"{hub.url}/api/kernels/{REPO}/refs") as answer:
        assert answer.status == 200
