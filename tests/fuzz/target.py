"""What is fed with damaged inputs: each target reads one, and fails unless it is read right or refused as declared."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mutation import TEXT_TOKENS, Mutator, reshape_elf, reshape_json, reshape_toml

from kernelhub.elf import NotALibrary, defined_symbols, defined_versions, read_library
from kernelhub.errors import InvalidConfig, InvalidLockfile, InvalidMetadata
from kernelhub.lockfile import Lock
from kernelhub.metadata import Metadata
from kernelhub.policy import Policy

if TYPE_CHECKING:
    from collections.abc import Callable

CORPUS = Path(__file__).parents[1] / "data" / "fuzz"

_LONGEST_MESSAGE = 2000
_ELF_TOKENS = (b"\0", b"\0" * 16, b"\xff" * 8, b"\x7fELF", b"GLIBC_2.99\0", b"$ORIGIN", b"/tmp", b"A" * 5000)


class Target(NamedTuple):
    """``read`` returns whether the input was accepted; ``mutator`` makes the inputs."""

    read: Callable[[bytes], bool]
    mutator: Mutator


def read_metadata(data: bytes) -> bool:
    try:
        metadata = Metadata.parse(data, "org/repo@1a2b3c4")
    except InvalidMetadata as error:
        return _is_told(error)
    assert metadata.version is None or 0 <= metadata.version < 10**6
    assert metadata.id is None or metadata.id.isidentifier()
    if metadata.digest is not None:
        assert {len(value) for value in metadata.digest.files.values()} <= {32, 64}
    return True


def read_lock(data: bytes) -> bool:
    try:
        lock = Lock.parse(data)
    except InvalidLockfile as error:
        return _is_told(error)
    assert Lock.parse(lock.dump()).dump() == lock.dump()
    return True


def read_policy(data: bytes) -> bool:
    try:
        policy = Policy.parse(data)
    except InvalidConfig as error:
        return _is_told(error)
    assert policy.covers("acme/relu") in (True, False)
    return True


def read_elf(data: bytes) -> bool:
    """The facts, and one of two lists of what it defines: opening the file anew for each is what takes the time."""
    accepted = True
    for read in (read_library, defined_versions if len(data) % 2 else defined_symbols):
        try:
            read(io.BytesIO(data))
        except NotALibrary as error:
            accepted = _is_told(error)
    return accepted


def _is_told(error: Exception) -> bool:
    """A refusal says what is wrong in words that a terminal can show (S-39), and hides no lack of memory."""
    message = str(error)
    assert 0 < len(message) < _LONGEST_MESSAGE, f"a message of {len(message)} characters"
    assert message.replace("\n", "").isprintable(), ascii(message)
    link: BaseException | None = error
    while link is not None:
        assert not isinstance(link, MemoryError), "a lack of memory was taken for a damaged input"
        link = link.__cause__ or link.__context__
    return False


def _mutator(name: str, reshape: Callable[..., bytes], tokens: tuple[bytes, ...], ending: str = "") -> Mutator:
    paths = sorted(path for path in (CORPUS / name).iterdir() if path.name.endswith(ending))
    return Mutator([path.read_bytes() for path in paths], reshape, tokens)


TARGETS = {
    "metadata": Target(read_metadata, _mutator("metadata", reshape_json, TEXT_TOKENS)),
    "lock": Target(read_lock, _mutator("lock", reshape_toml, TEXT_TOKENS)),
    "policy": Target(read_policy, _mutator("policy", reshape_toml, TEXT_TOKENS)),
    "elf": Target(read_elf, _mutator("elf", reshape_elf, _ELF_TOKENS, ".so")),
}
