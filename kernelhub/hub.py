"""HubIndex: repositories as the Hub tells them; the only user of huggingface_hub.

huggingface_hub supplies endpoint handling, authentication, proxies and pagination; its errors are mapped here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import re
import threading
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote, urlsplit

from huggingface_hub import HfApi, get_session, hf_hub_url, hf_raise_for_status
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # public, but outside __all__

from kernelhub import __version__, setting
from kernelhub.errors import (
    HubUnavailable,
    IncompleteDownload,
    InvalidPath,
    InvalidRequest,
    KernelHubError,
    RepositoryNotFound,
    RevisionNotFound,
)
from kernelhub.index import Builds, ContentHash, ListedFile, Refs
from kernelhub.request import checked_repo_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from huggingface_hub.hf_api import RepoFolder

BUILD_FOLDER = "build"

_PAGE = 1000  # entries on the first page of a recursive listing
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)
_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}", re.ASCII)
_TIMEOUT = 10.0

# The HTTP library under huggingface_hub changed its name between majors; its base error is the first base here.
_TransportError = cast("type[Exception]", HfHubHTTPError.__bases__[0])


class HubIndex:
    """A Hub endpoint as an Index; every answer is asked for anew (``recorded.py`` remembers them).

    Args:
        endpoint: the Hub's address; default ``HF_ENDPOINT`` or the public Hub.
        token: an access token, None for the one that is logged in, False for none.

    Raises:
        HubUnavailable: an address that is neither https nor on this machine.
    """

    def __init__(self, endpoint: str | None = None, token: str | bool | None = None) -> None:
        self.name = endpoint.rstrip("/") if endpoint else setting.endpoint()
        _refuse_plain_http(self.name)
        self._token = token
        self._api = HfApi(endpoint=self.name, token=token, library_name="kernelhub", library_version=__version__)
        self._types: dict[str, str] = {}
        self._asking = threading.Lock()  # files are asked for in parallel, their repository's type only once

    def trusts(self, publisher: str) -> bool:
        """See Index.trusts; a publisher that is a person, not an organization, is not a trusted one."""
        try:
            overview = self._get_json(f"/api/organizations/{quote(publisher, safe='')}/overview", publisher)
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
        with self._translated(repo_id, revision):
            info = self._api.repo_info(repo_id, revision=revision, repo_type=self._type(repo_id))
        return self._checked_commit(repo_id, str(info.sha))

    def builds(self, repo_id: str, commit: str) -> Builds:
        """See Index.builds: one request, or two when the listing does not fit one page."""
        entries = list(itertools.islice(self._tree(repo_id, commit, BUILD_FOLDER, recursive=True), _PAGE))
        if len(entries) == _PAGE:
            folders = self._tree(repo_id, commit, BUILD_FOLDER, recursive=False)
            return {_below_build(entry.path)[0]: None for entry in folders if not isinstance(entry, RepoFile)}
        grouped: dict[str, list[ListedFile]] = {}
        for entry in entries:
            build, path = _below_build(entry.path)
            files = grouped.setdefault(build, [])
            if isinstance(entry, RepoFile) and path:
                files.append(self._listed(entry, path))
        return {build: tuple(files) for build, files in grouped.items() if files}

    def files(self, repo_id: str, commit: str, build: str) -> tuple[ListedFile, ...]:
        """See Index.files."""
        entries = self._tree(repo_id, commit, f"{BUILD_FOLDER}/{build}", recursive=True)
        files = [(*_below_build(entry.path), entry) for entry in entries if isinstance(entry, RepoFile)]
        return tuple(self._listed(entry, path) for folder, path, entry in files if folder == build)

    @contextlib.contextmanager
    def stream(self, repo_id: str, commit: str, path: str, offset: int = 0) -> Iterator[Iterator[bytes]]:
        """See Index.stream; the announced commit and ETag are checked before the first byte is handed out."""
        url = hf_hub_url(repo_id, path, repo_type=self._type(repo_id), revision=commit, endpoint=self.name)
        headers = self._headers()
        headers["Accept-Encoding"] = "identity"  # sizes and ranges must count the file's own bytes
        if offset:
            headers["Range"] = f"bytes={offset}-"
        timeout = setting.seconds("HF_HUB_DOWNLOAD_TIMEOUT", _TIMEOUT)
        try:
            with (
                self._translated(repo_id, commit),
                get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response,
            ):
                hf_raise_for_status(response)
                _check_headers(response, repo_id, commit, path)
                skipped = 0 if response.status_code == 206 else offset
                yield _without_start(response.iter_bytes(), skipped)
        except EntryNotFoundError as error:
            raise IncompleteDownload(repo_id, path, "the Hub lists it but does not have it") from error

    def _list_refs(self, repo_id: str, repo_type: str) -> Refs:
        try:
            data = self._get_json(f"/api/{repo_type}s/{repo_id}/refs", repo_id)
        except _Moved as moved:
            return Refs(repo_type=repo_type, moved_to=moved.destination)
        self._types[repo_id] = repo_type
        with self._readable(f"the branches of {repo_id}"):
            branches, tags = ({ref["name"]: ref["targetCommit"] for ref in data[kind]} for kind in ("branches", "tags"))
        for commit in (*branches.values(), *tags.values()):
            self._checked_commit(repo_id, commit)
        return Refs(branches, tags, repo_type)

    def _get_json(self, path: str, repo_id: str) -> dict[str, Any]:
        """One GET of the API at exactly this endpoint; a redirect is never followed silently.

        Before 2.0 huggingface_hub asks for publishers at its own default endpoint whatever it was given, and it
        follows the redirect of a renamed repository without telling: both would undermine the trust decision.
        """
        with self._translated(repo_id):
            response = get_session().get(
                f"{self.name}{path}", headers=self._headers(), timeout=_TIMEOUT, follow_redirects=False
            )
            if response.is_redirect:
                raise _Moved(_repository_in(response.headers.get("Location", ""), path))
            hf_raise_for_status(response)
        with self._readable(path):
            return dict(response.json())

    def _headers(self) -> dict[str, str]:
        headers: dict[str, str] = build_hf_headers(
            token=self._token, library_name="kernelhub", library_version=__version__
        )
        return headers

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

    def _tree(self, repo_id: str, commit: str, path: str, *, recursive: bool) -> Iterator[RepoFile | RepoFolder]:
        try:
            with self._translated(repo_id, commit), self._readable(f"the files of {repo_id}"):
                yield from self._api.list_repo_tree(
                    repo_id, path, recursive=recursive, revision=commit, repo_type=self._type(repo_id)
                )
        except EntryNotFoundError:
            return

    def _listed(self, entry: RepoFile, path: str) -> ListedFile:
        size, digest = (entry.size, entry.blob_id) if entry.lfs is None else (entry.lfs.size, entry.lfs.sha256)
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not _ETAG.fullmatch(digest):
            raise HubUnavailable(self.name, f"it lists {entry.path!r} with size {size!r} and content hash {digest!r}")
        return ListedFile(path, size, ContentHash("git" if entry.lfs is None else "sha256", digest))

    def _checked_commit(self, repo_id: str, commit: object) -> str:
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise HubUnavailable(self.name, f"it names {commit!r} as a commit of {repo_id}, not 40 hex digits")
        return commit

    @contextlib.contextmanager
    def _readable(self, what: str) -> Iterator[None]:
        """An answer that is not what the Hub's API promises (a proxy's page, say) is a failed request."""
        try:
            yield
        except (KernelHubError, HfHubHTTPError):
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            cause = f"it does not answer as a Hub does about {what} ({type(error).__name__}: {error})"
            raise HubUnavailable(self.name, cause) from error

    @contextlib.contextmanager
    def _translated(self, repo_id: str, revision: str = "") -> Iterator[None]:
        """Turn huggingface_hub's errors into ours; a missing folder passes as EntryNotFoundError."""
        try:
            yield
        except GatedRepoError as error:
            raise RepositoryNotFound(repo_id, self.name, "it is gated and this account has no access") from error
        except RepositoryNotFoundError as error:
            raise RepositoryNotFound(repo_id, self.name) from error
        except RevisionNotFoundError as error:
            raise RevisionNotFound(repo_id, revision, reason=f"at {self.name}") from error
        except EntryNotFoundError:
            raise
        except OfflineModeIsEnabled as error:
            raise HubUnavailable(self.name, "huggingface_hub is in offline mode") from error
        except HfHubHTTPError as error:
            raise self._http_failure(repo_id, error) from error
        except _TransportError as error:
            raise HubUnavailable(self.name, _root_cause(error)) from error

    def _http_failure(self, repo_id: str, error: HfHubHTTPError) -> Exception:
        status = error.response.status_code
        if status == 404:
            return RepositoryNotFound(repo_id, self.name)
        return HubUnavailable(self.name, f"HTTP {status} for {urlsplit(str(error.response.url)).path}")


class _Moved(Exception):
    """The Hub redirects a repository to another one."""

    def __init__(self, destination: str) -> None:
        super().__init__(destination)
        self.destination = destination


def _repository_in(location: str, path: str) -> str:
    """The ``org/name`` that a redirect of ``/api/kernels/<org>/<name>/refs`` leads to."""
    parts = urlsplit(location).path.strip("/").split("/")
    try:
        return checked_repo_id("/".join(parts[2:4]) if parts[0] == "api" else "")
    except InvalidRequest as error:
        raise HubUnavailable(path, f"redirected to {location!r}, which is not a repository") from error


def _refuse_plain_http(endpoint: str) -> None:
    """Plain http is for this machine only: anyone between could swap code, and would see the token (S-20)."""
    parts = urlsplit(endpoint)
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


def _check_headers(response: Any, repo_id: str, commit: str, path: str) -> None:
    """The commit that the Hub says it serves must be the one asked for, and the ETag a content hash (S-22)."""
    served = _first_header(response, "X-Repo-Commit")
    if served is not None and served != commit:
        raise IncompleteDownload(repo_id, path, f"header X-Repo-Commit is {served!r}, asked for {commit}")
    etag = _first_header(response, "X-Linked-Etag") or _first_header(response, "ETag")
    plain = (etag or "").strip('"')
    if not _ETAG.fullmatch(plain):
        raise IncompleteDownload(repo_id, path, f"header ETag is {etag!r}, not a content hash")


def _first_header(response: Any, name: str) -> str | None:
    """A header of the Hub's own answer, which comes before any redirect to a content host."""
    answers = [*response.history, response]
    return next((answer.headers[name] for answer in answers if name in answer.headers), None)


def _without_start(chunks: Iterable[bytes], count: int) -> Iterator[bytes]:
    """Drop the first ``count`` bytes: a server that ignores Range sends the file from its start."""
    for chunk in chunks:
        if count < len(chunk):
            yield chunk[count:]
        count = max(0, count - len(chunk))


def _root_cause(error: BaseException) -> str:
    """One line about the deepest exception of a chain."""
    while error.__cause__ or error.__context__:
        error = cast("BaseException", error.__cause__ or error.__context__)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
