"""What a Hub says, and what it must not be believed."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import http.server
import json
import logging
import os
import pickle
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import traceback
import urllib.request
from typing import TYPE_CHECKING, Any

import pytest
from conftest import settle
from huggingface_hub import close_session
from kernel_repository import trust, write_build
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse

from kernelhub import load_kernel
from kernelhub.errors import (
    DigestMismatch,
    HubRefused,
    HubUnavailable,
    IncompleteDownload,
    InvalidPath,
    KernelHubError,
    RepositoryNotFound,
    RevisionNotFound,
)
from kernelhub.hub import HubIndex
from kernelhub.request import KernelRequest
from kernelhub.serve import LocalHub, PortInUse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from pathlib import Path

    from starlette.requests import Request

    from kernelhub.session import Session

REPO = "acme/relu"
TOKEN = "hf_neverShownToAnybody"
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
    """REF huggingface/kernels#640: a recursive listing of hundreds of builds, page by page."""
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


def test_r_19_a_gated_repository_says_so(root: Path, session: Session) -> None:
    settings(root, REPO, gated=True)
    with pytest.raises(RepositoryNotFound, match=r"it is gated.*hf auth login"):
        load_kernel(REPO, session=session)


def test_r_19_a_private_repository_is_not_found(root: Path, session: Session) -> None:
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
def test_r_14_s_22_a_wrong_header_is_an_error_that_names_it(
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


def test_r_14_s_22_a_missing_etag_is_an_error(root: Path, hub: LocalHub, session: Session) -> None:
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


@pytest.mark.parametrize("status", [400, 429, 503])
@pytest.mark.parametrize("part", ["/refs", "/tree/", "/overview", "/torch-cpu/__init__.py"])
def test_an_error_of_the_hub_is_typed_and_names_the_status(
    part: str, status: int, root: Path, hub: LocalHub, session: Session
) -> None:
    hub.hook = answering(part, lambda: Response(status_code=status))
    with pytest.raises(HubUnavailable, match=f"HTTP {status} for /"):
        load_kernel(REPO, session=session)
    assert not list(session.store.builds())


def test_a_hub_that_is_not_there_is_told_with_its_cause(tmp_path: Path, hub: LocalHub, session: Session) -> None:
    hub.stop()
    with pytest.raises(HubUnavailable, match=r"at http://127\.0\.0\.1:\d+: .*[Rr]efused"):
        load_kernel(REPO, session=session)


def test_r_19_a_listed_file_that_is_not_there_is_told(
    root: Path, hub: LocalHub, session: Session, change_tree: Any
) -> None:
    row = {"type": "file", "oid": "a" * 40, "size": 1, "path": "build/torch-cpu/gone.py"}
    change_tree(REPO, lambda rows: rows.append(row))
    with pytest.raises(IncompleteDownload, match=r"gone\.py.*the Hub lists it but does not have it"):
        load_kernel(REPO, session=session)


# Retries


@pytest.mark.parametrize("status", [408, 429, 500, 502, 503, 504])
@pytest.mark.parametrize("part", ["/overview", "/refs", "/tree/", "/revision/", "/torch-cpu/v.py"])
def test_r_18_a_busy_hub_is_asked_five_times_and_never_more(
    part: str, status: int, hub: LocalHub, index: HubIndex, asked: Callable[[], list[str]]
) -> None:
    commit = index.refs(REPO).branches["v1"]
    asked()
    hub.hook = answering(part, lambda: Response(status_code=status))
    ask: dict[str, Callable[[], object]] = {
        "/overview": lambda: index.trusts("acme"),
        "/refs": lambda: index.refs(REPO),
        "/tree/": lambda: index.builds(REPO, commit),
        "/revision/": lambda: index.commit(REPO, "refs/pr/1"),
        "/torch-cpu/v.py": lambda: read(index, commit, "v.py"),
    }
    with pytest.raises(HubUnavailable, match=rf"HTTP {status} for /.* \(5 tries\)"):
        ask[part]()
    assert len(asked()) == 5


def test_r_16_a_load_waits_as_long_as_it_is_asked_to_and_succeeds(root: Path, hub: LocalHub, session: Session) -> None:
    asked: list[float] = []

    def hook(request: Request) -> Response | None:
        if "/torch-cpu/v.py" not in request.url.path or asked:
            return None
        asked.append(time.monotonic())
        return Response(status_code=429, headers={"Retry-After": "1"})

    hub.hook = hook
    assert load_kernel(REPO, session=session).ONE == 1
    assert time.monotonic() - asked[0] >= 1


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("100000", r"asks to wait 100000 s, more than the 60 s that KERNELHUB_RETRY_AFTER_CAP allows"),
        ("-5", r"\(5 tries\)"),
        ("soon", r"\(5 tries\)"),
        ("Thu, 01 Jan 1970 00:00:00 GMT", r"\(5 tries\)"),
    ],
)
def test_r_17_an_absurd_wait_is_an_error_and_nonsense_is_ignored(
    value: str, words: str, root: Path, hub: LocalHub, session: Session
) -> None:
    hub.hook = answering("/refs", lambda: Response(status_code=429, headers={"Retry-After": value}))
    with pytest.raises(HubUnavailable, match=f"HTTP 429 for /.*{words}"):
        load_kernel(REPO, session=session)


def read(index: HubIndex, commit: str, name: str, **keywords: Any) -> bytes:
    with index.stream(REPO, commit, f"build/torch-cpu/{name}", **keywords) as chunks:
        return b"".join(chunks)


@pytest.mark.parametrize(("status", "words"), [(403, "access is forbidden"), (410, "it is gone"), (451, "legal")])
@pytest.mark.parametrize("part", ["/refs", "/tree/", "/overview", "/torch-cpu/__init__.py"])
def test_r_19_a_refusal_is_final_and_has_its_own_words(
    part: str, status: int, words: str, root: Path, hub: LocalHub, session: Session, asked: Callable[[], list[str]]
) -> None:
    hub.hook = answering(part, lambda: Response(status_code=status, headers={"X-Error-Message": "no \x1b[2J"}))
    with pytest.raises(HubRefused, match=rf"{words}.*it says 'no .x1b\[2J' \(HTTP {status}\)"):
        load_kernel(REPO, session=session)
    assert sum(part in request for request in asked()) == 1


@pytest.mark.parametrize(("token", "words"), [(False, "no access token was sent"), ("hf_x", "token is not accepted")])
def test_r_19_a_missing_or_wrong_token_is_told(
    token: str | bool, words: str, root: Path, hub: LocalHub, session: Session
) -> None:
    hub.hook = answering("/refs", lambda: Response(status_code=401))
    with pytest.raises(RepositoryNotFound, match=f"or a private one .*{words}"):
        HubIndex(hub.url, token).refs(REPO)
    headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
    hub.hook = answering("/refs", lambda: Response(status_code=401, headers=headers))
    with pytest.raises(HubRefused, match=f"authentication is required .*{words}.*it says 'Invalid credentials"):
        HubIndex(hub.url, token).refs(REPO)


def test_after_a_request_failed_for_good_the_next_ones_fail_sooner(
    hub: LocalHub, index: HubIndex, asked: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.hook = lambda request: Response(status_code=503)
    for tries in (5, 1, 1):
        asked()
        with pytest.raises(HubUnavailable):
            index.trusts("acme")
        assert len(asked()) == tries
    hub.hook = None
    assert index.trusts("acme")
    hub.hook = lambda request: Response(status_code=503)
    asked()
    with pytest.raises(HubUnavailable):
        index.trusts("acme")
    assert len(asked()) == 5


# R48: causes


def failing(endpoint: str, **environment: str) -> str:
    """The cause that a new process tells, which took less than 15 seconds: huggingface_hub keeps its session."""
    code = (
        "import sys, kernelhub.errors, kernelhub.hub as hub\n"
        "index = hub.HubIndex(sys.argv[1], token=False)\n"
        "for ask in (lambda: index.trusts('acme'), lambda: index.refs('acme/relu')):\n"
        "    try: ask()\n"
        "    except kernelhub.errors.HubUnavailable as error: print(error.cause)\n"
    )
    begun = time.monotonic()
    command = [sys.executable, "-c", code, endpoint]
    result = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=True)
    assert time.monotonic() - begun < 15
    first, second = result.stdout.splitlines()
    assert first == second
    return first


def test_r_48_a_refused_connection_is_told() -> None:
    assert re.search(r"connection refused by 127\.0\.0\.1:9: .*\(2 tries\)$", failing("http://127.0.0.1:9"))


def test_r_48_a_name_that_does_not_resolve_is_told() -> None:
    cause = failing("https://nothing.invalid")
    assert re.search(r"^DNS: no address for nothing\.invalid: gaierror.*\(2 tries\)$", cause)


def test_r_48_a_proxy_that_is_not_there_is_told() -> None:
    cause = failing("https://hub.example", HTTPS_PROXY="http://user:secret@127.0.0.1:9")
    assert re.search(r"^connection refused by hub\.example, through the proxy of https_proxy: .*\(2 tries\)$", cause)
    assert "secret" not in cause


def test_r_48_a_proxy_that_refuses_is_told(hub: LocalHub) -> None:
    """REF huggingface/huggingface_hub#3603: the variables for proxies were no longer read."""
    hub.hook = lambda request: Response(status_code=407)
    cause = failing("https://hub.example", HTTPS_PROXY=hub.url)
    assert re.search(r"^the proxy refused the connection to hub\.example: ProxyError: 407 .*\(1 try\)$", cause)


def test_r_48_a_connection_that_nobody_accepts_ends_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        port = full.getsockname()[1]
        waiting = [socket.socket() for _ in range(4)]
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
        cause = failing(f"http://127.0.0.1:{port}", KERNELHUB_READ_TIMEOUT="1")
        for one in waiting:
            one.close()
    assert re.search(r"^timeout: no connection .*\(2 tries\)$", cause)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *names, *files]
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    subprocess.run(command, check=True, capture_output=True)
    return key, certificate


class Content(http.server.BaseHTTPRequestHandler):
    """A content host over TLS: serves one body and remembers what it was sent."""

    body = b"ONE = 1\n"
    seen: list[dict[str, str]]

    def do_GET(self) -> None:
        self.seen.append(dict(self.headers.items()))
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def content_host(certificate: tuple[Path, Path]) -> Iterator[tuple[str, list[dict[str, str]]]]:
    seen: list[dict[str, str]] = []
    handler = type("Handler", (Content,), {"seen": seen})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that hangs up is part of the test
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate[1], certificate[0])
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"https://localhost:{server.server_port}", seen
    server.shutdown()
    server.server_close()


def test_r_48_a_certificate_that_nobody_knows_is_told(content_host: tuple[str, list[dict[str, str]]]) -> None:
    """REF huggingface/huggingface_hub#3913, #2319; huggingface/transformers#17611: all failures read "check your
    connection".
    """
    cause = failing(content_host[0])
    assert re.search(r"^TLS: the connection to localhost is not secure: .*CERTIFICATE_VERIFY_FAILED.*\(1 try\)", cause)


# S-21, R21


def test_s_21_the_token_goes_to_its_own_host_only_and_is_never_shown(
    content_host: tuple[str, list[dict[str, str]]],
    certificate: tuple[Path, Path],
    root: Path,
    hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    settle()
    close_session()
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[1]))
    url, seen = content_host
    headers = {"ETag": '"' + "a" * 40 + '"', "Location": f"{url}/content?signature=hidden"}
    hub.hook = answering("/torch-cpu/__init__.py", lambda: Response(status_code=302, headers=headers))
    index = HubIndex(hub.url, token=TOKEN)
    commit = index.refs(REPO).branches["v1"]
    with caplog.at_level(logging.DEBUG):
        assert read(index, commit, "__init__.py") == Content.body
    assert [name for name in seen[0] if name.lower() == "authorization"] == []
    sent = [record.headers.get("authorization") for record in hub.requests if "harness" not in record.path]
    assert set(sent) == {f"Bearer {TOKEN}"}
    assert TOKEN not in caplog.text
    settle()
    close_session()


@pytest.mark.parametrize(
    ("variable", "endpoint_is_default", "token", "sent"),
    [
        (None, True, None, f"Bearer {TOKEN}"),
        (None, False, None, None),
        (None, False, True, f"Bearer {TOKEN}"),
        (None, False, "hf_other", "Bearer hf_other"),
        (None, True, False, None),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", True, None, None),
    ],
)
def test_s_21_a_stored_token_belongs_to_the_endpoint_of_the_environment(
    variable: str | None,
    endpoint_is_default: bool,
    token: str | bool | None,
    sent: str | None,
    root: Path,
    hub: LocalHub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    if endpoint_is_default:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
    if variable:
        monkeypatch.setenv(variable, "1")
    HubIndex(hub.url, token).refs(REPO)
    assert hub.requests[-1].headers.get("authorization") == sent


def test_s_21_an_address_with_a_password_is_refused_and_the_password_not_shown() -> None:
    with pytest.raises(HubUnavailable, match="must not hold a user or password") as caught:
        HubIndex("https://user:secret@hub.example")
    assert "secret" not in str(caught.value)


REFUSALS: dict[str, tuple[str, Callable[[], Response]]] = {
    "refused": ("/refs", lambda: Response(status_code=403)),
    "unavailable": ("/tree/", lambda: Response(status_code=500)),
    "token not accepted": ("/overview", lambda: Response(status_code=401)),
    "wrong bytes": ("/v.py", lambda: Response(b"V = 2\n", headers={"ETag": f'"{"a" * 40}"'})),
    "no Hub": ("/refs", lambda: HTMLResponse("log in")),
}


@pytest.mark.parametrize("kind", [*REFUSALS, "raises", "other files", "no build"])
def test_s_31_no_report_of_a_failure_shows_a_token_or_the_environment(
    kind: str, root: Path, hub: LocalHub, session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a crash report takes: the text, the traceback, the values of the error, the session."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("DATABASE_PASSWORD", "secretOfTheUser")
    session.token = TOKEN
    if kind in REFUSALS:
        hub.hook = answering(*REFUSALS[kind])
    files = {**FILES, "__init__.py": "raise ValueError('x')\n"} if kind == "raises" else FILES
    build = write_build(root, REPO, "v3", "torch-cuda" if kind == "no build" else "torch-cpu", files)
    if kind == "other files":
        (build / "__init__.py").write_text("ONE = 2\n")
    with pytest.raises(KernelHubError) as caught:
        load_kernel(f"{REPO}@{'v3' if kind not in REFUSALS else 'v1'}", session=session)
    text = "".join(traceback.format_exception(caught.value))
    report = f"{text} {caught.value!r} {vars(caught.value)} {pickle.dumps(caught.value)!r} {session!r}"
    assert TOKEN not in report
    assert "secretOfTheUser" not in report
    assert "acme" in str(caught.value)
    if kind == "other files":
        commit = session.resolve(KernelRequest.parse(f"{REPO}@v3")).commit[:12]
        assert f"{REPO}@{commit} torch-cpu: file '__init__.py'" in str(caught.value)


@pytest.mark.parametrize(
    "location", ["http://127.0.0.1:9/x", "http://hub.example/x", "ftp://hub.example/x", "file:///etc/passwd"]
)
def test_r_21_a_file_is_never_taken_over_plain_http_from_elsewhere(
    location: str, hub: LocalHub, index: HubIndex
) -> None:
    commit = index.refs(REPO).branches["v1"]
    hub.hook = answering("/torch-cpu/v.py", lambda: RedirectResponse(location))
    with pytest.raises(IncompleteDownload, match="which is neither https nor the host that was asked"):
        read(index, commit, "v.py")


@pytest.mark.parametrize(("hops", "works"), [(5, True), (6, False)])
def test_r_21_up_to_five_redirects_are_followed(hops: int, works: bool, hub: LocalHub, index: HubIndex) -> None:
    commit = index.refs(REPO).branches["v1"]

    def hook(request: Request) -> Response | None:
        if "v.py" not in request.url.path:
            return None
        hop = int(request.query_params.get("hop", "0"))
        return RedirectResponse(f"?hop={hop + 1}") if hop < hops else None

    hub.hook = hook
    if works:
        assert read(index, commit, "v.py") == b"V = 1\n"
        return
    with pytest.raises(IncompleteDownload, match="more than 5 redirects"):
        read(index, commit, "v.py")


# R14, R23: what is announced


def test_r_14_another_etag_than_the_listed_hash_is_an_error(root: Path, hub: LocalHub, session: Session) -> None:
    headers = {"ETag": '"' + "b" * 40 + '"'}
    hub.hook = answering("/torch-cpu/__init__.py", lambda: Response(b"ONE = 1\n", headers=headers))
    with pytest.raises(
        IncompleteDownload, match=r"header ETag is '\"b{40}\"', content hash [0-9a-f]{40} was announced"
    ):
        load_kernel(REPO, session=session)


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"Content-Length": "9"}, "header Content-Length says 9 bytes, 8 were announced"),
        ({"X-Linked-Size": "9"}, "header X-Linked-Size is '9', 8 bytes were announced"),
    ],
)
def test_r_23_listing_and_answer_have_to_agree_on_the_size(
    headers: dict[str, str], words: str, root: Path, hub: LocalHub, index: HubIndex
) -> None:
    commit = index.refs(REPO).branches["v1"]
    [listed] = [file for file in index.builds(REPO, commit)["torch-cpu"] or () if file.path == "__init__.py"]
    etag = {"ETag": f'"{listed.hash.hex}"'}
    body = b"ONE = 1\n" + b" " * ("Content-Length" in headers)
    hub.hook = answering("/torch-cpu/__init__.py", lambda: Response(body, headers={**etag, **headers}))
    with pytest.raises(IncompleteDownload, match=words):
        read(index, commit, "__init__.py", expected=listed)


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        (206, {"Content-Range": "bytes 0-7/8"}),
        (206, {}),
        (206, {"Content-Range": "bytes 3-7/8", "Content-Encoding": "gzip"}),
        (416, {"Content-Range": "bytes */8"}),
    ],
)
def test_r_15_a_range_that_is_not_the_one_asked_for_is_read_again_from_the_start(
    status: int, headers: dict[str, str], root: Path, hub: LocalHub, index: HubIndex
) -> None:
    commit = index.refs(REPO).branches["v1"]

    def hook(request: Request) -> Response | None:
        if not request.url.path.endswith("/torch-cpu/__init__.py") or "range" not in request.headers:
            return None
        return Response(gzip.compress(b" = 1\n"), status, {"ETag": '"' + "a" * 40 + '"', **headers})

    hub.hook = hook
    assert read(index, commit, "__init__.py", offset=3) == b" = 1\n"


# R22: listings


def paged(hub: LocalHub, link: Callable[[int], str], rows: Callable[[int], list[str]], pages: int = 3) -> None:
    """Serve listings of one build in pages: ``link`` is the address of a page, ``rows`` the names of its files."""

    def hook(request: Request) -> Response | None:
        if "/tree/" not in request.url.path:
            return None
        page = int(request.query_params.get("cursor", "0"))
        files = [{"type": "file", "oid": "a" * 40, "size": 1, "path": f"build/torch-cpu/{name}"} for name in rows(page)]
        headers = {"Link": f'<{link(page + 1)}>; rel="next"'} if page + 1 < pages else None
        return JSONResponse(files, headers=headers)

    hub.hook = hook


def test_r_22_pages_are_asked_for_at_the_configured_endpoint_only(hub: LocalHub, index: HubIndex) -> None:
    commit = index.refs(REPO).branches["v1"]
    paged(hub, lambda page: f"https://elsewhere.example/other?cursor={page}", lambda page: [f"f{page}.py"])
    assert [file.path for file in index.files(REPO, commit, "torch-cpu")] == ["f0.py", "f1.py", "f2.py"]


@pytest.mark.parametrize(
    ("link", "rows"), [(lambda page: "?cursor=0", lambda page: [f"f{page}"]), (lambda page: f"?cursor={page}", "same")]
)
def test_r_22_a_page_that_comes_twice_is_an_error(link: Any, rows: Any, hub: LocalHub, index: HubIndex) -> None:
    commit = index.refs(REPO).branches["v1"]
    paged(hub, link, rows if callable(rows) else lambda page: [rows])
    with pytest.raises(HubUnavailable, match="repeats itself"):
        index.files(REPO, commit, "torch-cpu")


def test_r_22_a_listing_that_lost_its_next_page_is_found_out(
    root: Path, session: Session, change_tree: Callable[..., None]
) -> None:
    """The build's own digests list what is not there."""
    change_tree(REPO, lambda rows: rows.remove(next(row for row in rows if row["path"].endswith("/v.py"))))
    with pytest.raises(DigestMismatch, match=r"'v\.py' is missing"):
        load_kernel(REPO, session=session)
    assert not list(session.store.builds())


def test_r_22_an_endless_listing_ends(hub: LocalHub, index: HubIndex) -> None:
    commit = index.refs(REPO).branches["v1"]
    names = lambda page: [f"{page}-{number}" for number in range(2000)]  # noqa: E731
    paged(hub, lambda page: f"?cursor={page}", names, pages=1000)
    with pytest.raises(HubUnavailable, match="lists more than 50000 files"):
        index.files(REPO, commit, "torch-cpu")


# R20: stalls


def stalled(hub: LocalHub, part: str) -> threading.Event:
    """Answer that request with headers and nothing else; the event is set when it came."""
    came = threading.Event()

    async def nothing() -> AsyncIterator[bytes]:
        came.set()
        await asyncio.sleep(60)
        yield b""

    body = b"blob 6\0V = 1\n"
    etag = {"ETag": f'"{hashlib.sha1(body).hexdigest()}"'}
    hub.hook = answering(part, lambda: StreamingResponse(nothing(), headers=etag))
    return came


@pytest.mark.parametrize("part", ["/refs", "/torch-cpu/v.py"])
def test_r_3_neither_ctrl_c_nor_the_end_of_the_process_waits_for_a_stalled_socket(
    part: str, root: Path, hub: LocalHub, tmp_path: Path
) -> None:
    came = stalled(hub, part)
    code = (
        "import sys; from pathlib import Path; from kernelhub import Environment, Session, load_kernel\n"
        "session = Session(cache_dir=Path(sys.argv[1]), endpoint=sys.argv[2], token=False,\n"
        "                  environment=Environment.parse('torch=2.13'))\n"
        "load_kernel('acme/relu', session=session)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "store"), hub.url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert came.wait(30)
        time.sleep(0.1)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    assert time.monotonic() - begun < 15
    assert "KeyboardInterrupt" in errors
    assert not list(tmp_path.glob("store/tmp/*"))


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
