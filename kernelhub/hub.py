"""HubIndex: repositories as the Hub tells them; the only user of huggingface_hub.

huggingface_hub supplies the HTTP session (proxies, certificates, offline switch), the addresses of files and the stored
token. Retries, redirects and pagination are ours (`retry.py`, `transfer.py`), so that they never multiply with its own:
every request of the API goes to the configured endpoint, and the token to no other host.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import platform
import re
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, cast
from urllib.parse import quote, urljoin, urlsplit

from huggingface_hub import get_session, get_token, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from kernelhub import __version__, setting
from kernelhub.errors import (
    HubRefused,
    HubUnavailable,
    IncompleteDownload,
    InvalidPath,
    InvalidRequest,
    KernelHubError,
    RepositoryNotFound,
    RevisionNotFound,
    shown,
)
from kernelhub.index import Builds, ContentHash, ListedFile, Refs
from kernelhub.request import checked_repo_id
from kernelhub.retry import RETRIED_STATUSES, Attempts, Failure, GivenUp, RetryPolicy, requested_wait
from kernelhub.transfer import Patience, Transfer, failure_of

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from kernelhub.transfer import Trace

BUILD_FOLDER = "build"

_PAGE = 1000  # entries on the first page of a recursive listing
_MAX_ENTRIES = 50_000  # of one listing
_MAX_ANSWER = 32 << 20  # bytes of one answer of the API
_REDIRECTS = 5
_PROGRESS = 1 << 20  # a try that brings this many bytes of a body was worth it: tries are counted anew
_MEMORY = 5.0  # seconds that a failed request is remembered, so that the next ones of the same load fail faster
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)", re.ASCII)

# The HTTP library under huggingface_hub changed its name between majors; its base error is the first base here.
_TransportError = cast("type[Exception]", HfHubHTTPError.__bases__[0])


class _Wanted(NamedTuple):
    """A file of a repository, and what the listing says about it."""

    repo_id: str
    commit: str
    path: str
    expected: ListedFile | None

    def wrong(self, problem: str) -> IncompleteDownload:
        return IncompleteDownload(self.repo_id, self.path, problem)


class _Content(NamedTuple):
    """An answer with bytes of a file: where they start, how many the whole file has if that is told, the bytes."""

    start: int
    size: int | None
    chunks: Iterator[bytes]


class HubIndex:
    """A Hub endpoint as an Index; every answer is asked for anew (``recorded.py`` remembers them).

    Args:
        endpoint: the Hub's address; default ``HF_ENDPOINT`` or the public Hub.
        token: an access token for this endpoint; None for the one that is logged in, which belongs to ``HF_ENDPOINT``
            (or the public Hub) and is sent nowhere else; False for none.
        policy: how failed requests are tried again; default from the environment variables.

    Raises:
        HubUnavailable: an address that is neither https nor on this machine, or that holds a password.
        InvalidConfig: an environment variable is not a number in its range.
    """

    def __init__(
        self, endpoint: str | None = None, token: str | bool | None = None, policy: RetryPolicy | None = None
    ) -> None:
        self.name = endpoint.rstrip("/") if endpoint else setting.endpoint()
        _refuse_unsafe(self.name)
        self._token = _token_for(self.name, token)
        self._policy = policy or RetryPolicy.from_settings()
        self._patience = Patience.from_settings()
        self._types: dict[str, str] = {}
        self._asking = threading.Lock()  # files are asked for in parallel, their repository's type only once
        self._given_up: tuple[float, GivenUp] | None = None

    def trusts(self, publisher: str) -> bool:
        """See Index.trusts; a publisher that is a person, not an organization, is not a trusted one."""
        try:
            overview = self._get_object(f"/api/organizations/{quote(publisher, safe='')}/overview", publisher)
        except (RepositoryNotFound, _Moved):  # a renamed organization has to be named by its new name
            return False
        return overview.get("trustedKernelPublisher") is True

    def refs(self, repo_id: str, *, refresh: bool = False) -> Refs:
        """See Index.refs; a kernel that exists only as a repository of type model is found too."""
        try:
            return self._list_refs(repo_id, "kernel")
        except RepositoryNotFound as error:
            with contextlib.suppress(RepositoryNotFound):
                return self._list_refs(repo_id, "model")
            raise error from None

    def commit(self, repo_id: str, revision: str) -> str:
        """See Index.commit."""
        path = f"/api/{self._type(repo_id)}s/{repo_id}/revision/{quote(revision, safe='')}"
        with self._unmoved(repo_id):
            return self._checked_commit(repo_id, self._get_object(path, repo_id, revision).get("sha"))

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds: one request, or two when the listing does not fit one page."""
        rows, complete = next(self._tree(repo_id, commit, BUILD_FOLDER, recursive=True), ([], True))
        if not complete or len(rows) >= _PAGE:
            pages = self._tree(repo_id, commit, BUILD_FOLDER, recursive=False)
            return {_below_build(path)[0]: None for rows, _ in pages for path, file in rows if file is None}
        grouped: dict[str, list[ListedFile]] = {}
        for full_path, file in rows:
            build, path = _below_build(full_path)
            files = grouped.setdefault(build, [])
            if file is not None and path:
                files.append(file._replace(path=path))
        return {build: tuple(files) for build, files in grouped.items() if files}

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        pages = self._tree(repo_id, commit, f"{BUILD_FOLDER}/{build}", recursive=True)
        files = [(*_below_build(path), file) for rows, _ in pages for path, file in rows if file is not None]
        return tuple(file._replace(path=path) for folder, path, file in files if folder == build)

    @contextlib.contextmanager
    def stream(
        self, repo_id: str, commit: str, path: str, offset: int = 0, *, expected: ListedFile | None = None
    ) -> Iterator[Iterator[bytes]]:
        """See Index.stream; an interrupted body goes on where it stopped.

        The announced commit, ETag and size of each answer are checked before its first byte is handed out (S-22).
        """
        chunks = self._body(_Wanted(repo_id, commit, path, expected), offset)
        try:
            yield chunks
        finally:
            chunks.close()

    # Bodies

    def _body(self, wanted: _Wanted, offset: int) -> Generator[bytes, None, None]:
        attempts = self._attempts()
        size = None if wanted.expected is None else wanted.expected.size
        position = kept = offset
        ranges = True
        while True:
            try:
                with self._content(wanted, position if ranges else 0) as content:
                    size = content.size if size is None else size
                    for chunk in _without_start(content.chunks, position - content.start):
                        position += len(chunk)
                        if size is not None and position > size:
                            raise wanted.wrong(f"longer than the announced {size} bytes")
                        yield chunk
                if size is None or position == size:
                    return
                raise Failure("the body ended early")
            except Failure as failure:
                if position == size:
                    return
                ranges = ranges and not isinstance(failure, _NoRanges)
                if position - kept >= _PROGRESS:
                    attempts.progressed()
                    kept = position
                self._next_try(attempts, failure, wanted, position, size)

    def _next_try(self, attempts: Attempts, failure: Failure, wanted: _Wanted, position: int, size: int | None) -> None:
        try:
            self._wait(attempts, failure)
        except HubUnavailable as error:
            if position == 0:
                raise
            raise wanted.wrong(f"{position} bytes, {size} were announced: {error.cause}") from error

    @contextlib.contextmanager
    def _content(self, wanted: _Wanted, position: int) -> Iterator[_Content]:
        """One try to read a file from ``position`` on, over the redirects to where it is kept (R21)."""
        repo_id, commit, path, _ = wanted
        url = hf_hub_url(repo_id, path, repo_type=self._type(repo_id), revision=commit, endpoint=self.name)
        headers = {"Accept-Encoding": "identity"}  # sizes and ranges must count the file's own bytes
        if position:
            headers["Range"] = f"bytes={position}-"
        answers: list[Any] = []
        while len(answers) <= _REDIRECTS:
            with self._opened(url, headers, None) as (response, chunks):
                answers.append(response)
                if not response.is_redirect:
                    self._check_status(response, wanted, position, redirected=len(answers) > 1)
                    _check_headers(answers, wanted)
                    yield _content_of(response, chunks, wanted, position)
                    return
            url = self._redirect_target(response, wanted)
        raise wanted.wrong(f"more than {_REDIRECTS} redirects")

    def _check_status(self, response: Any, wanted: _Wanted, position: int, *, redirected: bool) -> None:
        status = response.status_code
        if status in (200, 206):
            return
        if status == 416 and position:
            raise _NoRanges("HTTP 416: no such range")
        if redirected and status in (401, 403):
            raise Failure(f"HTTP {status} from {response.url.host}, which the Hub redirects to")
        if status < 400:
            raise Failure(f"HTTP {status} for {response.url.path}")
        try:
            self._refuse(response, wanted.repo_id, wanted.commit, shown(wanted.path))
        except _NoEntry as error:
            raise wanted.wrong("the Hub lists it but does not have it") from error

    def _redirect_target(self, response: Any, wanted: _Wanted) -> str:
        """Where a file is kept: on any host over https, else where it was asked for; only the host is ever shown."""
        here = str(response.url)
        target: str = urljoin(here, str(response.headers.get("Location", "")))
        if urlsplit(target).scheme != "https" and _origin(target) != _origin(here):
            parts = urlsplit(target)
            where = shown(f"{parts.scheme}://{parts.hostname}")
            raise wanted.wrong(f"redirected to {where}, which is neither https nor the host that was asked")
        return target

    # The API

    def _list_refs(self, repo_id: str, repo_type: str) -> Refs:
        path = f"/api/{repo_type}s/{repo_id}/refs"
        try:
            data = self._get_object(path, repo_id)
        except _Moved as moved:
            return Refs(repo_type=repo_type, moved_to=_repository_in(moved.location, path))
        self._types[repo_id] = repo_type
        with self._readable(f"the branches of {repo_id}"):
            branches, tags = ({ref["name"]: ref["targetCommit"] for ref in data[kind]} for kind in ("branches", "tags"))
        for commit in (*branches.values(), *tags.values()):
            self._checked_commit(repo_id, commit)
        return Refs(branches, tags, repo_type)

    def _type(self, repo_id: str) -> str:
        """The repository's type on the Hub, which is part of every address.

        Only a repository that is where its name says is known by its type: no listing or file is ever asked for at a
        name that redirects, not even for a pinned commit (S-04).
        """
        with self._asking:
            moved_to = None if repo_id in self._types else self.refs(repo_id).moved_to
        if moved_to is not None:
            raise RepositoryNotFound(repo_id, self.name, f"it has moved to {moved_to}: ask for that name")
        return self._types[repo_id]

    def _tree(
        self, repo_id: str, commit: str, path: str, *, recursive: bool
    ) -> Iterator[tuple[list[tuple[str, ListedFile | None]], bool]]:
        """The pages of a file listing: rows of path and file (None for a folder), and whether this is the last page.

        Whatever host the link to the next page names, the page is asked for here: only its query is used (R22).
        """
        address = f"/api/{self._type(repo_id)}s/{repo_id}/tree/{quote(commit, safe='')}/{quote(path)}"
        query = f"recursive={str(recursive).lower()}&expand=false"
        queries, paths = {query}, set[str]()
        while query:
            try:
                with self._unmoved(repo_id):
                    data, response = self._get_json(address, repo_id, commit, query)
            except _NoEntry:
                return
            with self._readable(f"the files of {repo_id}"):
                query = urlsplit(response.links.get("next", {}).get("url", "")).query
                rows = [self._row(row) for row in data]
            names = {name for name, _ in rows}
            if query in queries or paths & names or len(names) < len(rows):
                raise HubUnavailable(self.name, f"its listing of {repo_id} repeats itself")
            queries.add(query)
            paths |= names
            if len(paths) > _MAX_ENTRIES:
                raise HubUnavailable(self.name, f"it lists more than {_MAX_ENTRIES} files in {repo_id}")
            yield rows, not query

    def _row(self, row: dict[str, Any]) -> tuple[str, ListedFile | None]:
        path: str = row["path"] + ""  # raises TypeError when it is no text
        if row["type"] == "directory":
            return path, None
        lfs = row.get("lfs")
        size, digest = (row["size"], row["oid"]) if lfs is None else (lfs["size"], lfs["oid"])
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _ETAG.fullmatch(digest):
            cause = f"it lists {shown(path)} with size {shown(size)} and content hash {shown(digest)}"
            raise HubUnavailable(self.name, cause)
        return path, ListedFile(path, size, ContentHash("git" if lfs is None else "sha256", digest))

    def _get_object(self, path: str, repo_id: str, revision: str = "") -> dict[str, Any]:
        data, _ = self._get_json(path, repo_id, revision)
        with self._readable(path):
            return dict(data)

    def _get_json(self, path: str, repo_id: str, revision: str = "", query: str = "") -> tuple[Any, Any]:
        """One answer of the API at exactly this endpoint, tried until it succeeds or cannot: its JSON and response.

        A redirect is never followed silently: a name that leads elsewhere would undermine the trust decision.
        """
        url = f"{self.name}{path}?{query}" if query else f"{self.name}{path}"
        attempts = self._attempts()
        while True:
            try:
                with self._opened(url, {}, attempts.left) as (response, chunks):
                    if response.is_redirect:
                        raise _Moved(response.headers.get("Location", ""))
                    if response.status_code >= 400:
                        self._refuse(response, repo_id, revision)
                    data = self._whole(chunks, path)
                break
            except Failure as failure:
                self._wait(attempts, failure)
        self._given_up = None
        content_type = response.headers.get("Content-Type")
        with self._readable(f"{path} (Content-Type {shown(content_type)})"):
            return json.loads(data), response

    def _whole(self, chunks: Iterable[bytes], path: str) -> bytes:
        data = bytearray()
        for chunk in chunks:
            data += chunk
            if len(data) > _MAX_ANSWER:
                raise HubUnavailable(self.name, f"its answer about {path} is longer than {_MAX_ANSWER} bytes")
        return bytes(data)

    def _checked_commit(self, repo_id: str, commit: object) -> str:
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise HubUnavailable(self.name, f"it names {shown(commit)} as a commit of {repo_id}, not 40 hex digits")
        return commit

    # Requests

    @contextlib.contextmanager
    def _opened(
        self, url: str, headers: Mapping[str, str], seconds: float | None
    ) -> Iterator[tuple[Any, Iterator[bytes]]]:
        """One request, and its answer as it arrives; ``seconds`` limit the whole exchange.

        Raises:
            Failure: worth another try, also while the answer is read.
            HubUnavailable: huggingface_hub is in offline mode.
        """
        all_headers = {"User-Agent": _USER_AGENT, **headers}
        if self._token is not None and _origin(url) == _origin(self.name):
            all_headers["Authorization"] = f"Bearer {self._token}"
        patience = self._patience
        timeout = (patience.connect, patience.read, patience.read, patience.read)

        def send(trace: Trace) -> contextlib.AbstractContextManager[Any]:
            try:
                session = get_session()
            except OSError as error:  # certificates that cannot be read
                raise Failure(f"the HTTP client cannot be set up: {error}") from error
            return session.stream(
                "GET", url, headers=all_headers, timeout=timeout, follow_redirects=False, extensions={"trace": trace}
            )

        until = None if seconds is None else time.monotonic() + seconds
        try:
            with Transfer(send, patience, until) as transfer:
                response = transfer.response()
                if response.status_code in RETRIED_STATUSES:
                    cause = f"HTTP {response.status_code} for {response.url.path}"
                    raise Failure(cause, wait=requested_wait(response.headers))
                yield response, transfer.chunks()
        except OfflineModeIsEnabled as error:
            raise HubUnavailable(self.name, "huggingface_hub is in offline mode") from error
        except _TransportError as error:
            raise failure_of(error, url) from error

    def _attempts(self) -> Attempts:
        """A new request; while the last one has just failed for good, this one gets one try, or none."""
        if self._given_up is None or self._policy.clock.now() - self._given_up[0] > _MEMORY:
            return self._policy.attempts()
        if self._given_up[1].unreached:
            raise HubUnavailable(self.name, self._given_up[1].cause)
        return self._policy.attempts(tries=1)

    def _wait(self, attempts: Attempts, failure: Failure) -> None:
        """Wait for the next try.

        Raises:
            HubUnavailable: there is none.
        """
        try:
            attempts.failed(failure)
        except GivenUp as error:
            self._given_up = (self._policy.clock.now(), error)
            raise HubUnavailable(self.name, error.cause) from (failure.__cause__ or failure)

    def _refuse(self, response: Any, repo_id: str, revision: str, what: str = "") -> None:
        """Raise what an answer with a status from 400 on means."""
        status, code = response.status_code, response.headers.get("X-Error-Code")
        said = response.headers.get("X-Error-Message")
        credentials = "no access token was sent" if self._token is None else "the access token is not accepted"
        if code == "GatedRepo":
            reason = credentials if status == 401 else "this account has no access"
            raise RepositoryNotFound(repo_id, self.name, f"it is gated and {reason}")
        if code == "RevisionNotFound":
            raise RevisionNotFound(repo_id, revision, reason=f"at {self.name}")
        if code == "EntryNotFound" or (status == 404 and what and code is None):
            raise _NoEntry(response.url.path)
        # The Hub does not tell a stranger whether a repository is missing or private; a publisher is no repository.
        hidden = status == 401 and code is None and said != _BAD_TOKEN and "/" in repo_id
        if status == 404 or code == "RepoNotFound" or hidden:
            reason = f"no kernel repository of that name, or a private one ({credentials})" if status == 401 else ""
            raise RepositoryNotFound(repo_id, self.name, *([reason] if reason else []))
        words = _refusal(status, credentials)
        if words is None:
            raise HubUnavailable(self.name, f"HTTP {status} for {response.url.path}")
        reason = f"{words}; it says {shown(said)}" if said else words
        raise HubRefused(what or shown(repo_id), self.name, status, reason)

    @contextlib.contextmanager
    def _unmoved(self, repo_id: str) -> Iterator[None]:
        """A listing that redirects, although the branches of its repository did not, is no answer."""
        try:
            yield
        except _Moved as moved:
            raise HubUnavailable(self.name, f"it redirected to {shown(moved.location)} for {repo_id}") from moved

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """An answer that is not what the Hub's API promises (a proxy's page, say) is a failed request."""
        try:
            yield
        except KernelHubError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            cause = f"it does not answer as a Hub does about {what} ({type(error).__name__}: {error})"
            raise HubUnavailable(self.name, cause) from error


_BAD_TOKEN = "Invalid credentials in Authorization header"
_USER_AGENT = f"kernelhub/{__version__}; python/{platform.python_version()}"


class _Moved(Exception):
    """The Hub redirects a name to another one."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


class _NoEntry(Exception):
    """The repository has no such file or folder."""


class _NoRanges(Failure):
    """The server does not serve the rest of this body: it has to be read from its start again."""


def _refusal(status: int, credentials: str) -> str | None:
    """The words for a status that no second try changes; None for one without words of its own."""
    return {
        401: f"authentication is required ({credentials})",
        403: "access is forbidden",
        410: "it is gone",
        451: "it is unavailable for legal reasons",
    }.get(status)


def _repository_in(location: str, path: str) -> str:
    """The ``org/name`` that a redirect of ``/api/kernels/<org>/<name>/refs`` leads to."""
    parts = urlsplit(location).path.strip("/").split("/")
    try:
        return checked_repo_id("/".join(parts[2:4]) if parts[0] == "api" else "")
    except InvalidRequest as error:
        raise HubUnavailable(path, f"redirected to {shown(location)}, which is not a repository") from error


def _token_for(endpoint: str, token: str | bool | None) -> str | None:
    """The token that may be sent to an endpoint: a stored one belongs to the endpoint of the environment (S-21)."""
    if isinstance(token, str):
        return token
    implicit = token is None and not setting.flag("HF_HUB_DISABLE_IMPLICIT_TOKEN")
    if token is True or (implicit and _origin(endpoint) == _origin(setting.endpoint())):
        return get_token()
    return None


def _refuse_unsafe(endpoint: str) -> None:
    """Plain http is for this machine only: anyone between could swap code, and would see the token (S-20).

    A password in an address would end up in records and messages.
    """
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.password is not None:
        plain = f"{parts.scheme}://{parts.hostname}"
        raise HubUnavailable(plain, "its address must not hold a user or password; pass token=... or set HF_TOKEN")
    if parts.scheme == "https" or (parts.scheme == "http" and _is_loopback(parts.hostname or "")):
        return
    raise HubUnavailable(endpoint, "only https is accepted (http for this machine's own addresses only)")


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _origin(url: str) -> tuple[str, str | None, int | None]:
    """Scheme, host and port: what a token belongs to."""
    parts = urlsplit(url)
    try:
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme)
    except ValueError:
        port = None
    return parts.scheme, parts.hostname, port


def _below_build(path: str) -> tuple[str, str]:
    """Split ``build/<variant>/<path>``.

    Raises:
        InvalidPath: a listing of ``build`` names something elsewhere.
    """
    top, _, below = path.partition("/")
    if top != BUILD_FOLDER:
        raise InvalidPath(path, f"listed in {BUILD_FOLDER!r}, but is not there", f"{BUILD_FOLDER}/<variant>/<file>")
    build, _, rest = below.partition("/")
    return build, rest


def _check_headers(answers: list[Any], wanted: _Wanted) -> None:
    """The commit that the Hub says it serves must be the one asked for, and the ETag the listed hash (S-22).

    A listing may promise another kind of hash than the ETag has; then the body alone decides.
    """
    served = _first_header(answers, "X-Repo-Commit")
    if served is not None and served != wanted.commit:
        raise wanted.wrong(f"header X-Repo-Commit is {shown(served)}, asked for {wanted.commit}")
    etag = _first_header(answers, "X-Linked-Etag") or _first_header(answers, "ETag")
    plain = (etag or "").strip('"')
    if not _ETAG.fullmatch(plain):
        kind = f" (Content-Type {shown(answers[-1].headers.get('Content-Type'))})" if etag is None else ""
        raise wanted.wrong(f"header ETag is {shown(etag)}, not a content hash{kind}")
    promised = plain if wanted.expected is None else wanted.expected.hash.hex
    if len(plain) == len(promised) and plain != promised:
        raise wanted.wrong(f"header ETag is {shown(etag)}, content hash {promised} was announced")
    linked = _first_header(answers, "X-Linked-Size")
    if linked is not None and wanted.expected is not None and linked != str(wanted.expected.size):
        raise wanted.wrong(f"header X-Linked-Size is {shown(linked)}, {wanted.expected.size} bytes were announced")


def _first_header(answers: list[Any], name: str) -> str | None:
    """A header of the Hub's own answer, which comes before any redirect to a content host."""
    return next((answer.headers[name] for answer in answers if name in answer.headers), None)


def _content_of(response: Any, chunks: Iterator[bytes], wanted: _Wanted, position: int) -> _Content:
    """What part of the file an answer holds; a server may ignore the range, or compress in spite of everything.

    Raises:
        IncompleteDownload: it announces another size than the listing (R23).
        _NoRanges: the range is not the one that was asked for, or one of compressed bytes.
    """
    encoded = response.headers.get("Content-Encoding", "identity").lower() != "identity"
    if response.status_code == 206:
        found = _RANGE.fullmatch(response.headers.get("Content-Range", "").strip())
        if encoded or found is None or int(found[1]) != position:
            raise _NoRanges(f"header Content-Range is {shown(response.headers.get('Content-Range'))}")
        start, header, told = position, "Content-Range", found[2]
    else:
        start, header, told = 0, "Content-Length", response.headers.get("Content-Length", "")
    size = int(told) if told.isdecimal() and not encoded else None
    if size is not None and wanted.expected is not None and size != wanted.expected.size:
        raise wanted.wrong(f"header {header} says {size} bytes, {wanted.expected.size} were announced")
    return _Content(start, size, chunks)


def _without_start(chunks: Iterable[bytes], count: int) -> Iterator[bytes]:
    """Drop the first ``count`` bytes: a server that ignores Range sends the file from its start."""
    for chunk in chunks:
        if count < len(chunk):
            yield chunk[count:]
        count = max(0, count - len(chunk))
