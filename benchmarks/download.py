#!/usr/bin/env python3
"""How fast one large file is fetched (received, hashed, written, synced, published), against ``curl`` to the same disk.

    .venv/bin/python benchmarks/download.py

Both read from a server on this machine that sends the file with ``sendfile``, so that the server is not what is
measured; curl neither hashes nor syncs. They take turns; medians and shortest times of all turns.
"""

from __future__ import annotations

import argparse
import hashlib
import http.server
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from kernelhub.fetch import fetch
from kernelhub.hub import HubIndex
from kernelhub.index import ContentHash, ListedFile
from kernelhub.reporter import Reporter
from kernelhub.request import KernelRequest
from kernelhub.resolution import Resolution
from kernelhub.store import Store

COMMIT = "c" * 40
NAME = "build/torch-cpu/table.bin"


class Handler(http.server.BaseHTTPRequestHandler):
    """Serves one file, and the branches of its repository."""

    protocol_version = "HTTP/1.1"
    file: Path
    etag: str

    def do_GET(self) -> None:
        if self.path.endswith("/refs"):
            self._answer(b'{"branches": [], "tags": []}')
        elif self.path.endswith(NAME):
            self._send_file()
        else:
            self._answer(b"{}", 404)

    def _answer(self, body: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _send_file(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(self.file.stat().st_size))
        self.send_header("ETag", f'"{self.etag}"')
        self.end_headers()
        self.wfile.flush()
        with self.file.open("rb") as body:
            self.connection.sendfile(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


def kernelhub_seconds(url: str, listed: ListedFile, folder: Path) -> float:
    index, store = HubIndex(url, token=False), Store(folder / "store", url)
    index.refs("acme/relu")  # a load knows the repository before it fetches
    request = KernelRequest.parse("acme/relu")
    resolution = Resolution(request, "acme/relu", COMMIT, "torch-cpu", url, trust="", files=(listed,))
    begun = time.perf_counter()
    fetch(resolution, index, store, Reporter())
    return time.perf_counter() - begun


def curl_seconds(url: str, folder: Path) -> float:
    command = ["curl", "--silent", "--fail", "--output", str(folder / "table.bin"), url]
    begun = time.perf_counter()
    subprocess.run(command, check=True)
    return time.perf_counter() - begun


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=float, default=200.0, help="MB (10**6 bytes)")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write (default: the temporary folder)")
    arguments = parser.parse_args()
    size = int(arguments.size * 1e6)
    times: dict[str, list[float]] = {"curl": [], "curl, then sync": [], "kernelhub": []}
    with tempfile.TemporaryDirectory(prefix="kernelhub-download-", dir=arguments.folder) as name:
        folder = Path(name)
        body = os.urandom(1 << 20) * (size // (1 << 20) + 1)
        Handler.file = folder / "served.bin"
        Handler.file.write_bytes(body[:size])
        Handler.etag = hashlib.sha256(body[:size]).hexdigest()
        listed = ListedFile("table.bin", size, ContentHash("sha256", Handler.etag))
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        for turn in range(arguments.runs + 1):
            for case in times:
                target = folder / "target"
                target.mkdir()
                os.sync()
                if case == "kernelhub":
                    seconds = kernelhub_seconds(url, listed, target)
                else:
                    seconds = curl_seconds(f"{url}/kernels/acme/relu/resolve/{COMMIT}/{NAME}", target)
                    if case != "curl":
                        begun = time.perf_counter()
                        os.sync()
                        seconds += time.perf_counter() - begun
                shutil.rmtree(target)
                if turn:  # the first turn fills the file cache
                    times[case].append(seconds)
        server.shutdown()
    print(f"one file of {arguments.size:g} MB, {arguments.runs} turns")
    print(f"{'':<18}{'median, ms':>12}{'shortest, ms':>14}{'MB/s (median)':>16}")
    medians = {case: statistics.median(seconds) for case, seconds in times.items()}
    for case, median in medians.items():
        print(f"{case:<18}{median * 1e3:>12.0f}{min(times[case]) * 1e3:>14.0f}{size / median / 1e6:>16.0f}")
    print(f"speed of kernelhub over curl: {medians['curl'] / medians['kernelhub']:.2f}", end="")
    print(f" (shortest: {min(times['curl']) / min(times['kernelhub']):.2f})", end="")
    print(f"; over curl and a sync: {medians['curl, then sync'] / medians['kernelhub']:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
