"""Client: requests to one Hub endpoint, tried until they succeed or cannot, and what its refusals mean."""

from __future__ import annotations

import contextlib
import json
import platform
import time
from typing import TYPE_CHECKING, Any, cast

from huggingface_hub import get_session
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from kernelhub import __version__, setting
from kernelhub.errors import (
    HubRefused,
    HubUnavailable,
    KernelHubError,
    RepositoryNotFound,
    RevisionNotFound,
    shown,
)
from kernelhub.hub.endpoint import origin, refuse_unsafe, token_for
from kernelhub.retry import RETRIED_STATUSES, Attempts, Failure, GivenUp, RetryPolicy, requested_wait
from kernelhub.transfer import Patience, Transfer, failure_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from kernelhub.transfer import Trace

_MAX_ANSWER = 32 << 20  # bytes of one answer of the API
_MEMORY = 5.0  # seconds that a failed request is remembered, so that the next ones of the same load fail faster
_BAD_TOKEN = "Invalid credentials in Authorization header"
_USER_AGENT = f"kernelhub/{__version__}; python/{platform.python_version()}"

# The HTTP library under huggingface_hub changed its name between majors; its base error is the first base here.
_TransportError = cast("type[Exception]", HfHubHTTPError.__bases__[0])


class Moved(Exception):
    """The Hub redirects a name to another one."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        self.location = location


class NoEntry(Exception):
    """The repository has no such file or folder."""


class HubClient:
    """Asks one endpoint; see ``HubIndex`` for the arguments and their errors."""

    def __init__(self, endpoint: str | None, token: str | bool | None, policy: RetryPolicy | None) -> None:
        self.name = endpoint.rstrip("/") if endpoint else setting.endpoint()
        refuse_unsafe(self.name)
        self._token = token_for(self.name, token)
        self._policy = policy or RetryPolicy.from_settings()
        self._patience = Patience.from_settings()
        self._given_up: tuple[float, GivenUp] | None = None

    def get_object(self, path: str, repo_id: str, revision: str = "") -> dict[str, Any]:
        data, _ = self.get_json(path, repo_id, revision)
        with self.readable(path):
            return dict(data)

    def get_json(self, path: str, repo_id: str, revision: str = "", query: str = "") -> tuple[Any, Any]:
        """One answer of the API at exactly this endpoint, tried until it succeeds or cannot: its JSON and response.

        A redirect is never followed silently: a name that leads elsewhere would undermine the trust decision.
        """
        url = f"{self.name}{path}?{query}" if query else f"{self.name}{path}"
        attempts = self.attempts()
        while True:
            try:
                with self.opened(url, {}, attempts.left) as (response, chunks):
                    if response.is_redirect:
                        raise Moved(response.headers.get("Location", ""))
                    if response.status_code >= 400:
                        self.refuse(response, repo_id, revision)
                    data = self._whole(chunks, path)
                break
            except Failure as failure:
                self.wait(attempts, failure)
        self._given_up = None
        content_type = response.headers.get("Content-Type")
        with self.readable(f"{path} (Content-Type {shown(content_type)})"):
            return json.loads(data), response

    def _whole(self, chunks: Iterable[bytes], path: str) -> bytes:
        data = bytearray()
        for chunk in chunks:
            data += chunk
            if len(data) > _MAX_ANSWER:
                raise HubUnavailable(self.name, f"its answer about {path} is longer than {_MAX_ANSWER} bytes")
        return bytes(data)

    @contextlib.contextmanager
    def opened(
        self, url: str, headers: Mapping[str, str], seconds: float | None
    ) -> Iterator[tuple[Any, Iterator[bytes]]]:
        """One request, and its answer as it arrives; ``seconds`` limit the whole exchange.

        Raises:
            Failure: worth another try, also while the answer is read.
            HubUnavailable: huggingface_hub is in offline mode.
        """
        all_headers = {"User-Agent": _USER_AGENT, **headers}
        if self._token is not None and origin(url) == origin(self.name):
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

    def attempts(self) -> Attempts:
        """A new request; while the last one has just failed for good, this one gets one try, or none."""
        if self._given_up is None or self._policy.clock.now() - self._given_up[0] > _MEMORY:
            return self._policy.attempts()
        if self._given_up[1].unreached:
            raise HubUnavailable(self.name, self._given_up[1].cause)
        return self._policy.attempts(tries=1)

    def wait(self, attempts: Attempts, failure: Failure) -> None:
        """Wait for the next try.

        Raises:
            HubUnavailable: there is none.
        """
        try:
            attempts.failed(failure)
        except GivenUp as error:
            self._given_up = (self._policy.clock.now(), error)
            raise HubUnavailable(self.name, error.cause) from (failure.__cause__ or failure)

    def refuse(self, response: Any, repo_id: str, revision: str, what: str = "") -> None:
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
            raise NoEntry(response.url.path)
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
    def readable(self, what: str) -> Iterator[None]:
        """An answer that is not what the Hub's API promises (a proxy's page, say) is a failed request."""
        try:
            yield
        except KernelHubError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            cause = f"it does not answer as a Hub does about {what} ({type(error).__name__}: {error})"
            raise HubUnavailable(self.name, cause) from error


def _refusal(status: int, credentials: str) -> str | None:
    """The words for a status that no second try changes; None for one without words of its own."""
    return {
        401: f"authentication is required ({credentials})",
        403: "access is forbidden",
        410: "it is gone",
        451: "it is unavailable for legal reasons",
    }.get(status)
