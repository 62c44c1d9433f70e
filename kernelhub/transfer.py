"""Transfer: one HTTP exchange in a thread of its own, watched from outside.

A timeout of the socket alone does not catch a server that sends one byte a second, nor a name server that does not
answer. Here the network is read in a daemon thread, and whoever wants the data waits for it with limits: a stalled
server costs a bounded time, and neither Ctrl-C nor the end of the process has to wait for it. As a side effect the next
bytes arrive while the last ones are hashed and written.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

from kernelhub import setting
from kernelhub.parallel import start
from kernelhub.retry import Failure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    Trace = Callable[[str, dict[str, Any]], None]
    Send = Callable[[Trace], AbstractContextManager[Any]]

_BUFFER = 4 << 20  # bytes that wait for a slow disk at most
_BATCH = 256 << 10  # bytes for which it is worth to wake who waits; less is looked for every _LOOK seconds
_LOOK = 0.02
_LARGE = 8 << 20  # bytes of a body that is read straight from the connection
_READ = 512 << 10
_FAREWELL = 0.05  # seconds that the rest of an answer nobody needs may take, to keep its connection


@dataclass(frozen=True)
class Patience:
    """How long a server may take, in seconds: to connect, between two reads, and at what speed (bytes a second).

    Less than ``speed`` over ``stall`` seconds is a stall; the first line of an answer has to come in ``stall`` too.
    """

    connect: float = 5.0
    read: float = 10.0
    stall: float = 30.0
    speed: int = 1024

    @classmethod
    def from_settings(cls) -> Patience:
        """What KERNELHUB_READ_TIMEOUT, KERNELHUB_STALL_SECONDS and KERNELHUB_MIN_SPEED ask for.

        The first one's default is huggingface_hub's HF_HUB_DOWNLOAD_TIMEOUT.
        """
        read = setting.seconds("KERNELHUB_READ_TIMEOUT", setting.seconds("HF_HUB_DOWNLOAD_TIMEOUT", cls.read))
        stall = setting.seconds("KERNELHUB_STALL_SECONDS", cls.stall)
        return cls(min(cls.connect, read), read, stall, setting.count("KERNELHUB_MIN_SPEED", cls.speed, 0, 1 << 40))


class Transfer:
    """One request and its answer; a context manager that ends the exchange when it is left.

    Args:
        send: sends the request and gives the response, with ``iter_bytes`` and ``extensions``; it passes its argument
            to the HTTP library as the extension ``trace``.
        patience: how long to wait.
        until: when (``time.monotonic()``) all of it has to be done, or None.
    """

    def __init__(self, send: Send, patience: Patience, until: float | None = None) -> None:
        self._send = send
        self._patience = patience
        self._until = until
        self._changed = threading.Condition()
        self._chunks: deque[bytes] = deque()
        self._buffered = 0
        self._response: Any = None
        self._stream: Any = None
        self._connected = self._ended = self._closed = False
        self._error: BaseException | None = None

    def __enter__(self) -> Transfer:
        start(self._run)
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            if self._response is not None and self._response.status_code >= 300:
                self._changed.wait_for(lambda: self._ended, _FAREWELL)
            self._closed = True
            self._changed.notify_all()
            stream = None if self._ended else self._stream
        if stream is not None:
            _shut(stream)

    def response(self) -> Any:
        """The response as soon as its headers are there.

        Raises:
            Failure: they do not come in time.
            Exception: what the HTTP library raised.
        """
        with self._changed:
            begun = time.monotonic()
            while self._response is None and not self._ended:
                limit = self._patience.stall if self._connected else self._patience.connect + 0.5
                self._wait(begun + limit, "no answer" if self._connected else "no connection", limit)
            if self._response is None:
                raise self._error or Failure("no answer")
            return self._response

    def chunks(self) -> Iterator[bytes]:
        """The body as it arrives.

        Raises:
            Failure: it arrives too slowly.
            Exception: what the HTTP library raised.
        """
        waited, arrived = 0.0, 0
        while True:
            with self._changed:
                while not self._chunks and not self._ended:
                    begun = time.monotonic()
                    self._wait_for_bytes(waited, arrived)
                    waited += time.monotonic() - begun
                    if waited >= self._patience.stall and arrived >= self._patience.speed * self._patience.stall:
                        waited, arrived = 0.0, 0
                batch = list(self._chunks)
                self._chunks.clear()
                self._buffered = 0
                self._changed.notify_all()
                if not batch:
                    break
            arrived += sum(map(len, batch))
            yield from batch
        if self._error is not None:
            raise self._error

    def _wait_for_bytes(self, waited: float, arrived: int) -> None:
        """Only the time spent here counts: a slow disk is not a slow server."""
        seconds, speed = self._patience.stall, self._patience.speed
        if waited >= seconds:
            raise Failure(f"stalled: {arrived} bytes in {seconds:g} s, less than {speed} a second")
        if self._until is not None and time.monotonic() >= self._until:
            raise Failure("the answer is not complete in time")
        self._changed.wait(min(_LOOK, seconds - waited))

    def _wait(self, until: float, what: str, seconds: float) -> None:
        until = until if self._until is None else min(until, self._until)
        left = until - time.monotonic()
        if left <= 0:
            cause, unreached = f"timeout: {what} within {seconds:g} s", not self._connected
            raise Failure(cause, most_tries=2 if unreached else None, unreached=unreached)
        self._changed.wait(left)

    # In the thread

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with self._send(self._trace) as response:
                self._announce(response)
                for chunk in _body_of(response, self._patience.read):
                    self._put(chunk)
        except BaseException as caught:  # whatever it is, it belongs to who waits
            error = caught
        with self._changed:
            self._error, self._ended = error, True
            self._changed.notify_all()

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        if event.endswith("connect_tcp.complete"):
            self._stream = info.get("return_value")
        elif event.endswith("send_request_headers.started"):
            with self._changed:
                self._connected = True
                self._changed.notify_all()

    def _announce(self, response: Any) -> None:
        with self._changed:
            self._response = response
            # Over HTTP/2 the connection is shared: ending this exchange must not end the others.
            multiplexed = response.http_version == "HTTP/2"
            self._stream = None if multiplexed else response.extensions.get("network_stream")
            self._connected = True
            self._changed.notify_all()

    def _put(self, chunk: bytes) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._buffered < _BUFFER)
            if self._closed:
                raise _Left
            self._chunks.append(chunk)
            self._buffered += len(chunk)
            if self._buffered >= _BATCH:
                self._changed.notify_all()


def _body_of(response: Any, timeout: float) -> Iterator[bytes]:
    """The bytes of a body; those of a large plain one come straight from the connection.

    The HTTP library reads 64 KiB at a time and copies each piece three times: for a large file that takes longer than
    hashing it. Its first piece is all that it holds already; what follows on the wire is the body and nothing else.
    """
    length = response.headers.get("Content-Length", "")
    framed = any(name in response.headers for name in ("Content-Encoding", "Transfer-Encoding"))
    if response.http_version != "HTTP/1.1" or framed or not length.isdecimal() or int(length) < _LARGE:
        yield from response.iter_bytes()
        return
    pieces = response.iter_raw()  # kept: the response is closed when this iterator is gone
    first = next(pieces, b"")
    yield first
    left, stream = int(length) - len(first), response.extensions["network_stream"]
    while left > 0:
        try:
            chunk = stream.read(min(left, _READ), timeout=timeout)
        except Exception as error:  # the library's own exceptions, which it has not translated here
            raise failure_of(error, str(response.url)) from error
        if not chunk:
            raise Failure(f"the connection was closed {left} bytes before the end of the body")
        left -= len(chunk)
        yield chunk


class _Left(Exception):
    """Nobody wants the rest of the answer."""


def _shut(stream: Any) -> None:
    """Wake the thread that reads from a connection; what it gets then is the end of the stream."""
    with contextlib.suppress(Exception):  # closed already, or a kind of stream without a socket
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


# Causes


def failure_of(error: Exception, url: str) -> Failure:
    """What an error of the HTTP library means, in one line that names the root cause (R48).

    A host that cannot be reached gets two tries: the first may have met a restart; a wrong certificate gets one.
    """
    kinds = {cls.__name__ for cls in type(error).__mro__}
    root = _root(error)
    parts = urlsplit(url)
    host = parts.hostname or url
    connecting = bool(kinds & {"ConnectError", "ConnectTimeout"})
    proxied = f", through the proxy of {parts.scheme}_proxy" if connecting and _has_proxy(parts.scheme) else ""
    if "ProxyError" in kinds:
        return Failure(f"the proxy refused the connection to {host}: {_line(error)}", most_tries=1, unreached=True)
    if connecting and isinstance(root, ssl.SSLError):
        return Failure(f"TLS: the connection to {host} is not secure: {_line(root)}", most_tries=1, unreached=True)
    if isinstance(root, socket.gaierror):
        return Failure(f"DNS: no address for {host}{proxied}: {_line(root)}", most_tries=2, unreached=True)
    if isinstance(root, ConnectionRefusedError):
        where = f"{host}:{parts.port}" if parts.port else host
        return Failure(f"connection refused by {where}{proxied}: {_line(root)}", most_tries=2, unreached=True)
    if connecting:
        what = "timeout: no connection" if "ConnectTimeout" in kinds else "no connection"
        return Failure(f"{what} to {host}{proxied}: {_line(root)}", most_tries=2, unreached=True)
    if "TimeoutException" in kinds:
        return Failure(f"timeout: {host} sent nothing for too long ({type(error).__name__})")
    if isinstance(root, ConnectionResetError):
        return Failure(f"connection reset by {host}: {_line(root)}")
    if kinds & {"UnsupportedProtocol", "LocalProtocolError"}:
        return Failure(f"{host} cannot be asked: {_line(error)}", most_tries=1)
    return Failure(f"the connection to {host} failed: {_line(root)}")


def _has_proxy(scheme: str) -> bool:
    return bool({scheme, "all"} & getproxies_environment().keys())


def _root(error: BaseException) -> BaseException:
    """The deepest exception of a chain."""
    while deeper := error.__cause__ or error.__context__:
        error = deeper
    return error


def _line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
