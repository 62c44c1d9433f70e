"""HubIndex: a Hub endpoint as an Index."""

from __future__ import annotations

import contextlib
import re
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlsplit

from huggingface_hub import hf_hub_url

from kernelhub.errors import HubUnavailable, InvalidPath, InvalidRequest, RepositoryNotFound, shown
from kernelhub.hub.body import Body, Wanted
from kernelhub.hub.client import HubClient, Moved, NoEntry
from kernelhub.index import CONTENT_HASH, Builds, ContentHash, ListedFile, Refs
from kernelhub.request import checked_repo_id

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.retry import RetryPolicy

BUILD_FOLDER = "build"

_PAGE = 1000  # entries on the first page of a recursive listing
_MAX_ENTRIES = 50_000  # of one listing
_COMMIT = re.compile(r"[0-9a-f]{40}", re.ASCII)


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
        self._client = HubClient(endpoint, token, policy)
        self.name = self._client.name
        self._types: dict[str, str] = {}
        self._asking = threading.Lock()  # files are asked for in parallel, their repository's type only once

    def trusts(self, publisher: str) -> bool:
        """See Index.trusts; a publisher that is a person, not an organization, is not a trusted one."""
        try:
            overview = self._client.get_object(f"/api/organizations/{quote(publisher, safe='')}/overview", publisher)
        except (RepositoryNotFound, Moved):  # a renamed organization has to be named by its new name
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
            return self._checked_commit(repo_id, self._client.get_object(path, repo_id, revision).get("sha"))

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
        """See Index.stream; an interrupted body goes on where it stopped."""
        url = hf_hub_url(repo_id, path, repo_type=self._type(repo_id), revision=commit, endpoint=self.name)
        chunks = Body(self._client, url, Wanted(repo_id, commit, path, expected)).chunks(offset)
        try:
            yield chunks
        finally:
            chunks.close()

    def _list_refs(self, repo_id: str, repo_type: str) -> Refs:
        path = f"/api/{repo_type}s/{repo_id}/refs"
        try:
            data = self._client.get_object(path, repo_id)
        except Moved as moved:
            return Refs(repo_type=repo_type, moved_to=_repository_in(moved.location, path))
        self._types[repo_id] = repo_type
        with self._client.readable(f"the branches of {repo_id}"):
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
                    data, response = self._client.get_json(address, repo_id, commit, query)
            except NoEntry:
                return
            with self._client.readable(f"the files of {repo_id}"):
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
        if type(size) is not int or size < 0 or not isinstance(digest, str) or not CONTENT_HASH.fullmatch(digest):
            cause = f"it lists {shown(path)} with size {shown(size)} and content hash {shown(digest)}"
            raise HubUnavailable(self.name, cause)
        return path, ListedFile(path, size, ContentHash("git" if lfs is None else "sha256", digest))

    def _checked_commit(self, repo_id: str, commit: object) -> str:
        if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
            raise HubUnavailable(self.name, f"it names {shown(commit)} as a commit of {repo_id}, not 40 hex digits")
        return commit

    @contextlib.contextmanager
    def _unmoved(self, repo_id: str) -> Iterator[None]:
        """A listing that redirects, although the branches of its repository did not, is no answer."""
        try:
            yield
        except Moved as moved:
            raise HubUnavailable(self.name, f"it redirected to {shown(moved.location)} for {repo_id}") from moved


def _repository_in(location: str, path: str) -> str:
    """The ``org/name`` that a redirect of ``/api/kernels/<org>/<name>/refs`` leads to."""
    parts = urlsplit(location).path.strip("/").split("/")
    try:
        return checked_repo_id("/".join(parts[2:4]) if parts[0] == "api" else "")
    except InvalidRequest as error:
        raise HubUnavailable(path, f"redirected to {shown(location)}, which is not a repository") from error


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
