"""Redirect: the file by which a repository says that its kernel is now elsewhere; data of a stranger (S-05).

``kernel-status.toml`` at the root: ``kind = "redirect"``, ``destination = "org/other"``, ``revision = "v2"``. It must
name a version or a commit, so that what is loaded can be told in advance; a branch such as ``main`` is refused.
"""

from __future__ import annotations

from typing import Any

from kernelhub.errors import InvalidMetadata, InvalidRequest
from kernelhub.request import KernelRequest, checked_repo_id
from kernelhub.revision import Revision, RevisionKind
from kernelhub.tomltext import NotToml, parse_toml

STATUS_FILE = "kernel-status.toml"
MAX_STATUS_BYTES = 4096

_EXPECTED = 'kind = "redirect", destination = "org/name", revision = "v1" or a commit'


def read_redirect(data: bytes, origin: str) -> KernelRequest | None:
    """Where the kernel is now; None when the file says something else than a redirect.

    Raises:
        InvalidMetadata: unreadable, or a destination that is not a repository at a version or commit.
    """
    if len(data) > MAX_STATUS_BYTES:
        raise InvalidMetadata(STATUS_FILE, f"more than {MAX_STATUS_BYTES} bytes", _EXPECTED, origin)
    try:
        document = parse_toml(data)
    except NotToml as error:
        raise InvalidMetadata(STATUS_FILE, str(error), _EXPECTED, origin) from None
    if document.get("kind") != "redirect":
        return None
    try:
        asked: Any = document.get("revision")  # the two functions refuse what is no text
        repo_id: Any = document.get("destination")
        revision = Revision.parse(asked)
        destination = KernelRequest(checked_repo_id(repo_id), revision=revision)
    except InvalidRequest as error:
        raise InvalidMetadata(error.value, f"{STATUS_FILE}: {error.problem}", _EXPECTED, origin) from None
    if revision.kind not in (RevisionKind.VERSION, RevisionKind.COMMIT):
        problem = f"{STATUS_FILE} redirects to {destination}, which may move: ask for that repository yourself"
        raise InvalidMetadata(str(revision), problem, "a version or a commit", origin)
    return destination
