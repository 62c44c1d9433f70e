"""A repository of The Update Framework on this machine, with keys of its own, that publishes one trust root."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

# Both packages document these names here, and re-export them in a way that mypy does not take for one.
from securesystemslib.signer import CryptoSigner  # type: ignore[attr-defined]
from tuf.api.metadata import (  # type: ignore[attr-defined]
    Metadata,
    MetaFile,
    Root,
    Snapshot,
    TargetFile,
    Targets,
    Timestamp,
)

if TYPE_CHECKING:
    from pathlib import Path

ROLES = ("root", "targets", "snapshot", "timestamp")
TARGET = "trusted_root.json"


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nobody reads a log here."""


@dataclass
class UpdateRepository:
    """One repository in ``folder``; ``publish`` signs a new version of everything."""

    folder: Path
    version: int = 0
    signers: dict[str, CryptoSigner] = field(
        default_factory=lambda: {role: CryptoSigner.generate_ed25519() for role in ROLES}
    )

    def __enter__(self) -> UpdateRepository:
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(self.folder)))
        self._thread = threading.Thread(target=partial(self._server.serve_forever, 0.01), daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def first_key(self) -> bytes:
        return (self.folder / "1.root.json").read_bytes()

    def publish(self, data: bytes, *, name: str = TARGET, days: float = 30.0) -> None:
        """Publish ``data`` as the target ``name`` in a version that is good for ``days``."""
        self.version += 1
        until = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=days)
        if self.version == 1:
            root = Root(version=1, expires=datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=365))
            for role in ROLES:
                root.add_key(self.signers[role].public_key, role)
            self._write("1.root.json", "root", root)
        target = TargetFile.from_data(name, data, ["sha256"])
        version = self.version
        self._write(f"{version}.targets.json", "targets", Targets(version, expires=until, targets={name: target}))
        snapshot = Snapshot(version, expires=until, meta={"targets.json": MetaFile(version)})
        self._write(f"{version}.snapshot.json", "snapshot", snapshot)
        self._write("timestamp.json", "timestamp", Timestamp(version, expires=until, snapshot_meta=MetaFile(version)))
        (self.folder / "targets").mkdir(exist_ok=True)
        (self.folder / "targets" / f"{target.hashes['sha256']}.{name}").write_bytes(data)

    def _write(self, name: str, role: str, content: Any) -> None:
        metadata: Metadata[Any] = Metadata(content)
        metadata.sign(self.signers[role])
        (self.folder / name).write_bytes(metadata.to_bytes())
