"""What is read from the bytes of a library, and that no bytes can do harm while they are read."""

from __future__ import annotations

import io
import pickle
import random
import struct
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from compiled_kernel import marking_library
from elftools.elf.elffile import ELFFile

from kernelhub.elf import (
    Machine,
    NotALibrary,
    defined_symbols,
    defined_versions,
    machine_of,
    read_library,
)

if TYPE_CHECKING:
    from kernelhub.elf import Library

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ELF is what Linux has")

HEADER = b"\x7fELF\x02\x01\x01" + bytes(9)


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    flags = ("-Wl,-rpath,$ORIGIN:/opt/lib", "-Wl,-z,execstack")
    declare = "namespace c10 { void gone(int); }"
    return marking_library(tmp_path_factory.mktemp("elf"), "_probe", *flags, declare=declare, before="c10::gone(1);")


def read(data: bytes) -> Library:
    return read_library(io.BytesIO(data))


def test_the_facts_of_a_library(probe: bytes) -> None:
    library = read(probe)
    assert library.machine == machine_of(io.BytesIO(Path(sys.executable).resolve().read_bytes()))
    assert "libc.so.6" in library.needed
    assert library.search_paths == ("$ORIGIN", "/opt/lib")
    assert {need.library for need in library.versions} >= {"libc.so.6", "libstdc++.so.6"}
    assert {"_ZN3c104goneEi", "PyModule_Create2", "fopen"} <= set(library.undefined)
    assert library.initializers >= 1
    assert library.executable_stack
    assert not library.text_relocations
    assert defined_symbols(io.BytesIO(probe)) >= {"PyInit__probe"}
    assert pickle.loads(pickle.dumps(library)) == library


@pytest.mark.parametrize("style", ["sysv", "gnu", "both"])
def test_symbols_are_counted_by_either_hash_table(style: str, tmp_path: Path) -> None:
    library = read(marking_library(tmp_path, "_probe", f"-Wl,--hash-style={style}"))
    assert {"PyModule_Create2", "fopen"} <= set(library.undefined)


def test_the_versions_that_a_library_defines() -> None:
    maps = Path("/proc/self/maps").read_text()
    libc = next(line.split()[-1] for line in maps.splitlines() if line.endswith("/libc.so.6"))
    with Path(libc).open("rb") as file:
        assert {"GLIBC_2.17", "GLIBC_2.3"} <= defined_versions(file)


def test_a_machine_is_told_in_words() -> None:
    assert str(Machine("aarch64", 64, True)) == "aarch64 (64 bit)"
    assert str(Machine("ppc64", 64, False)) == "ppc64 (64 bit, big-endian)"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "an empty file"),
        (b"MZ\x90\0", "not an ELF file"),
        (b"\x1b[2J", r"not an ELF file \(it starts with b'\\x1b\[2J'\)"),
        (b"\x7fELF", "a damaged ELF file"),
        (HEADER + struct.pack("<HH", 1, 62) + bytes(44), "not a shared library but 'ET_REL'"),
        (HEADER + struct.pack("<HH", 3, 62) + bytes(36) + b"\xff" * 8, "damaged"),
    ],
)
def test_what_is_no_library_is_told(data: bytes, problem: str) -> None:
    with pytest.raises(NotALibrary, match=problem):
        read(data)


def test_names_without_an_end_are_cut(probe: bytes) -> None:
    """A string table without a NUL would make each of a million names as long as the table."""
    start = probe.index(b"\0PyInit__probe\0")
    end = probe.index(b"\0\0", start)
    library = read(probe[:start] + probe[start:end].replace(b"\0", b"_") + probe[end:])
    assert all(len(name) < 2048 for name in library.undefined)


def test_a_library_that_ends_before_its_segments_do_is_refused(probe: bytes) -> None:
    """What is mapped from behind the end of a file ends the process, even where all tables are there."""
    segments = ELFFile(io.BytesIO(probe)).iter_segments("PT_LOAD")
    end = max(segment.header["p_offset"] + segment.header["p_filesz"] for segment in segments)
    assert read(probe[:end])
    for length in [*range(64, end, 997), end - 1]:
        with pytest.raises(NotALibrary, match="damaged ELF file"):
            read(probe[:length])


def test_a_table_of_versions_that_overlaps_itself_is_refused(probe: bytes) -> None:
    """Each record of a file counts those behind it as its own: a thousand of them make half a million."""
    data = bytearray(probe)
    [dynamic] = ELFFile(io.BytesIO(probe)).iter_segments("PT_DYNAMIC")
    start = dynamic.header["p_offset"]
    for at, tag in enumerate(dynamic.iter_tags()):
        if tag.entry.d_tag == "DT_VERNEEDNUM":
            struct.pack_into("<Q", data, start + 16 * at + 8, 1 << 40)
        if tag.entry.d_tag == "DT_VERNEED":
            [table] = dynamic.elffile.address_offsets(tag.entry.d_val)
    for at in range(table, start - 16, 16):
        struct.pack_into("<HHIII", data, at, 1, 0xFFFF, 0, 16, 16)
    with pytest.raises(NotALibrary, match="more than 4096 symbol versions"):
        read(bytes(data))


def test_hostile_bytes_are_refused_or_read_quickly_and_never_crash(probe: bytes) -> None:
    """Seeded: each run flips bytes, mostly in the headers, cuts the file, or repeats a part of it."""
    chance = random.Random(17)
    refused = 0
    for _ in range(400):
        data = bytearray(probe)
        for _ in range(chance.choice((1, 2, 8))):
            at = chance.randrange(chance.choice((64, 1024, len(data))))
            data[at] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        if chance.random() < 0.1:
            del data[chance.randrange(len(data)) :]
        start = time.perf_counter()
        try:
            read(bytes(data))
        except NotALibrary:
            refused += 1
        assert time.perf_counter() - start < 5  # a busy machine is slow; alone each takes milliseconds
    assert refused
