"""A folder of repositories as a Hub endpoint, for demos, sites without internet, and tests.

``LocalHub(root)`` speaks the Hub's routes to an unmodified huggingface_hub: set ``HF_ENDPOINT`` (or
``HfApi(endpoint=...)``) to its ``url``. It reads only, has no accounts, and knows no tokens: a private
repository is not found, a gated one lists its files and refuses their bodies. Needs ``kernelhub[serve]``.

The layout of the folder is described in `kernelhub.repository_folder`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import inspect
import socket
import struct
import tempfile
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from kernelhub.errors import InvalidConfig, KernelHubError
from kernelhub.repository_folder import LFS_THRESHOLD, ContentStore, HubFolder

try:
    import uvicorn
    from starlette.requests import Request

    from kernelhub.hub_routes import answer, target
except ImportError as missing:
    raise ImportError(
        "kernelhub.serve needs starlette and uvicorn: pip install kernelhub[serve]", name=missing.name
    ) from missing

if TYPE_CHECKING:
    from types import TracebackType

    from starlette.responses import Response
    from starlette.types import Message, Receive, Scope, Send

Hook: TypeAlias = Callable[[Request], "Response | Awaitable[Response | None] | None"]

_RECORDS = 50_000


@dataclass(eq=False)
class PortInUse(KernelHubError, OSError):
    """Another program listens on the port that the server was to take."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port} is in use: choose another port, or 0 for any free one"


@dataclass
class RequestRecord:
    """One request as the server saw it; ``path`` includes the query, ``status`` is None while unanswered."""

    method: str
    path: str
    headers: Mapping[str, str]
    status: int | None = None
    bytes_sent: int = 0

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


class LocalHub:
    """A Hub on this machine; a context manager that serves while it is entered.

    ``hook`` sees each request before it is answered, on the server's event loop (make it async to wait): a
    response that it returns is sent instead. It may be exchanged at any time. ``page_size`` is the number of
    entries in a page of a file listing, ``lfs_threshold`` the size in bytes from which a file is an LFS file.
    Commits stay resolvable until the server stops, also when their branch moves on: file bodies are copied to
    a temporary folder when they are first seen (``TMPDIR`` says where). Entering raises `PortInUse`, or
    `kernelhub.errors.InvalidConfig` when there is no such folder.
    """

    def __init__(
        self,
        root: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        page_size: int = 1000,
        hook: Hook | None = None,
        lfs_threshold: int = LFS_THRESHOLD,
    ) -> None:
        self.host = host
        self.port = port
        self.hook = hook
        self._root = root
        self._page_size = page_size
        self._lfs_threshold = lfs_threshold
        self._records: deque[RequestRecord] = deque(maxlen=_RECORDS)
        self._lock = threading.Lock()
        self._running = contextlib.ExitStack()

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"

    @property
    def requests(self) -> list[RequestRecord]:
        """The last 50 000 requests, oldest first, as copies that do not change any more."""
        with self._lock:
            return [replace(record) for record in self._records]

    def clear(self) -> None:
        """Forget the requests so far."""
        with self._lock:
            self._records.clear()

    def start(self) -> None:
        """Serve from a thread of its own; the server answers when this returns."""
        if not self._root.is_dir():
            raise InvalidConfig(str(self._root), "no such folder", "a folder of <org>/<repo>/<branch>", "root")
        with contextlib.ExitStack() as running:
            bodies = running.enter_context(tempfile.TemporaryDirectory(prefix="kernelhub-serve-"))
            store = ContentStore(Path(bodies), lfs_threshold=self._lfs_threshold)
            self._folder = HubFolder(self._root, store)
            listener = running.enter_context(_listen(self.host, self.port))
            self.port = listener.getsockname()[1]
            self._server = _Server(self._serve)
            running.callback(self._server.run_in_thread(listener))
            self._running = running.pop_all()

    def stop(self) -> None:
        """Close every connection and forget the copies of files; does nothing when not serving."""
        self._running.pop_all().close()

    def __enter__(self) -> LocalHub:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def reset(self, request: Request) -> None:
        """Reset the connection of a request (TCP RST), from a hook or from the response that it returned."""
        self._server.reset(request.client)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        record = RequestRecord(request.method, target(scope), dict(request.headers))
        with self._lock:
            self._records.append(record)
        # Only stop() cancels, after it has closed the connection: nobody is left to be told.
        with contextlib.suppress(asyncio.CancelledError):
            hooked = None if self.hook is None else self.hook(request)
            hooked = await hooked if inspect.isawaitable(hooked) else hooked
            response = await answer(request, self._folder, self._page_size) if hooked is None else hooked
            await response(scope, receive, _counted(send, record))


class _Server(uvicorn.Server):
    """uvicorn in a thread, which says when it is ready and does not wait for anybody when it stops."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        # h11, also where httptools is installed: the same faults then look the same everywhere.
        quiet: dict[str, Any] = {"ws": "none", "lifespan": "off", "log_config": None, "access_log": False}
        config = uvicorn.Config(app, interface="asgi3", http="h11", timeout_graceful_shutdown=1, **quiet)
        super().__init__(config)
        self._ready = threading.Event()

    def run_in_thread(self, listener: socket.socket) -> Callable[[], None]:
        """Serve from a new thread; returns what ends it."""
        thread = threading.Thread(target=self.run, args=([listener],), name="kernelhub-serve", daemon=True)
        thread.start()
        while not self._ready.wait(0.1):
            if not thread.is_alive():
                raise RuntimeError("the server's thread ended before it served; its error is on stderr")

        def end() -> None:
            self.should_exit = True
            thread.join()

        return end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # lets the connections learn that they are closed
        for task in list(self.server_state.tasks):
            task.cancel()
        await super().shutdown(sockets)

    def reset(self, client: object) -> None:
        for connection in list(self.server_state.connections):
            if connection.transport.get_extra_info("peername")[:2] == client:
                peer = connection.transport.get_extra_info("socket")
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.transport.abort()


def _listen(host: str, port: int) -> socket.socket:
    try:
        listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PortInUse(host, port) from error
        raise
    # Connections inherit this; without it each answer waits 40 ms for the acknowledgement of its own headers.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def _counted(send: Send, record: RequestRecord) -> Send:
    async def counted(message: Message) -> None:
        record.status = message.get("status", record.status)
        if record.method != "HEAD":
            record.bytes_sent += len(message.get("body", b""))
        await send(message)

    return counted
