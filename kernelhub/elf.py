"""ELF: what a native library needs from its surroundings, read from its bytes; none of its code runs (S-28).

The header is read with pyelftools, which also knows the numbers of all names. The tables, which can have a hundred
thousand entries, are read in bulk, and in bounded loops: the bytes may be hostile.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple, TypeVar

from kernelhub.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

Read = TypeVar("Read")

MAGIC = b"\x7fELF"

_MOST_SEGMENTS = 256
_MOST_DYNAMIC = 4096
_MOST_VERSIONS = 4096
_MOST_VERSION_BYTES = 256 << 10
_MOST_SYMBOLS = 1 << 20
_MOST_UNDEFINED = 50_000
_LONGEST_NAME = 2048  # what torch exports is shorter by far
_CHAIN_PART = 64  # symbols of one hash; chains are short
_MOST_STRINGS = 64 << 20  # bytes; torch's largest library has 10 MB of them
_PART = 256 << 10  # what stays in a core's own cache
_WEAK_VERSION = 0x2
_EXECUTABLE = 0x1
_DF_TEXTREL = 0x4
_GLOBAL = 1
_UNDEFINED = 0
_SEGMENT_64, _SEGMENT_32 = "IIQQQQQQ", "IIIIIIII"
_DYNAMIC_64, _DYNAMIC_32 = "QQ", "II"
_SYMBOL_64, _SYMBOL_32 = "IBBHQQ", "IIIBBH"
_VERDEF, _VERDAUX = "HHHHIII", "II"
_VERNEED, _VERNAUX = "HHIII", "IHHII"


class NotALibrary(ValueError):
    """The bytes are not a shared library; the message says what they are."""


class VersionNeed(NamedTuple):
    """A symbol version that a library needs from another library, e.g. ``libc.so.6`` and ``GLIBC_2.34``."""

    library: str
    version: str


class Machine(NamedTuple):
    """What a library's code is for: the CPU, the width of an address, the byte order."""

    cpu: str
    bits: int
    little_endian: bool

    def __str__(self) -> str:
        return f"{self.cpu} ({self.bits} bit{'' if self.little_endian else ', big-endian'})"


@dataclass(frozen=True)
class Library:
    """The facts about one shared library that decide whether it can be loaded; plain and picklable."""

    machine: Machine
    needed: tuple[str, ...] = ()
    search_paths: tuple[str, ...] = ()
    versions: tuple[VersionNeed, ...] = ()
    undefined: tuple[str, ...] = ()
    initializers: int = 0
    executable_stack: bool = False
    text_relocations: bool = False


def read_library(file: BinaryIO) -> Library:
    """The facts about a shared library.

    Raises:
        NotALibrary: another kind of file, or a damaged one.
    """
    tables = _open(file)
    return _guarded(tables.library)


def defined_versions(file: BinaryIO) -> frozenset[str]:
    """The symbol versions that a shared library defines: ``GLIBCXX_3.4.30`` and so on.

    Raises:
        NotALibrary: as ``read_library``.
    """
    tables = _open(file)
    return _guarded(lambda: frozenset(tables.defined_versions()))


def defined_symbols(file: BinaryIO) -> frozenset[str]:
    """The names that a shared library exports.

    Raises:
        NotALibrary: as ``read_library``.
    """
    tables = _open(file)
    return _guarded(lambda: frozenset(tables.symbols(defined=True)))


def machine_of(file: BinaryIO) -> Machine:
    """The machine that an ELF file is for.

    Raises:
        NotALibrary: it is no ELF file.
    """
    return _header_of(file, ("ET_DYN", "ET_EXEC")).machine


def held_names(file: BinaryIO, names: Iterable[str]) -> tuple[str, ...]:
    """Those of ``names`` that stand among the bytes of a file as a string of their own, as C writes one."""
    wanted = {name: b"\0" + name.encode() + b"\0" for name in sorted(names)}
    missing = dict(wanted)
    buffer = bytearray(_LONGEST_NAME + _PART)  # the end of the part before, then a part
    view = memoryview(buffer)
    while missing and (size := file.readinto(view[_LONGEST_NAME:])):  # type: ignore[attr-defined]  # files are raw
        end = _LONGEST_NAME + size
        missing = {name: text for name, text in missing.items() if buffer.find(text, 0, end) < 0}
        view[:_LONGEST_NAME] = view[size:end]
    return tuple(name for name in wanted if name not in missing)


def _open(file: BinaryIO) -> _Tables:
    header = _header_of(file, ("ET_DYN",))
    return _guarded(lambda: _Tables(file, header))


def _header_of(file: BinaryIO, kinds: tuple[str, ...]) -> _Header:
    start = file.read(len(MAGIC))
    if start != MAGIC:
        raise NotALibrary(f"not an ELF file (it starts with {shown(start)})" if start else "an empty file")
    header = _guarded(lambda: _Header.read(file))
    if header.kind not in kinds:
        raise NotALibrary(f"not a shared library but {shown(header.kind)}")
    return header


def _guarded(read: Callable[[], Read]) -> Read:
    """Damaged or hostile bytes make parsers fail in any way; all of them mean "damaged"."""
    try:
        return read()
    except NotALibrary:
        raise
    except Exception as error:
        raise NotALibrary(f"a damaged ELF file ({type(error).__name__}: {shown(str(error))})") from error


def _kind(file: BinaryIO) -> tuple[bool, int]:
    """The byte order (little?) and the width of an address, as the first bytes of an ELF file tell."""
    file.seek(len(MAGIC))
    widths, orders = {1: 32, 2: 64}, {1: True, 2: False}
    width, order = file.read(2)
    return orders[order], widths[width]


@cache
def _structures(little_endian: bool, bits: int) -> Any:
    """How the header of such a file is laid out."""
    from elftools.elf.structs import ELFStructs  # noqa: PLC0415  # as below

    structures = ELFStructs(little_endian=little_endian, elfclass=bits)
    structures.create_basic_structs()
    return structures


@cache
def _numbers() -> dict[str, int]:
    """The numbers of the kinds of segments, and of the tags of the dynamic table."""
    from elftools.elf.enums import ENUM_D_TAG_COMMON, ENUM_P_TYPE_BASE  # noqa: PLC0415  # as below

    return {**ENUM_P_TYPE_BASE, **ENUM_D_TAG_COMMON}


class _Header(NamedTuple):
    """What the header of an ELF file says."""

    kind: str
    machine: Machine
    segments: tuple[int, int, int]  # where they are described, how many there are, and the size of a description

    @classmethod
    def read(cls, file: BinaryIO) -> _Header:
        # Imported when a native library is met: most kernels have none, and pyelftools takes 10 ms to import.
        from elftools.common.utils import struct_parse  # noqa: PLC0415

        little_endian, bits = _kind(file)
        fields = struct_parse(_structures(little_endian, bits).Elf_Ehdr, file, stream_pos=0)
        machine = Machine(str(fields["e_machine"]).removeprefix("EM_").lower(), bits, little_endian)
        return cls(str(fields["e_type"]), machine, (fields["e_phoff"], fields["e_phnum"], fields["e_phentsize"]))


class _Segment(NamedTuple):
    """A part of the file, and where it lies in memory; all but ``kind`` and ``flags`` in bytes."""

    kind: int
    flags: int
    offset: int
    address: int
    size: int


class _Tables:
    """The tables of an ELF file that the dynamic loader uses; section headers, which it ignores, are ignored too."""

    def __init__(self, file: BinaryIO, header: _Header) -> None:
        self._file = file
        self.machine = header.machine
        self._wide = header.machine.bits == 64
        self._order = "<" if header.machine.little_endian else ">"
        self._segments = list(self._read_segments(*header.segments))
        self._check_length()
        self._dynamic = list(self._read_dynamic())
        self._strings = self._read_strings()
        self._versions_read = 0

    def library(self) -> Library:
        flags = self._values("DT_FLAGS")
        return Library(
            machine=self.machine,
            needed=tuple(map(self._string, self._values("DT_NEEDED"))),
            search_paths=tuple(
                part for tag in ("DT_RPATH", "DT_RUNPATH") for at in self._values(tag) for part in self._paths(at)
            ),
            versions=tuple(self._needed_versions()),
            undefined=tuple(islice(self.symbols(defined=False), _MOST_UNDEFINED)),
            initializers=sum(self._values("DT_INIT_ARRAYSZ")) // (self.machine.bits // 8),
            executable_stack=any(segment.flags & _EXECUTABLE for segment in self._of_kind("PT_GNU_STACK")),
            text_relocations=bool(self._values("DT_TEXTREL")) or any(flag & _DF_TEXTREL for flag in flags),
        )

    def symbols(self, *, defined: bool) -> Iterator[str]:
        """The names of the dynamic symbol table that are defined, or those that are needed; weak wants are no needs."""
        wide = self._wide
        record = struct.Struct(self._order + (_SYMBOL_64 if wide else _SYMBOL_32))
        where = self._values("DT_SYMTAB")
        if not where:
            return
        data = self._read(self._offset(where[0]), self._symbol_count(where[0], record.size) * record.size)
        for entry in record.iter_unpack(data[: len(data) - len(data) % record.size]):
            name, info, section = (entry[0], entry[1], entry[3]) if wide else (entry[0], entry[3], entry[5])
            if (section != _UNDEFINED) is defined and (defined or info >> 4 == _GLOBAL):
                text = self._string(name)
                if len(text) < _LONGEST_NAME:
                    yield text

    def defined_versions(self) -> Iterator[str]:
        table, name = self._versions("DT_VERDEF"), struct.Struct(self._order + _VERDAUX)
        for (*_, at), position in self._chain(table, 0, _VERDEF, sum(self._values("DT_VERDEFNUM"))):
            yield self._string(name.unpack_from(table, position + at)[0])

    def _needed_versions(self) -> Iterator[VersionNeed]:
        table = self._versions("DT_VERNEED")
        for (_, count, file, at), position in self._chain(table, 0, _VERNEED, sum(self._values("DT_VERNEEDNUM"))):
            library = self._string(file)
            for (_, flags, _, name), _ in self._chain(table, position + at, _VERNAUX, count):
                if not flags & _WEAK_VERSION:
                    yield VersionNeed(library, self._string(name))

    def _versions(self, tag: str) -> bytes:
        """A table of versions, and what comes behind it: its size is told nowhere."""
        return b"".join(self._read(self._offset(at), _MOST_VERSION_BYTES) for at in self._values(tag)[:1])

    def _chain(self, table: bytes, position: int, layout: str, count: int) -> Iterator[tuple[tuple[int, ...], int]]:
        """The records of a table, each of which ends with how far away the next one is; and where each stands."""
        record = struct.Struct(self._order + layout)
        for _ in range(count):
            self._versions_read += 1
            if self._versions_read > _MOST_VERSIONS:
                raise NotALibrary(f"a damaged ELF file (more than {_MOST_VERSIONS} symbol versions)")
            *fields, further = record.unpack_from(table, position)
            yield tuple(fields), position
            position += further
            if not further:
                return

    def _read_segments(self, offset: int, count: int, size: int) -> Iterator[_Segment]:
        if count > _MOST_SEGMENTS:
            raise NotALibrary(f"a damaged ELF file ({count} segments)")
        record = struct.Struct(self._order + (_SEGMENT_64 if self._wide else _SEGMENT_32))
        data = self._read(offset, count * size)
        for at in range(0, count * size, size):
            kind, *rest = record.unpack_from(data, at)
            if self._wide:
                flags, start, address, _, length, _, _ = rest
            else:
                start, address, _, length, _, flags, _ = rest
            yield _Segment(kind, flags, start, address, length)

    def _check_length(self) -> None:
        """What is mapped from behind the end of a file ends the process when it is touched."""
        end = self._file.seek(0, os.SEEK_END)
        for segment in self._of_kind("PT_LOAD") + self._of_kind("PT_DYNAMIC"):
            if segment.offset + segment.size > end:
                raise NotALibrary("a damaged ELF file (it ends before its segments do)")

    def _of_kind(self, name: str) -> list[_Segment]:
        return [segment for segment in self._segments if segment.kind == _numbers()[name]]

    def _read_dynamic(self) -> Iterator[tuple[int, int]]:
        record = struct.Struct(self._order + (_DYNAMIC_64 if self._wide else _DYNAMIC_32))
        for segment in self._of_kind("PT_DYNAMIC")[:1]:
            data = self._read(segment.offset, min(segment.size // record.size, _MOST_DYNAMIC) * record.size)
            for tag, value in record.iter_unpack(data):
                if tag == _numbers()["DT_NULL"]:
                    return
                yield tag, value

    def _read_strings(self) -> bytes:
        where, size = self._values("DT_STRTAB"), sum(self._values("DT_STRSZ"))
        return self._read(self._offset(where[0]), min(size, _MOST_STRINGS)) if where else b""

    def _symbol_count(self, table: int, size: int) -> int:
        """No table says how many symbols there are: the hash tables do, each in its way."""
        for address in self._values("DT_HASH"):
            return min(self._words(self._offset(address), 2)[1], _MOST_SYMBOLS)
        for address in self._values("DT_GNU_HASH"):
            if count := self._count_by_gnu_hash(self._offset(address)):
                return count
        strings = self._values("DT_STRTAB")  # which linkers put right behind the symbols
        return max(0, min((strings[0] - table) // size, _MOST_SYMBOLS)) if strings else 0

    def _count_by_gnu_hash(self, offset: int) -> int:
        """The chain of the highest bucket ends with the last symbol; 0 for a table without any."""
        buckets, first, bloom, _ = self._words(offset, 4)
        start = offset + 16 + bloom * (self.machine.bits // 8)
        last = max(self._words(start, min(buckets, _MOST_SYMBOLS)), default=0)
        if last < first:
            return 0
        chain = start + 4 * (buckets + last - first)
        for passed in range(0, _MOST_SYMBOLS, _CHAIN_PART):
            words = self._words(chain + 4 * passed, _CHAIN_PART, may_end=True)
            end = next((at for at, word in enumerate(words) if word & 1), None)
            if end is not None or not words:
                return min(last + 1 + passed + (end or 0), _MOST_SYMBOLS)
        return _MOST_SYMBOLS

    def _words(self, offset: int, count: int, *, may_end: bool = False) -> tuple[int, ...]:
        data = self._read(offset, 4 * count)
        if len(data) < 4 * count and not may_end:
            raise NotALibrary("a damaged ELF file (a table ends with the file)")
        return struct.unpack_from(f"{self._order}{len(data) // 4}I", data)

    def _read(self, offset: int, size: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(size)

    def _offset(self, address: int) -> int:
        for segment in self._of_kind("PT_LOAD"):
            if 0 <= address - segment.address < segment.size:
                return address - segment.address + segment.offset
        raise NotALibrary(f"a damaged ELF file (address {address:#x} is in none of its segments)")

    def _values(self, tag: str) -> list[int]:
        number = _numbers()[tag]
        return [value for found, value in self._dynamic if found == number]

    def _paths(self, at: int) -> list[str]:
        """The entries of a search path; an empty one, which means the current folder, stays."""
        return self._string(at).split(":")

    def _string(self, at: int) -> str:
        end = self._strings.find(b"\0", at, at + _LONGEST_NAME)
        return self._strings[at : at + _LONGEST_NAME if end < 0 else end].decode("ascii", "backslashreplace")
