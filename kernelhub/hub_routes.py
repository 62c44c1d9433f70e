"""Hub routes: what the Hub answers to each request, over a folder of repositories. `kernelhub.serve` runs them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, JSONResponse, RedirectResponse, Response

from kernelhub.errors import InvalidConfig
from kernelhub.repository_folder import Commit, Entry, File, HubFolder, RepositoryFolder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from starlette.requests import Request
    from starlette.types import Scope

_NO_TOKEN = "Invalid username or password."
_UNKNOWN_TOKEN = "Invalid credentials in Authorization header"
_SMALL = 256 << 10  # bytes of a file that is answered from memory


async def answer(request: Request, folder: HubFolder, page_size: int) -> Response:
    """The Hub's answer to one request; ``page_size`` is the number of entries on a page of a listing."""
    path = request.scope["raw_path"].decode("ascii")
    for methods, pattern, handler in _ROUTES:
        if request.method in methods.split() and (match := pattern.fullmatch(path)):
            values = {name: unquote(value or "") for name, value in match.groupdict().items()}
            call = _Call(request, await request.body(), values, folder, page_size)
            return await run_in_threadpool(_answered, handler, call)
    return _refusal(404, None, "Sorry, we can't find the page you are looking for.")


def target(scope: Scope) -> str:
    """Path and query of a request, as sent."""
    path, query = (scope[part].decode("ascii") for part in ("raw_path", "query_string"))
    return f"{path}?{query}" if query else f"{path}"


class _Answered(Exception):
    """Carries the response that ends a handler early."""

    def __init__(self, response: Response) -> None:
        super().__init__(response.status_code)
        self.response = response


@dataclass(frozen=True)
class _Call:
    """One request to a route: what the pattern found in the path, decoded, and what is needed to answer."""

    request: Request
    body: bytes
    found: Mapping[str, str]
    folder: HubFolder
    page_size: int

    @property
    def repo_id(self) -> str:
        return f"{self.found['org']}/{self.found['name']}"

    def repository(self) -> RepositoryFolder:
        """The repository that the path names, of the type that it names, unless it is private."""
        repository = self.folder.repository(self.repo_id)
        settings = None if repository is None else repository.settings
        kind = "kernel" if self.found["plural"].startswith("kernels") else "model"
        if repository is None or settings is None or settings.private or settings.type != kind:
            # As on the Hub, which does not tell a stranger whether a repository is private or missing.
            status, message = (404, "Repository not found") if self.has_token() else (401, _NO_TOKEN)
            raise _Answered(_refusal(status, "RepoNotFound", message))
        if settings.redirect is not None:
            new = target(self.request.scope).replace(f"/{self.repo_id}", f"/{settings.redirect}", 1)
            raise _Answered(RedirectResponse(new, 307))
        return repository

    def commit(self, repository: RepositoryFolder) -> Commit:
        revision = self.found.get("revision") or "main"
        if (commit := repository.commit(revision)) is None:
            raise _Answered(_refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}"))
        return commit

    def flag(self, name: str) -> bool:
        return self.request.query_params.get(name, "").lower() in ("1", "true")

    def has_token(self) -> bool:
        return "authorization" in self.request.headers


def _answered(handler: Callable[[_Call], Response], call: _Call) -> Response:
    try:
        return handler(call)
    except _Answered as early:
        return early.response
    except InvalidConfig as error:
        return _refusal(500, None, str(error))


def _refusal(status: int, code: str | None, message: str, **headers: str) -> Response:
    """An error as huggingface_hub reads it: ``X-Error-Code`` picks the class of the exception."""
    headers["X-Error-Message"] = message.encode("unicode_escape").decode()  # it may quote bytes of a path
    if code is not None:
        headers["X-Error-Code"] = code
    return JSONResponse({"error": message}, status, headers)


def _info(call: _Call) -> Response:
    repository = call.repository()
    commit = call.commit(repository)
    answer = {
        "id": call.repo_id,
        "author": call.found["org"],
        "sha": commit.id,
        "lastModified": _date(commit),
        "private": False,
        "gated": "auto" if repository.settings.gated else False,
        "likes": 0,
        "downloads": 0,
    }
    if repository.settings.type == "model":
        files = [path for path, entry in commit.entries.items() if isinstance(entry, File)]
        answer |= {"modelId": call.repo_id, "tags": [], "siblings": [{"rfilename": path} for path in files]}
    return JSONResponse(answer)


def _refs(call: _Call) -> Response:
    repository = call.repository()
    heads, tags = _named("refs/heads", repository.branches()), _named("refs/tags", repository.tags())
    pull_requests: dict[str, Any] = {"pullRequests": []} if call.flag("include_prs") else {}
    return JSONResponse({"branches": heads, "converts": [], "tags": tags, **pull_requests})


def _named(kind: str, commits: Mapping[str, Commit]) -> list[dict[str, str]]:
    return [{"name": name, "ref": f"{kind}/{name}", "targetCommit": at.id} for name, at in commits.items()]


def _tree(call: _Call) -> Response:
    commit = call.commit(call.repository())
    listing = commit.listing(call.found["path"], recursive=call.flag("recursive"))
    if listing is None:
        raise _Answered(_no_entry(call, commit))
    cursor = call.request.query_params.get("cursor", "")
    start = int(cursor) if cursor.isdecimal() else 0
    end = start + call.page_size
    expand = commit if call.flag("expand") else None
    rows = [_row(path, entry, expand) for path, entry in listing[start:end]]
    return JSONResponse(rows, headers=_next_page(call, end) if end < len(listing) else None)


def _next_page(call: _Call, start: int) -> dict[str, str]:
    url, query = call.request.url, dict(call.request.query_params) | {"cursor": str(start)}
    path = call.request.scope["raw_path"].decode("ascii")
    return {"Link": f'<{url.scheme}://{url.netloc}{path}?{urlencode(query)}>; rel="next"'}


def _row(path: str, entry: Entry, expand: Commit | None) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "directory", "oid": entry.oid, "size": 0, "path": path}
    if isinstance(entry, File):
        row |= {"type": "file", "size": entry.size}
        if entry.lfs:
            row["lfs"] = {"oid": entry.sha256, "size": entry.size, "pointerSize": entry.pointer_size}
    if expand is not None:
        row["lastCommit"] = {"id": expand.id, "title": "served from a folder", "date": _date(expand)}
    return row


def _paths_info(call: _Call) -> Response:
    commit = call.commit(call.repository())
    form = parse_qs(call.body.decode())
    expand = commit if form.get("expand") in (["true"], ["True"]) else None
    found = [(path, commit.entries[path]) for path in form.get("paths", []) if path in commit.entries]
    return JSONResponse([_row(path, entry, expand) for path, entry in found])


def _resolve(call: _Call) -> Response:
    repository = call.repository()
    commit = call.commit(repository)
    file = commit.entries.get(call.found["path"])
    if repository.settings.gated:
        message = f"Access to {call.repo_id} is restricted."
        return _refusal(403 if call.has_token() else 401, "GatedRepo", message)
    if not isinstance(file, File):
        raise _Answered(_no_entry(call, commit))
    headers = {"ETag": f'"{file.etag}"', "X-Repo-Commit": commit.id}
    if file.lfs:
        headers |= {"X-Linked-Etag": f'"{file.etag}"', "X-Linked-Size": str(file.size)}
    kind, status = "application/octet-stream", file.body.stat()
    if status.st_size <= _SMALL and "range" not in call.request.headers:  # read here: no more turns between threads
        return Response(file.body.read_bytes(), headers=headers | {"Accept-Ranges": "bytes"}, media_type=kind)
    return FileResponse(file.body, headers=headers, media_type=kind, stat_result=status)


def _no_entry(call: _Call, commit: Commit) -> Response:
    path = call.found["path"]
    headers = {"X-Repo-Commit": commit.id}
    return _refusal(404, "EntryNotFound", f"{path} does not exist on {call.found['revision']}", **headers)


def _organization(call: _Call) -> Response:
    name = call.found["org"]
    if (settings := call.folder.organization(name)) is None:
        return _refusal(404, None, "This organization does not exist")
    defaults = {"name": name, "fullname": name, "avatarUrl": "", "trustedKernelPublisher": False}
    return JSONResponse(defaults | settings)


def _whoami(call: _Call) -> Response:
    return _refusal(401, None, _UNKNOWN_TOKEN if call.has_token() else _NO_TOKEN)


def _date(commit: Commit) -> str:
    date = datetime.fromtimestamp(commit.modified, timezone.utc)
    return date.isoformat(timespec="milliseconds").replace("+00:00", "Z")


_REPO = r"(?P<org>[^/]+)/(?P<name>[^/]+)"
_API = rf"/api/(?P<plural>kernels|models)/{_REPO}"
_REVISION = r"(?P<revision>[^/]+)"
# Matched against the path as sent: a quoted slash in a revision (refs%2Fheads%2Fv1) does not divide it.
_ROUTES: tuple[tuple[str, re.Pattern[str], Callable[[_Call], Response]], ...] = (
    ("GET HEAD", re.compile(rf"{_API}(/revision/{_REVISION})?"), _info),
    ("GET HEAD", re.compile(rf"{_API}/refs"), _refs),
    ("GET HEAD", re.compile(rf"{_API}/tree/{_REVISION}(/(?P<path>.*))?"), _tree),
    ("POST", re.compile(rf"{_API}/paths-info/{_REVISION}"), _paths_info),
    ("GET HEAD", re.compile(r"/api/organizations/(?P<org>[^/]+)/overview"), _organization),
    ("GET HEAD", re.compile(r"/api/whoami-v2"), _whoami),
    ("GET HEAD", re.compile(rf"/(?P<plural>kernels/)?{_REPO}/resolve/{_REVISION}/(?P<path>.+)"), _resolve),
)
