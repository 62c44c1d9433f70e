"""Root update: a newer trust root, from where its authority publishes it, as The Update Framework secures that.

This is the one part of signature checking that uses the network, and it runs only when it is asked to. The first key is
shipped with the package (or given), each later one is signed by the one before, and what was seen is remembered, so
that whoever stands in between can neither forge a root nor bring back an old one.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from kernelhub import setting
from kernelhub.durable import write_json
from kernelhub.errors import InvalidConfig, RefreshFailed, shown
from kernelhub.signer import INSTALL, checked_root
from kernelhub.trustroot import TrustRoot, bundled_file

PUBLIC_URL = "https://tuf-repo-cdn.sigstore.dev"

_TARGET = "trusted_root.json"
_PUBLIC_FILE = 0o644  # nothing in it is secret


def refresh(url: str = PUBLIC_URL, first_key: bytes | None = None, *, remembered: Path | None = None) -> TrustRoot:
    """Ask ``url`` for the trust root that is good now.

    Args:
        url: the address of the update repository.
        first_key: the bytes of its first ``root.json``; None: the public instance's, shipped with the package.
        remembered: the folder that keeps what was seen of it; None: in the user's configuration folder.

    Raises:
        RefreshFailed: it does not answer, what it says is not signed as it has to be, or the extra is not installed.
        InvalidConfig: another address without its first key, or no configuration folder.
    """
    if first_key is None and url != PUBLIC_URL:
        raise InvalidConfig(url, "its first root.json is not known", "--first-key FILE beside --url", "trust root")
    seen = (remembered or setting.config_folder() / "tuf") / hashlib.sha256(url.encode()).hexdigest()[:16]
    data = _download(url, first_key or bundled_file("tuf-root.json"), seen)
    try:
        root = replace(TrustRoot.parse(data, url, time.time()), source=url)
        checked_root(root)
    except InvalidConfig as error:
        raise RefreshFailed(url, f"what it publishes is no trust root: {error.problem}") from error
    return root


def write(root: TrustRoot, path: Path) -> None:
    """Replace the file ``path`` as a whole.

    Raises:
        InvalidConfig: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, root.to_dict(), path.parent, _PUBLIC_FILE)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise InvalidConfig(str(path), problem, "a writable file", "trust root") from error


def _download(url: str, first_key: bytes, seen: Path) -> bytes:
    try:
        # The extra `sign` brings it; nothing else needs it.
        from tuf.api.exceptions import DownloadError, RepositoryError  # noqa: PLC0415
        from tuf.ngclient.updater import Updater  # noqa: PLC0415
    except ImportError as error:
        raise RefreshFailed(url, f"that needs sigstore, which is not installed ({error}): run `{INSTALL}`") from error
    try:
        seen.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            updater = Updater(str(seen), url, folder, f"{url.rstrip('/')}/targets/", bootstrap=first_key)
            target = updater.get_targetinfo(_TARGET)
            if target is None:
                raise RefreshFailed(url, f"it publishes no {_TARGET}")
            return Path(updater.download_target(target)).read_bytes()
    except (DownloadError, RepositoryError, OSError, ValueError) as error:
        raise RefreshFailed(url, _cause(error)) from error


def _cause(error: BaseException) -> str:
    """The ends of a chain of exceptions in one line: the first says what failed, the last why."""
    last = error
    while last.__cause__ is not None:
        last = last.__cause__
    ends = [f"{type(end).__name__}: {shown(str(end))}" for end in (error, last) if str(end)]
    return ", because of ".join(dict.fromkeys(ends)) or type(error).__name__
