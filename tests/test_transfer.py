"""One exchange: its bytes, its limits, its causes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
from huggingface_hub import get_session
from starlette.responses import Response, StreamingResponse

from kernelhub import transfer
from kernelhub.errors import InvalidConfig
from kernelhub.retry import Failure
from kernelhub.transfer import Patience, Transfer, failure_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette.requests import Request

    from kernelhub.serve import LocalHub

PATIENT = Patience()
IMPATIENT = Patience(connect=5, read=5, stall=1.0, speed=1024)  # a busy machine may be late by half a second


def get(hub: LocalHub, patience: Patience = PATIENT, until: float | None = None) -> Transfer:
    def send(trace: Any) -> Any:
        timeout = (patience.connect, patience.read, patience.read, patience.read)
        return get_session().stream("GET", hub.url, timeout=timeout, extensions={"trace": trace})

    return Transfer(send, patience, until)


def answer(hub: LocalHub, response: Callable[[], Response]) -> None:
    hub.hook = lambda request: response()


def body(opened: Transfer) -> bytes:
    with opened:
        assert opened.response().status_code == 200
        return b"".join(opened.chunks())


@pytest.mark.parametrize("size", [0, 1, 70_000, transfer._LARGE - 1, transfer._LARGE, transfer._LARGE + 70_001])
def test_the_bytes_are_those_that_were_sent(size: int, hub: LocalHub) -> None:
    """Also where they are read straight from the connection, behind the back of the HTTP library."""
    sent = os.urandom(size)
    answer(hub, lambda: Response(sent))
    for _ in range(2):
        assert hashlib.sha256(body(get(hub))).digest() == hashlib.sha256(sent).digest()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("reset", [True, False])
def test_a_large_body_that_breaks_off_is_a_failure(reset: bool, hub: LocalHub) -> None:
    size = 2 * transfer._LARGE

    def hook(request: Request) -> Response:
        async def half() -> AsyncIterator[bytes]:
            yield bytes(size // 2)
            await asyncio.sleep(0.1)
            if reset:
                hub.reset(request)
            raise ConnectionResetError

        return StreamingResponse(half(), headers={"Content-Length": str(size)})

    hub.hook = hook
    with pytest.raises(Failure, match=r"closed [0-9]+ bytes before the end|connection reset by 127"):
        body(get(hub, Patience()))


def drip(hub: LocalHub, size: int, pause: float) -> None:
    """Send pieces of that size with that pause, for ever."""

    async def drops() -> AsyncIterator[bytes]:
        while True:
            yield bytes(size)
            await asyncio.sleep(pause)

    answer(hub, lambda: StreamingResponse(drops()))


def test_r_20_a_body_below_the_least_speed_is_a_stall(hub: LocalHub) -> None:
    drip(hub, 1, 0.02)
    begun = time.monotonic()
    with pytest.raises(Failure, match=r"stalled: [0-9]+ bytes in 1 s, less than 1024 a second"):
        body(get(hub, IMPATIENT))
    assert time.monotonic() - begun < 10


def test_r_20_a_body_above_the_least_speed_is_none(hub: LocalHub) -> None:
    drip(hub, 1000, 0.02)
    begun, count = time.monotonic(), 0
    with get(hub, IMPATIENT) as opened:
        for chunk in opened.chunks():
            count += len(chunk)
            if time.monotonic() - begun > 2.5:
                break
    assert count > 1024


@pytest.mark.parametrize("headers", [b"", b"HTTP/1.1 200 OK\r\nX-Long: "])
def test_r_20_a_server_that_never_answers_or_drips_its_headers_is_given_up(headers: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        stop = threading.Event()

        def drip_for_ever() -> None:
            connection, _ = server.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(headers)
                while not stop.wait(0.02):
                    connection.sendall(headers[-1:])

        thread = threading.Thread(target=drip_for_ever)
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        try:
            with pytest.raises(Failure, match="timeout: no answer within 1 s"):
                body(Transfer(lambda trace: get_session().stream("GET", url, extensions={"trace": trace}), IMPATIENT))
        finally:
            stop.set()
            thread.join()


def test_a_slow_reader_is_not_a_slow_server(hub: LocalHub) -> None:
    sent = os.urandom(3 << 20)
    answer(hub, lambda: Response(sent))
    received = b""
    with get(hub, IMPATIENT) as opened:
        for chunk in opened.chunks():
            received += chunk
            if len(received) == len(chunk):
                time.sleep(1.5)
    assert received == sent


def test_the_whole_exchange_has_a_limit(hub: LocalHub) -> None:
    drip(hub, 100_000, 0.02)
    with pytest.raises(Failure, match="not complete in time"):
        body(get(hub, until=time.monotonic() + 0.5))


def test_what_a_reader_leaves_is_not_read_to_its_end(hub: LocalHub) -> None:
    drip(hub, 1 << 20, 0)
    with get(hub) as opened:
        next(opened.chunks())
    time.sleep(0.2)
    sent = hub.requests[-1].bytes_sent
    time.sleep(0.2)
    assert hub.requests[-1].bytes_sent == sent


def test_patience_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Patience.from_settings() == Patience(5, 10, 30, 1024)
    monkeypatch.setenv("HF_HUB_DOWNLOAD_TIMEOUT", "4")
    assert Patience.from_settings() == Patience(4, 4, 30, 1024)
    for name, value in [("READ_TIMEOUT", "20"), ("STALL_SECONDS", "7"), ("MIN_SPEED", "0")]:
        monkeypatch.setenv(f"KERNELHUB_{name}", value)
    assert Patience.from_settings() == Patience(5, 20, 7, 0)
    monkeypatch.setenv("KERNELHUB_MIN_SPEED", "fast")
    with pytest.raises(InvalidConfig, match="KERNELHUB_MIN_SPEED"):
        Patience.from_settings()


class UnsupportedProtocol(Exception):
    """Named as the HTTP library's own."""


class TimeoutException(Exception):
    """Named as the HTTP library's own."""


class SlowRead(TimeoutException):
    """One of the library's timeouts."""


@pytest.mark.parametrize(
    ("error", "cause", "tries"),
    [
        (UnsupportedProtocol("no ftp"), r"hub\.example cannot be asked: UnsupportedProtocol: no ftp", 1),
        (SlowRead(), r"timeout: hub\.example sent nothing for too long \(SlowRead\)", None),
        (ConnectionResetError(104, "reset"), r"connection reset by hub\.example: .*104", None),
        (ValueError("two\nlines"), r"the connection to hub\.example failed: ValueError: two lines", None),
        (ValueError(), r"failed: ValueError$", None),
    ],
)
def test_a_cause_is_one_line(error: Exception, cause: str, tries: int | None) -> None:
    failure = failure_of(error, "https://hub.example/path?secret=1")
    assert "secret" not in failure.cause
    assert "\n" not in failure.cause
    assert failure.most_tries == tries
    with pytest.raises(Failure, match=cause):
        raise failure
