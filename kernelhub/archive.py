"""Archive: one file with a fixed list of members, the same bytes for the same content; the only reader of tar and gzip.

A gzip tar that any ``tar`` unpacks, but read strictly: the reader knows what comes next (the first member lists the
others), makes the header that it expects and compares the bytes. So links, special files, extended headers, other
names, owners, modes or orders, missing or additional members are refused before anything of them is read, and no
length in the archive decides how much is (S-10 to S-13, S-35, S-37).
"""

from __future__ import annotations

import contextlib
import gzip
import tarfile
import zlib
from typing import TYPE_CHECKING, BinaryIO

from kernelhub.errors import InvalidBundle

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_BLOCK = tarfile.BLOCKSIZE
_RECORD = tarfile.RECORDSIZE
_CHUNK = 1 << 20
_KINDS = {
    tarfile.SYMTYPE: "a symbolic link",
    tarfile.LNKTYPE: "a hard link",
    tarfile.CHRTYPE: "a character device",
    tarfile.BLKTYPE: "a block device",
    tarfile.FIFOTYPE: "a named pipe",
    tarfile.DIRTYPE: "a folder",
}


class ArchiveWriter:
    """Writes members one after the other; ``close`` ends the archive and leaves ``file`` open."""

    def __init__(self, file: BinaryIO) -> None:
        # Neither a name nor a time goes into the header.
        self._gzip = gzip.GzipFile(filename="", mode="wb", compresslevel=6, fileobj=file, mtime=0)
        self._written = 0

    def add(self, name: str, size: int, chunks: Iterable[bytes]) -> None:
        """Append a member of ``size`` bytes."""
        self._write(_header(name, size))
        before = self._written
        for chunk in chunks:
            self._write(chunk)
        if self._written - before != size:
            raise InvalidBundle(name, f"{self._written - before} bytes, {size} were announced")
        self._write(bytes(-size % _BLOCK))

    def close(self) -> None:
        self._write(bytes(2 * _BLOCK))
        self._write(bytes(-self._written % _RECORD))
        self._gzip.close()

    def _write(self, data: bytes) -> None:
        self._gzip.write(data)
        self._written += len(data)


class ArchiveReader:
    """Reads members in the order in which they were written.

    Raises (all methods):
        InvalidBundle: truncated, damaged, or anything that ``ArchiveWriter`` does not write.
    """

    def __init__(self, file: BinaryIO, origin: str) -> None:
        self._gzip = gzip.GzipFile(mode="rb", fileobj=file)
        self._origin = origin
        self._read = 0

    def first(self, name: str, limit: int) -> bytes:
        """The first member, whose size only the archive tells: at most ``limit`` bytes."""
        header = self._take(_BLOCK)
        size = self._parsed(header, name).size
        if size > limit:
            raise self._invalid(f"member {name!a} has {size} bytes, more than {limit}")
        self._compare(header, name, size)
        return b"".join(self._body(size))

    @contextlib.contextmanager
    def member(self, name: str, size: int) -> Iterator[Iterator[bytes]]:
        """The chunks of the next member, which has to be this one; what is not read is skipped."""
        self._compare(self._take(_BLOCK), name, size)
        body = self._body(size)
        yield body
        for _ in body:
            pass

    def finish(self) -> None:
        """Nothing may follow."""
        rest = self._take(2 * _BLOCK)
        rest += self._take(-self._read % _RECORD)
        if rest[:_BLOCK].strip(b"\0"):
            found = self._parsed(rest[:_BLOCK], "").name
            raise self._invalid(f"member {found!a} is not listed")
        if rest.strip(b"\0") or self._some(1):
            raise self._invalid("data after its end")

    def _body(self, size: int) -> Iterator[bytes]:
        left = size
        while left:
            chunk = self._some(min(left, _CHUNK))
            if not chunk:
                raise self._invalid("truncated")
            left -= len(chunk)
            yield chunk
        if self._take(-size % _BLOCK).strip(b"\0"):
            raise self._invalid("hidden data behind a member")

    def _take(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            chunk = self._some(size - len(data))
            if not chunk:
                raise self._invalid("truncated")
            data += chunk
        return data

    def _some(self, size: int) -> bytes:
        try:
            data = self._gzip.read(size)
        except EOFError:
            raise self._invalid("truncated") from None
        except (OSError, zlib.error) as error:
            raise self._invalid(f"not readable as gzip ({error})") from error
        self._read += len(data)
        return data

    def _compare(self, header: bytes, name: str, size: int) -> None:
        if header == _header(name, size):
            return
        if not header.strip(b"\0"):
            raise self._invalid(f"it ends before member {name!a}")
        found = self._parsed(header, name)
        if found.name != name:
            raise self._invalid(f"member {found.name!a} where {name!a} has to be")
        if found.size != size:
            raise self._invalid(f"member {name!a} has {found.size} bytes, {size} are listed")
        raise self._invalid(f"member {name!a} has an owner, mode, time or form that no bundle writes")

    def _parsed(self, header: bytes, expected: str) -> tarfile.TarInfo:
        """The header for messages; refuses all kinds but plain files."""
        try:
            found = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except (tarfile.HeaderError, ValueError) as error:
            where = f" where member {expected!a} has to be" if expected else ""
            raise self._invalid(f"not a tar header{where} ({error})") from None
        if found.type != tarfile.REGTYPE:
            kind = _KINDS.get(found.type, f"an extended or unknown entry (type {found.type!a})")
            raise self._invalid(f"member {found.name!a} is {kind}")
        return found

    def _invalid(self, problem: str) -> InvalidBundle:
        return InvalidBundle(self._origin, problem, "a file written by `kernelhub bundle create`")


def _header(name: str, size: int) -> bytes:
    """The one header that a plain file of this name and size has."""
    info = tarfile.TarInfo(name)
    info.size = size
    info.mode = 0o444
    info.mtime = 0
    return info.tobuf(tarfile.GNU_FORMAT, "ascii", "strict")
