"""Body: one file of a repository as it arrives, over redirects, interruptions and servers that ignore ranges."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from kernelhub.errors import HubUnavailable, IncompleteDownload, shown
from kernelhub.hub.client import NoEntry
from kernelhub.hub.endpoint import origin
from kernelhub.index import CONTENT_HASH
from kernelhub.retry import Failure

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from kernelhub.hub.client import HubClient
    from kernelhub.index import ListedFile
    from kernelhub.retry import Attempts

_REDIRECTS = 5
_PROGRESS = 1 << 20  # a try that brings this many bytes of a body was worth it: tries are counted anew
_RANGE = re.compile(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)", re.ASCII)


class Wanted(NamedTuple):
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


class _NoRanges(Failure):
    """The server does not serve the rest of this body: it has to be read from its start again."""


class Body:
    """The bytes of a wanted file, from any position on; an interrupted body goes on where it stopped."""

    def __init__(self, client: HubClient, url: str, wanted: Wanted) -> None:
        self._client = client
        self._url = url
        self._wanted = wanted

    def chunks(self, offset: int) -> Generator[bytes, None, None]:
        """See Index.stream.

        The announced commit, ETag and size of each answer are checked before its first byte is handed out (S-22).
        """
        wanted = self._wanted
        attempts = self._client.attempts()
        size = None if wanted.expected is None else wanted.expected.size
        position = kept = offset
        ranges = True
        while True:
            try:
                with self._content(position if ranges else 0) as content:
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
                self._next_try(attempts, failure, position, size)

    def _next_try(self, attempts: Attempts, failure: Failure, position: int, size: int | None) -> None:
        try:
            self._client.wait(attempts, failure)
        except HubUnavailable as error:
            if position == 0:
                raise
            raise self._wanted.wrong(f"{position} bytes, {size} were announced: {error.cause}") from error

    @contextlib.contextmanager
    def _content(self, position: int) -> Iterator[_Content]:
        """One try to read a file from ``position`` on, over the redirects to where it is kept (R21)."""
        url, wanted = self._url, self._wanted
        headers = {"Accept-Encoding": "identity"}  # sizes and ranges must count the file's own bytes
        if position:
            headers["Range"] = f"bytes={position}-"
        answers: list[Any] = []
        while len(answers) <= _REDIRECTS:
            with self._client.opened(url, headers, None) as (response, chunks):
                answers.append(response)
                if not response.is_redirect:
                    self._check_status(response, position, redirected=len(answers) > 1)
                    _check_headers(answers, wanted)
                    yield _content_of(response, chunks, wanted, position)
                    return
            url = self._redirect_target(response)
        raise wanted.wrong(f"more than {_REDIRECTS} redirects")

    def _check_status(self, response: Any, position: int, *, redirected: bool) -> None:
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
            self._client.refuse(response, self._wanted.repo_id, self._wanted.commit, shown(self._wanted.path))
        except NoEntry as error:
            raise self._wanted.wrong("the Hub lists it but does not have it") from error

    def _redirect_target(self, response: Any) -> str:
        """Where a file is kept: on any host over https, else where it was asked for; only the host is ever shown."""
        here = str(response.url)
        target: str = urljoin(here, str(response.headers.get("Location", "")))
        if urlsplit(target).scheme != "https" and origin(target) != origin(here):
            parts = urlsplit(target)
            where = shown(f"{parts.scheme}://{parts.hostname}")
            raise self._wanted.wrong(f"redirected to {where}, which is neither https nor the host that was asked")
        return target


def _check_headers(answers: list[Any], wanted: Wanted) -> None:
    """The commit that the Hub says it serves must be the one asked for, and the ETag the listed hash (S-22).

    A listing may promise another kind of hash than the ETag has; then the body alone decides.
    """
    served = _first_header(answers, "X-Repo-Commit")
    if served is not None and served != wanted.commit:
        raise wanted.wrong(f"header X-Repo-Commit is {shown(served)}, asked for {wanted.commit}")
    etag = _first_header(answers, "X-Linked-Etag") or _first_header(answers, "ETag")
    plain = (etag or "").strip('"')
    if not CONTENT_HASH.fullmatch(plain):
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


def _content_of(response: Any, chunks: Iterator[bytes], wanted: Wanted, position: int) -> _Content:
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
