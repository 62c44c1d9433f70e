from __future__ import annotations

import asyncio
import hashlib
import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import HfApi, close_session, get_session, hf_hub_download, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile, RepoFolder
from kernel_repository import trust, write_build
from starlette.responses import JSONResponse, Response

from kernelhub.errors import InvalidConfig, KernelHubError
from kernelhub.serve import LocalHub, PortInUse, RequestRecord

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

REPO = "acme/relu"
BUILD = "build/torch-cpu"
BIG = bytes(range(256)) * 8
FILES: dict[str, str | bytes] = {
    "__init__.py": "from . import layers\n",
    "layers.py": "",
    "_relu.abi3.so": b"\x7fELF",
    "table.bin": BIG,
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    write_build(root, REPO, "v1", "torch-cpu", FILES)
    write_build(root, REPO, "v2", "torch-cpu", FILES | {"__init__.py": "TWO = 2\n"}, version=2)
    trust(root, "acme")
    return root


@pytest.fixture
def hub(root: Path) -> Iterator[LocalHub]:
    with LocalHub(root, page_size=3, lfs_threshold=1000) as hub:
        yield hub
    close_session()


@pytest.fixture
def api(hub: LocalHub) -> HfApi:
    return HfApi(endpoint=hub.url, token=False)


def settings(root: Path, repo_id: str, **values: Any) -> None:
    (root / repo_id).mkdir(parents=True, exist_ok=True)
    (root / repo_id / "repository.json").write_text(json.dumps(values))


def download(hub: LocalHub, cache: Path, filename: str, *, revision: str = "v1", repo_id: str = REPO) -> Path:
    found = hf_hub_download(
        repo_id, filename, repo_type="kernel", revision=revision, endpoint=hub.url, cache_dir=cache, token=False
    )
    return Path(found)


def calls(hub: LocalHub) -> list[str]:
    return [f"{request.method} {request.path}" for request in hub.requests]


# --- what huggingface_hub asks, and what it makes of the answers ---


def test_refs_list_branches_and_tags(hub: LocalHub, api: HfApi, root: Path) -> None:
    settings(root, REPO, tags={"stable": "v1"})
    refs = api.list_repo_refs(REPO, repo_type="kernel", include_pull_requests=True)
    heads = {branch.name: branch.target_commit for branch in refs.branches}
    assert heads == {name: api.kernel_info(REPO, revision=name).sha for name in ("v1", "v2", "main")}
    assert {branch.ref for branch in refs.branches} == {"refs/heads/v1", "refs/heads/v2", "refs/heads/main"}
    assert [(tag.ref, tag.target_commit) for tag in refs.tags] == [("refs/tags/stable", heads["v1"])]
    assert (refs.converts, refs.pull_requests) == ([], [])
    assert calls(hub)[0] == "GET /api/kernels/acme/relu/refs?include_prs=1"


def test_the_tree_is_listed_page_by_page(hub: LocalHub, api: HfApi) -> None:
    entries = list(api.list_repo_tree(REPO, repo_type="kernel", revision="refs/heads/v1", recursive=True))
    assert [entry.path for entry in entries] == [
        "build",
        BUILD,
        *(f"{BUILD}/{name}" for name in sorted([*FILES, "metadata.json"])),
    ]
    assert [type(entry) for entry in entries] == [RepoFolder] * 2 + [RepoFile] * 5
    assert [path.split("?")[0] for path in calls(hub)] == ["GET /api/kernels/acme/relu/tree/refs%2Fheads%2Fv1"] * 3


def test_entries_carry_git_ids_and_lfs_hashes(api: HfApi) -> None:
    entries = {entry.path: entry for entry in api.list_repo_tree(REPO, BUILD, repo_type="kernel", expand=True)}
    small, big = entries[f"{BUILD}/layers.py"], entries[f"{BUILD}/table.bin"]
    assert isinstance(small, RepoFile)
    assert isinstance(big, RepoFile)
    assert (small.size, small.blob_id, small.lfs) == (0, "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391", None)
    assert big.size == len(BIG)
    assert big.lfs is not None
    assert (big.lfs.size, big.lfs.sha256) == (len(BIG), hashlib.sha256(BIG).hexdigest())
    assert big.last_commit is not None
    assert big.last_commit["oid"] == api.kernel_info(REPO).sha


def test_paths_info_answers_for_the_paths_that_exist(api: HfApi) -> None:
    found = api.get_paths_info(REPO, ["build", f"{BUILD}/layers.py", "no"], repo_type="kernel", revision="v1")
    assert [(entry.path, type(entry)) for entry in found] == [("build", RepoFolder), (f"{BUILD}/layers.py", RepoFile)]


def test_kernel_info_names_the_commit_of_a_revision(hub: LocalHub, api: HfApi) -> None:
    newest, first = api.kernel_info(REPO), api.kernel_info(REPO, revision="v1")
    assert newest.sha == api.kernel_info(REPO, revision="v2").sha != first.sha
    assert (first.id, first.author, first.gated, first.private) == (REPO, "acme", False, False)
    assert first.last_modified is not None
    assert calls(hub)[:2] == ["GET /api/kernels/acme/relu", "GET /api/kernels/acme/relu/revision/v1"]


def test_a_model_repository_is_served_under_the_routes_of_models(hub: LocalHub, api: HfApi, root: Path) -> None:
    (root / "acme/bert/main").mkdir(parents=True)
    (root / "acme/bert/main/config.json").write_text("{}")
    settings(root, "acme/bert", type="model")
    siblings = api.model_info("acme/bert").siblings
    assert siblings is not None
    assert [sibling.rfilename for sibling in siblings] == ["config.json"]
    found = hf_hub_download("acme/bert", "config.json", endpoint=hub.url, cache_dir=root.parent / "hf", token=False)
    assert Path(found).read_text() == "{}"
    with pytest.raises(RepositoryNotFoundError):
        api.kernel_info("acme/bert")
    with pytest.raises(RepositoryNotFoundError):
        api.model_info(REPO)


def test_the_overview_says_who_is_a_trusted_publisher(api: HfApi, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Before 2.0, get_organization_overview asks this address and not the one that HfApi was made with.
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", api.endpoint)
    (root / "stranger").mkdir()
    (root / "named").mkdir()
    (root / "named/organization.json").write_text('{"fullname": "Named Ltd", "trustedKernelPublisher": true}')
    overviews = {name: api.get_organization_overview(name) for name in ("acme", "stranger", "named")}
    assert {name: vars(overview)["trustedKernelPublisher"] for name, overview in overviews.items()} == {
        "acme": True,
        "stranger": False,
        "named": True,
    }
    assert overviews["named"].fullname == "Named Ltd"
    with pytest.raises(HfHubHTTPError) as caught:
        api.get_organization_overview("nobody")
    assert caught.value.response.status_code == 404


def test_files_are_downloaded_into_the_cache_of_hugging_face(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    for name, body in FILES.items():
        found = download(hub, tmp_path, f"{BUILD}/{name}")
        assert found.read_bytes() == (body.encode() if isinstance(body, str) else body)
    sha = api.kernel_info(REPO, revision="v1").sha
    assert (tmp_path / "kernels--acme--relu" / "snapshots" / str(sha) / BUILD / "layers.py").exists()
    blobs = {path.name for path in (tmp_path / "kernels--acme--relu" / "blobs").iterdir()}
    assert hashlib.sha256(BIG).hexdigest() in blobs
    assert "e69de29bb2d1d6434b8b29ae775ad8c2e48c5391" in blobs


def test_a_snapshot_is_downloaded_whole(hub: LocalHub, tmp_path: Path) -> None:
    found = Path(
        snapshot_download(REPO, repo_type="kernel", revision="v2", endpoint=hub.url, cache_dir=tmp_path, token=False)
    )
    assert {path.name for path in (found / BUILD).iterdir()} == {*FILES, "metadata.json"}
    assert (found / BUILD / "__init__.py").read_text() == "TWO = 2\n"


def test_an_old_commit_is_served_after_its_branch_moved(hub: LocalHub, api: HfApi, root: Path, tmp_path: Path) -> None:
    old = str(api.kernel_info(REPO, revision="v1").sha)
    write_build(root, REPO, "v1", "torch-cpu", {"__init__.py": "MOVED = True\n"})
    assert api.kernel_info(REPO, revision="v1").sha != old
    assert download(hub, tmp_path, f"{BUILD}/__init__.py").read_text() == "MOVED = True\n"
    assert download(hub, tmp_path, f"{BUILD}/__init__.py", revision=old).read_text() == FILES["__init__.py"]


# --- what is refused, and how ---


def test_a_missing_repository_revision_or_entry_has_its_own_error(hub: LocalHub, api: HfApi, tmp_path: Path) -> None:
    for missing in ("acme/no", "no/relu"):
        with pytest.raises(RepositoryNotFoundError) as caught:
            api.list_repo_refs(missing, repo_type="kernel")
        assert caught.value.response.status_code == 401
    with pytest.raises(RepositoryNotFoundError) as caught:
        api.list_repo_refs("acme/no", repo_type="kernel", token="hf_" + "x" * 34)
    assert caught.value.response.status_code == 404
    with pytest.raises(RevisionNotFoundError):
        api.kernel_info(REPO, revision="v9")
    with pytest.raises(RevisionNotFoundError):
        download(hub, tmp_path, "README.md", revision="v9")
    with pytest.raises(EntryNotFoundError):
        download(hub, tmp_path, "README.md")
    with pytest.raises(EntryNotFoundError):
        download(hub, tmp_path, BUILD)
    with pytest.raises(EntryNotFoundError):
        list(api.list_repo_tree(REPO, "build/no", repo_type="kernel"))


def test_a_private_repository_is_not_found(api: HfApi, root: Path) -> None:
    settings(root, REPO, private=True)
    with pytest.raises(RepositoryNotFoundError):
        api.kernel_info(REPO)


@pytest.mark.parametrize(("token", "status"), [(None, 401), ("Bearer hf_x", 403)])
def test_a_gated_repository_lists_its_files_and_refuses_them(
    hub: LocalHub, api: HfApi, root: Path, tmp_path: Path, token: str | None, status: int
) -> None:
    settings(root, REPO, gated=True)
    assert api.kernel_info(REPO).gated == "auto"
    assert list(api.list_repo_tree(REPO, repo_type="kernel"))
    with pytest.raises(GatedRepoError):
        download(hub, tmp_path, f"{BUILD}/layers.py")
    headers = {"Authorization": token} if token else {}
    answer = get_session().get(f"{hub.url}/kernels/{REPO}/resolve/v1/{BUILD}/layers.py", headers=headers)
    assert answer.status_code == status


def test_a_renamed_repository_redirects_all_its_routes(hub: LocalHub, api: HfApi, root: Path, tmp_path: Path) -> None:
    settings(root, "old/name", redirect=REPO)
    assert api.kernel_info("old/name", revision="v1").sha == api.kernel_info(REPO, revision="v1").sha
    assert list(api.list_repo_tree("old/name", repo_type="kernel", recursive=True))
    found = download(hub, tmp_path, f"{BUILD}/__init__.py", repo_id="old/name")
    assert found.read_text() == FILES["__init__.py"]
    assert hub.requests[0].status == 307


def test_no_token_is_known(api: HfApi, hub: LocalHub) -> None:
    with pytest.raises(HfHubHTTPError, match="Invalid user token"):
        api.whoami(token="hf_" + "x" * 34)
    assert get_session().get(f"{hub.url}/api/whoami-v2").status_code == 401


def test_settings_that_cannot_be_understood_are_named_in_the_answer(api: HfApi, root: Path) -> None:
    (root / REPO / "repository.json").write_text('{"typ": "kernel"}')
    with pytest.raises(HfHubHTTPError, match=r"'typ'.*repository\.json"):
        api.kernel_info(REPO)


def test_nothing_outside_the_root_is_served(hub: LocalHub, root: Path) -> None:
    (root.parent / "secret").write_text("secret")
    for path in (
        f"/kernels/{REPO}/resolve/v1/../../../../secret",
        f"/kernels/{REPO}/resolve/v1/..%2F..%2F..%2F..%2Fsecret",
        f"/kernels/{REPO}/resolve/..%2F..%2F../secret",
        f"/kernels/%2E%2E/{root.name}/resolve/acme/secret",
        "/kernels/acme/..%2F..%2Fsecret/resolve/v1/x",
        f"/kernels/{REPO}/resolve/v1//etc/passwd",
        f"/kernels/{REPO}/resolve/v1/%00",
        f"/api/kernels/{REPO}/tree/v1/..%2F..",
        "/api/organizations/../overview",
        "/api/organizations/%2E%2E/overview",
    ):
        status, body = raw(hub, path)
        assert status in (401, 404), path
        assert b"secret\n" not in body


def raw(hub: LocalHub, path: str) -> tuple[int, bytes]:
    """GET a path exactly as written; clients tidy up dots."""
    with socket.create_connection(("127.0.0.1", hub.port), timeout=5) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: hub\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def test_other_routes_and_methods_are_not_found(hub: LocalHub) -> None:
    for method, path in (("GET", "/"), ("GET", "/api/datasets/acme/relu"), ("DELETE", f"/api/kernels/{REPO}")):
        answer = get_session().request(method, hub.url + path)
        assert answer.status_code == 404
        assert "X-Error-Code" not in answer.headers


# --- bodies ---


@pytest.mark.parametrize("method", ["HEAD", "GET"])
def test_headers_of_a_file(hub: LocalHub, api: HfApi, method: str) -> None:
    url, sha256 = f"{hub.url}/kernels/{REPO}/resolve/v1/{BUILD}", hashlib.sha256(BIG).hexdigest()
    plain = {"Accept-Encoding": "identity"}
    big = get_session().request(method, f"{url}/table.bin", headers=plain)
    small = get_session().request(method, f"{url}/layers.py", headers=plain)
    assert big.headers["ETag"] == big.headers["X-Linked-Etag"] == f'"{sha256}"'
    assert big.headers["Content-Length"] == big.headers["X-Linked-Size"] == str(len(BIG))
    assert big.headers["Accept-Ranges"] == "bytes"
    assert small.headers["ETag"] == '"e69de29bb2d1d6434b8b29ae775ad8c2e48c5391"'
    assert "X-Linked-Etag" not in small.headers
    assert big.headers["X-Repo-Commit"] == small.headers["X-Repo-Commit"] == api.kernel_info(REPO, revision="v1").sha
    assert big.content == (b"" if method == "HEAD" else BIG)


@pytest.mark.parametrize(
    ("asked", "part"), [("bytes=10-19", BIG[10:20]), ("bytes=2000-", BIG[2000:]), ("bytes=-5", BIG[-5:])]
)
def test_a_part_of_a_file_can_be_asked_for(hub: LocalHub, asked: str, part: bytes) -> None:
    url = f"{hub.url}/kernels/{REPO}/resolve/v1/{BUILD}/table.bin"
    answer = get_session().get(url, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (206, part)
    assert answer.headers["Content-Range"].endswith(f"/{len(BIG)}")
    assert (hub.requests[-1].range, hub.requests[-1].bytes_sent) == (asked, len(part))


def test_a_part_beyond_the_end_is_refused(hub: LocalHub) -> None:
    url = f"{hub.url}/kernels/{REPO}/resolve/v1/{BUILD}/table.bin"
    answer = get_session().get(url, headers={"Range": "bytes=5000-"})
    assert answer.status_code == 416
    # starlette leaves out the unit up to some release after 0.49
    assert answer.headers["Content-Range"].removeprefix("bytes ") == f"*/{len(BIG)}"


# --- the server ---


def test_requests_are_recorded(hub: LocalHub, api: HfApi) -> None:
    api.kernel_info(REPO, revision="v1")
    with pytest.raises(RevisionNotFoundError):
        api.kernel_info(REPO, revision="v9")
    first, second = hub.requests
    assert (first.method, first.path, first.status) == ("GET", "/api/kernels/acme/relu/revision/v1", 200)
    assert first.bytes_sent > 0
    assert first.range is None
    assert second.status == 404
    assert isinstance(first, RequestRecord)
    hub.clear()
    assert hub.requests == []


def test_a_hook_may_answer_in_place_of_the_server(hub: LocalHub, api: HfApi) -> None:
    def refuse(request: Request) -> Response | None:
        return JSONResponse({}, 503) if request.url.path.endswith("/refs") else None

    hub.hook = refuse
    with pytest.raises(HfHubHTTPError):
        api.list_repo_refs(REPO, repo_type="kernel")
    assert api.kernel_info(REPO).id == REPO
    hub.hook = None
    assert api.list_repo_refs(REPO, repo_type="kernel").branches
    assert [record.status for record in hub.requests] == [503, 200, 200]


def test_a_hook_may_wait(hub: LocalHub, api: HfApi) -> None:
    async def slow(_: Request) -> Response | None:
        await asyncio.sleep(0.05)
        return None

    hub.hook = slow
    started = time.monotonic()
    assert api.kernel_info(REPO).id == REPO
    assert time.monotonic() - started >= 0.05


def test_a_hook_may_reset_the_connection(hub: LocalHub) -> None:
    def reset(request: Request) -> Response | None:
        hub.reset(request)
        return Response()

    with socket.create_connection(("127.0.0.1", hub.port), timeout=5) as bystander:
        hub.hook = reset
        with pytest.raises(ConnectionResetError):
            raw(hub, "/api/whoami-v2")
        hub.hook = None
        bystander.sendall(b"GET /api/whoami-v2 HTTP/1.1\r\nHost: hub\r\n\r\n")
        assert bystander.recv(4096).startswith(b"HTTP/1.1 401")


def test_a_port_in_use_is_named(hub: LocalHub, root: Path) -> None:
    with pytest.raises(PortInUse, match=f"127.0.0.1:{hub.port} is in use: choose another port, or 0") as caught:
        LocalHub(root, port=hub.port).start()
    assert isinstance(caught.value, KernelHubError)
    assert isinstance(caught.value, OSError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_root_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfig, match="no such folder"):
        LocalHub(tmp_path / "missing").start()


def test_an_address_of_another_machine_cannot_be_taken(root: Path) -> None:
    with pytest.raises(OSError, match="assign requested address") as caught:
        LocalHub(root, host="192.0.2.1").start()
    assert not isinstance(caught.value, PortInUse)


def test_stopping_waits_neither_for_idle_connections_nor_for_hooks(root: Path) -> None:
    waiting = threading.Event()

    async def forever(_: Request) -> Response | None:
        waiting.set()
        await asyncio.Event().wait()
        return None

    with LocalHub(root) as hub, socket.create_connection(("127.0.0.1", hub.port)) as idle:
        idle.sendall(b"GET /api/whoami-v2 HTTP/1.1\r\nHost: hub\r\n\r\n")
        assert idle.recv(4096).startswith(b"HTTP/1.1 401")
        hub.hook = forever
        idle.sendall(b"GET /api/whoami-v2 HTTP/1.1\r\nHost: hub\r\n\r\n")
        assert waiting.wait(5)
        started = time.monotonic()
        hub.stop()
        assert time.monotonic() - started < 10
        with pytest.raises(ConnectionRefusedError):
            raw(hub, "/")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_server_that_cannot_start_raises_instead_of_waiting(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise OSError("no more files")

    monkeypatch.setattr("uvicorn.Config.load", broken)
    with pytest.raises(RuntimeError, match="ended before it served"):
        LocalHub(root).start()


def test_it_can_be_started_again_on_the_same_port(root: Path) -> None:
    hub = LocalHub(root)
    for _ in range(2):
        with hub:
            assert raw(hub, f"/api/kernels/{REPO}")[0] == 200


def test_many_clients_are_served_at_once(hub: LocalHub) -> None:
    answers: list[bytes] = []

    def ask() -> None:
        answers.append(raw(hub, f"/api/kernels/{REPO}/revision/v1")[1])

    threads = [threading.Thread(target=ask) for _ in range(32)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 32
    assert len(set(answers)) == 1


def test_without_its_dependencies_the_import_says_what_to_install() -> None:
    code = "import sys; sys.modules['uvicorn'] = None; import kernelhub.serve"
    package_root = str(Path(__file__).parents[1])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=package_root)
    assert "ImportError: kernelhub.serve needs starlette and uvicorn: pip install kernelhub[serve]" in done.stderr
