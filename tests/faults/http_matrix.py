#!/usr/bin/env python3
"""125 HTTP faults: 25 kinds of faults, each met by the 5 kinds of requests of a first load, with the exact outcome.

    .venv/bin/python tests/faults/http_matrix.py --seed 1

Every case loads a kernel from a Hub on this machine that misbehaves for one kind of request. The load has to succeed,
or fail with the expected class and words; either way no half build and nothing temporary may be left. ``--sample N``
runs that many cases, chosen by the seed; the seed also shuffles the order, picks where bodies break off, and which
loads ask for several things at once (as ``load_kernel`` does) or one after the other (as ``kernelhub prefetch`` does).
Time limits are short (see ``SETTINGS``), the rules are those of every user.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import os
import random
import re
import shutil
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from kernel_repository import trust, write_build
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse

from kernelhub import Environment, KernelHubError, KernelRequest, Session, retry
from kernelhub.reporter import Reporter
from kernelhub.serve import LocalHub

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from starlette.requests import Request

SETTINGS = {
    "KERNELHUB_RETRIES": "3",
    "KERNELHUB_DEADLINE": "20",
    "KERNELHUB_STALL_SECONDS": "0.3",
    "KERNELHUB_READ_TIMEOUT": "0.25",
}
FIRST_PAUSE = 0.005
REPO = "acme/relu"
TOKEN = "hf_neverShownToAnybody"
FILES: dict[str, str | bytes] = {"__init__.py": "ONE = 1\n" * 500, "table.safetensors": bytes(range(256)) * 400}
REQUESTS = {
    "publisher": "/api/organizations/acme/overview",
    "refs": f"/api/kernels/{REPO}/refs",
    "tree": f"/api/kernels/{REPO}/tree/",
    "metadata": "/build/torch-cpu/metadata.json",
    "body": "/build/torch-cpu/table.safetensors",
}
API = ("publisher", "refs", "tree")
BODIES = ("metadata", "body")


class Recorder(Reporter):
    """Keeps warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warn(self, message: str) -> None:
        self.warnings.append(message)


class Clean(NamedTuple):
    """A right answer."""

    body: bytes
    headers: dict[str, str]


@dataclass
class Place:
    """Where a fault happens: the Hub, one kind of request, the right answer, and chance."""

    hub: LocalHub
    request: str
    clean: Clean
    chance: random.Random

    def cut(self) -> int:
        """A number of bytes after which a body breaks off."""
        return self.chance.randrange(1, len(self.clean.body))

    def head(self, status: str = "200 OK") -> bytes:
        """The right answer's status line and headers, as on the wire."""
        lines = [f"HTTP/1.1 {status}", *(f"{name}: {value}" for name, value in self.clean.headers.items())]
        return "\r\n".join([*lines, "", ""]).encode()


Answer = Callable[[Place, "Request"], "Response | Awaitable[Response | None]"]


class Expected(NamedTuple):
    """What a load does: the class of its error (None: it succeeds) and words in it, or in a warning."""

    error: str | None = None
    words: str = ""


SUCCESS = Expected()


@dataclass(frozen=True, eq=False)
class Fault:
    """A kind of fault: how often it strikes (None: always) and what is expected for each kind of request."""

    name: str
    answer: Answer
    expected: dict[str, Expected]
    times: int | None = None
    warm: bool = False
    at_least: float = 0.0


# Answers


def status(code: int, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return lambda place, request: Response(b"a message", code, named)


def connection(hub: LocalHub, request: Request) -> asyncio.Transport:
    """The transport of a request: some faults are below HTTP."""
    connections = hub._server.server_state.connections
    found = [one.transport for one in connections if one.transport.get_extra_info("peername")[:2] == request.client]
    return found[0]


async def until_gone(request: Request) -> Response:
    """Say nothing as long as the client is there."""
    for _ in range(200):
        if await request.is_disconnected():
            break
        await asyncio.sleep(0.02)
    return Response()


async def reset_first(place: Place, request: Request) -> Response:
    place.hub.reset(request)
    return await until_gone(request)


async def reset_in_the_middle(place: Place, request: Request) -> Response:
    connection(place.hub, request).write(place.head() + place.clean.body[: place.cut()])
    await asyncio.sleep(0.02)
    place.hub.reset(request)
    return await until_gone(request)


async def short(place: Place, request: Request) -> Response:
    transport = connection(place.hub, request)
    transport.write(place.head() + place.clean.body[: place.cut()])
    transport.close()
    return await until_gone(request)


async def silent(place: Place, request: Request) -> Response:
    return await until_gone(request)


async def dripping_headers(place: Place, request: Request) -> Response:
    transport = connection(place.hub, request)
    transport.write(b"HTTP/1.1 200 OK\r\nX-Long: ")
    for _ in range(200):
        if transport.is_closing():
            break
        transport.write(b"a")
        await asyncio.sleep(0.02)
    transport.abort()
    return await until_gone(request)


def dripping_body(place: Place, request: Request) -> Response:
    async def drops() -> AsyncIterator[bytes]:
        for byte in place.clean.body[:200]:
            yield bytes([byte])
            await asyncio.sleep(0.05)

    return StreamingResponse(drops(), headers=unsized(place))


def endless(place: Place, request: Request) -> Response:
    async def chunks() -> AsyncIterator[bytes]:
        yield place.clean.body
        while True:
            yield bytes(1 << 20)
            await asyncio.sleep(0)

    return StreamingResponse(chunks(), headers=unsized(place))


def compressed(place: Place, request: Request) -> Response:
    return Response(gzip.compress(place.clean.body), headers={**unsized(place), "Content-Encoding": "gzip"})


def unsized(place: Place) -> dict[str, str]:
    return {name: value for name, value in place.clean.headers.items() if name.lower() != "content-length"}


def redirect_loop(place: Place, request: Request) -> Response:
    return RedirectResponse(str(request.url))


def redirect_elsewhere(place: Place, request: Request) -> Response:
    return RedirectResponse("http://mirror.example/login?secret=1")


def login_page(place: Place, request: Request) -> Response:
    return HTMLResponse("<html>Please log in to this network</html>")


# Expectations


def everywhere(error: str | None = None, words: str = "", **others: Expected) -> dict[str, Expected]:
    return {request: others.get(request, Expected(error, words)) for request in REQUESTS}


def unavailable(words: str, **others: Expected) -> dict[str, Expected]:
    return everywhere("HubUnavailable", words, **others)


def bodies(words: str, error: str = "IncompleteDownload") -> dict[str, Expected]:
    return {request: Expected(error, words) for request in BODIES}


UNTRUSTED = Expected("UntrustedPublisher", "not a trusted kernel publisher")
FAULTS = (
    Fault("500, once", status(500), everywhere(), times=1),
    Fault("504, twice", status(504), everywhere(), times=2),
    Fault("408, once", status(408), everywhere(), times=1),
    Fault("429, Retry-After 1, once", status(429, Retry_After="1"), everywhere(), times=1, at_least=1.0),
    Fault(
        "429, Retry-After 100000",
        status(429, Retry_After="100000"),
        unavailable(r"HTTP 429 for .*asks to wait 100000 s, more than the 60 s"),
    ),
    Fault("429, Retry-After -5", status(429, Retry_After="-5"), unavailable(r"HTTP 429 for /.* \(3 tries\)")),
    Fault("503", status(503), unavailable(r"HTTP 503 for /.* \(3 tries\)")),
    Fault(
        "503, older answers in the store",
        status(503),
        everywhere(publisher=Expected(None, "HTTP 503"), refs=Expected(None, "HTTP 503")),
        warm=True,
    ),
    Fault(
        "401",
        status(401),
        everywhere(
            "RepositoryNotFound",
            "or a private one .the access token is not accepted",
            publisher=Expected("HubRefused", "refuses 'acme': authentication is required .the access token is not"),
        ),
    ),
    Fault("403", status(403), everywhere("HubRefused", r"access is forbidden \(HTTP 403\)")),
    Fault(
        "403, gated",
        status(403, X_Error_Code="GatedRepo"),
        everywhere("RepositoryNotFound", "it is gated and this account has no access", publisher=UNTRUSTED),
    ),
    Fault(
        "404",
        status(404),
        everywhere("RepositoryNotFound", "no kernel repository of that name", publisher=UNTRUSTED)
        | bodies("the Hub lists it but does not have it"),
    ),
    Fault("410", status(410), everywhere("HubRefused", r"it is gone \(HTTP 410\)")),
    Fault("451", status(451), everywhere("HubRefused", r"unavailable for legal reasons \(HTTP 451\)")),
    Fault("reset before the answer, once", reset_first, everywhere(), times=1),
    Fault("reset in the body, once", reset_in_the_middle, everywhere(), times=1),
    Fault(
        "body ends early",
        short,
        unavailable(r"closed connection without sending complete .*\(3 tries\)")
        | bodies(r"bytes, [0-9]+ were announced: .*complete message body"),
    ),
    Fault("silence", silent, unavailable(r"timeout: 127\.0\.0\.1 sent nothing for too long")),
    Fault("headers one byte at a time", dripping_headers, unavailable(r"timeout: no answer within 0\.3 s \(3 tries\)")),
    Fault(
        "body one byte at a time",
        dripping_body,
        unavailable(r"stalled: [0-9]+ bytes in 0\.3 s, less than 1024 a second \(3 tries\)")
        | bodies(r"[0-9]+ bytes, [0-9]+ were announced: stalled"),
    ),
    Fault("endless body", endless, unavailable("is longer than 33554432 bytes") | bodies("longer than the announced")),
    Fault("compressed although not asked for", compressed, everywhere()),
    Fault(
        "redirects in a circle",
        redirect_loop,
        everywhere(
            publisher=UNTRUSTED,
            refs=Expected("RepositoryNotFound", "it moved to acme/relu, which moved again"),
            tree=Expected("HubUnavailable", "it redirected to"),
        )
        | bodies("more than 5 redirects"),
    ),
    Fault(
        "redirect to plain http elsewhere",
        redirect_elsewhere,
        everywhere(
            publisher=UNTRUSTED,
            refs=Expected("HubUnavailable", "which is not a repository"),
            tree=Expected("HubUnavailable", "it redirected to"),
        )
        | bodies("redirected to 'http://mirror.example', which is neither https nor the host that was asked"),
    ),
    Fault(
        "page of a proxy",
        login_page,
        unavailable("does not answer as a Hub does about .*text/html") | bodies("header ETag is None.*text/html"),
    ),
)


# Running


class Case(NamedTuple):
    fault: Fault
    request: str

    def __str__(self) -> str:
        return f"{self.fault.name} / {self.request}"


class Result(NamedTuple):
    """What a case did: the outcome in a word or two, the seconds it took, and what is wrong with it (None: nothing)."""

    outcome: str
    seconds: float
    problem: str | None


CASES = tuple(Case(fault, request) for fault in FAULTS for request in REQUESTS)


@dataclass
class Laboratory:
    """A Hub with one kernel, and a folder for stores."""

    hub: LocalHub
    folder: Path
    clean: dict[str, Clean] = field(default_factory=dict)

    @classmethod
    @contextlib.contextmanager
    def opened(cls) -> Iterator[Laboratory]:
        with tempfile.TemporaryDirectory(prefix="kernelhub-http-") as folder, contextlib.ExitStack() as stack:
            root = Path(folder) / "repositories"
            trust(root, "acme")
            write_build(root, REPO, "v1", "torch-cpu", FILES)
            hub = stack.enter_context(LocalHub(root))
            before = {name: os.environ.get(name) for name in SETTINGS}
            pause = retry.FIRST_PAUSE
            stack.callback(_restore, before, pause)
            os.environ.update(SETTINGS)
            retry.FIRST_PAUSE = FIRST_PAUSE
            laboratory = cls(hub, Path(folder))
            laboratory.load(laboratory.store("clean"), Recorder())
            laboratory.clean = {name: laboratory.fetched(part) for name, part in REQUESTS.items()}
            yield laboratory

    def store(self, name: str) -> Path:
        return self.folder / "stores" / name

    def fetched(self, part: str) -> Clean:
        """The right answer to the request of a clean load whose address has this part."""
        path = next(record.path for record in self.hub.requests if part in record.path)
        with urllib.request.urlopen(self.hub.url + path) as answer:
            kept = ("etag", "x-repo-commit", "x-linked-etag", "x-linked-size", "content-type", "content-length")
            headers = {name: value for name, value in answer.headers.items() if name.lower() in kept}
            return Clean(answer.read(), headers)

    def load(self, store: Path, reporter: Reporter, *, ahead: bool = False) -> None:
        """Bring the kernel into a store; ``ahead`` as ``load_kernel`` does it, several requests at once."""
        session = Session(
            cache_dir=store,
            endpoint=self.hub.url,
            token=TOKEN,
            environment=Environment.parse("torch=2.13"),
            reporter=reporter,
        )
        session.obtain(session.resolve(KernelRequest.parse(REPO), ahead=ahead))

    def run(self, case: Case, chance: random.Random) -> Result:
        """Load with the fault, and compare with what is expected."""
        store = self.store(f"{CASES.index(case)}")
        if case.fault.warm:
            self.load(store, Recorder())
            os.environ["KERNELHUB_FRESH_SECONDS"] = "0.000001"
        place = Place(self.hub, case.request, self.clean[case.request], chance)
        self.hub.hook = hook = Hook(case, place)
        reporter, begun = Recorder(), time.monotonic()
        try:
            outcome, text = self._outcome(store, reporter, ahead=chance.random() < 0.5)
        finally:
            self.hub.hook = None
            os.environ.pop("KERNELHUB_FRESH_SECONDS", None)
        seconds = time.monotonic() - begun
        wrong = _difference(case, outcome, text, reporter.warnings, seconds) or self._remains(store, outcome)
        if (hook.struck > 0) == (case.fault.warm and case.request not in ("publisher", "refs")):
            wrong = wrong or f"the fault struck {hook.struck} times"
        shutil.rmtree(store, ignore_errors=True)
        return Result(outcome or ("success, with a warning" if reporter.warnings else "success"), seconds, wrong)

    def _outcome(self, store: Path, reporter: Reporter, *, ahead: bool) -> tuple[str | None, str]:
        try:
            self.load(store, reporter, ahead=ahead)
        except KernelHubError as error:
            return type(error).__name__, str(error)
        return None, ""

    def _remains(self, store: Path, outcome: str | None) -> str | None:
        """What is left although it should not be."""
        for _ in range(100):  # a second question may be under way when the first one fails the load: it ends by itself
            temporary = [path.name for path in store.glob("tmp/*")]
            if not temporary:
                break
            time.sleep(0.02)
        builds = list(store.glob("hubs/*/builds/*/*/*/manifest.json"))
        if temporary or len(builds) != (outcome is None):
            return f"left in tmp: {temporary}, builds: {len(builds)}"
        if outcome is None:
            stored = builds[0].parent / "files"
            torn = [name for name, body in FILES.items() if (stored / name).read_bytes() != _bytes(body)]
            return f"torn: {torn}" if torn else None
        return None


def _restore(before: dict[str, str | None], pause: float) -> None:
    retry.FIRST_PAUSE = pause
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def _bytes(body: str | bytes) -> bytes:
    return body.encode() if isinstance(body, str) else body


class Hook:
    """Answers the requests that the fault is about, and counts them."""

    def __init__(self, case: Case, place: Place) -> None:
        self.struck = 0
        self._case = case
        self._place = place

    def __call__(self, request: Request) -> Response | Awaitable[Response | None] | None:
        fault = self._case.fault
        if REQUESTS[self._case.request] not in request.url.path or self.struck == fault.times:
            return None
        self.struck += 1
        return fault.answer(self._place, request)


def _difference(case: Case, outcome: str | None, text: str, warnings: list[str], seconds: float) -> str | None:
    expected = case.fault.expected[case.request]
    if outcome != expected.error:
        return f"expected {expected.error}, got {outcome}: {text}"
    said = text if expected.error else "\n".join(warnings)
    if TOKEN in text + "".join(warnings):
        return "the access token is shown"
    if expected.words and not re.search(expected.words, said):
        return f"{expected.words!r} is not in {said!r}"
    if not expected.words and warnings and expected.error is None:
        return f"unexpected warnings: {warnings}"
    return f"took only {seconds:.2f} s" if seconds < case.fault.at_least else None


def sample(seed: int, count: int | None = None) -> list[Case]:
    """That many cases in an order that the seed decides."""
    return random.Random(seed).sample(CASES, len(CASES) if count is None else count)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, help="how many cases (default: all)")
    parser.add_argument("--verbose", action="store_true", help="print each case as it is run")
    arguments = parser.parse_args()
    results: dict[Case, Result] = {}
    begun = time.monotonic()
    with Laboratory.opened() as laboratory:
        for case in sample(arguments.seed, arguments.sample):
            results[case] = laboratory.run(case, random.Random(f"{arguments.seed} {case}"))
            if arguments.verbose:
                print(case, results[case], flush=True)
    _print_table(results)
    wrong = {case: result.problem for case, result in results.items() if result.problem}
    for case, problem in wrong.items():
        print(f"WRONG {case}: {problem}")
    outcomes = ", ".join(
        f"{count} {name}" for name, count in Counter(r.outcome for r in results.values()).most_common()
    )
    seconds = time.monotonic() - begun
    print(f"{len(results)} faults (seed {arguments.seed}, {seconds:.0f} s): {outcomes}; {len(wrong)} wrong")
    return 1 if wrong else 0


def _print_table(results: dict[Case, Result]) -> None:
    short_names = {"success": "ok", "success, with a warning": "ok+warning"}
    print(f"{'fault':<34}" + "".join(f"{request:<20}" for request in REQUESTS))
    for fault in FAULTS:
        cells = [results.get(Case(fault, request)) for request in REQUESTS]
        if any(cells):
            names = ["" if cell is None else short_names.get(cell.outcome, cell.outcome) for cell in cells]
            marks = ["!" if cell and cell.problem else "" for cell in cells]
            print(f"{fault.name:<34}" + "".join(f"{a}{b}".ljust(20) for a, b in zip(marks, names, strict=True)))


if __name__ == "__main__":
    sys.exit(main())
