"""Source: where a build's code is read from when it is imported.

``FolderSource`` reads the files of a verified build where they lie. ``SealedSource`` is for the strict mode: it takes
every file into memory once, checks that this is the build that was verified, and from then on hands out those very
bytes; what is written to the folder later changes nothing (S-17).
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import os
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.util import decode_source
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol

from kernelhub.buildpath import is_bytecode
from kernelhub.durable import open_regular
from kernelhub.errors import DigestMismatch, ImportFailed
from kernelhub.manifest import Manifest, StoredFile
from kernelhub.preflight import is_library

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.verify import VerifiedBuild

if sys.platform == "linux":
    import fcntl

_CHUNK = 1 << 20  # two of them fit into the second-level cache: copied and hashed there
_HANDLES = "/proc/self/fd/"


class Source(Protocol):
    """Answers for the files of one build; paths are those of the files in its folder."""

    def has_file(self, path: Path) -> bool:
        """Is there a file of that name?"""

    def has_folder(self, path: Path) -> bool:
        """Is there a folder of that name?"""

    def paths(self) -> Iterator[str]:
        """The files, relative to the build."""

    def open(self, path: str) -> BinaryIO:
        """One of them for reading."""

    def read(self, path: str) -> bytes:
        """The bytes of a file, given by its full path."""

    def library(self, path: Path) -> str:
        """What the dynamic loader opens for a native module."""


class FolderSource:
    """The files where they lie."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def has_file(self, path: Path) -> bool:
        return path.is_file()

    def has_folder(self, path: Path) -> bool:
        return path.is_dir()

    def paths(self) -> Iterator[str]:
        return (path.relative_to(self._folder).as_posix() for path in self._folder.rglob("*") if path.is_file())

    def open(self, path: str) -> BinaryIO:
        return open_regular(self._folder / path)

    def read(self, path: str) -> bytes:
        return Path(path).read_bytes()

    def library(self, path: Path) -> str:
        return str(path)


class SealedSource:
    """The bytes of all files of a build as they were when it was made, hashed after they were taken.

    Python sources are kept in memory, native libraries in sealed anonymous files (on Linux; elsewhere in a private
    copy), which stay open as long as the process lives. Other files are hashed, and hashed again when they are read
    through the loader.

    Raises:
        DigestMismatch: the files are not those that were verified.
    """

    def __init__(self, build: VerifiedBuild) -> None:
        self._folder = build.folder
        self._build = build.build
        self._sources: dict[str, bytes] = {}
        self._libraries: dict[str, str] = {}
        self._hashes: dict[str, str] = {}
        try:
            files = tuple(self._take(path) for path in sorted(_files_below(self._folder)))
            if Manifest("", "", "", "", files).digest != build.digest:
                raise DigestMismatch(build.build, self._changed(build), "changed after it was verified")
        except BaseException:
            self._release()
            raise
        _refuse_other_openings(self._folder)

    def has_file(self, path: Path) -> bool:
        return self._relative(path) in self._hashes

    def has_folder(self, path: Path) -> bool:
        prefix = f"{self._relative(path)}/"
        return any(name.startswith(prefix) for name in self._hashes)

    def paths(self) -> Iterator[str]:
        return iter(self._hashes)

    def open(self, path: str) -> BinaryIO:
        if path in self._libraries:
            return Path(self._libraries[path]).open("rb")
        return BytesIO(self.read(str(self._folder / path)))

    def read(self, path: str) -> bytes:
        name = self._relative(Path(path))
        if name in self._sources:
            return self._sources[name]
        with open_regular(self._folder / name) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != self._hashes.get(name):
            raise DigestMismatch(self._build, name, "changed after it was verified")
        return data

    def library(self, path: Path) -> str:
        return self._libraries[self._relative(path)]

    def remember_lines(self, path: str) -> None:
        """Let tracebacks, ``inspect`` and compilers that read their source see what runs, not what the folder holds.

        An entry without a time is what ``linecache`` never checks against the file.
        """
        text = decode_source(self.read(path))
        linecache.cache[path] = (len(text), None, text.splitlines(keepends=True), path)

    def _take(self, path: str) -> StoredFile:
        """Read one file to its end, from one opening."""
        try:
            with open_regular(self._folder / path) as file:
                found = self._take_library(path, file) if is_library(path) else self._take_text(path, file)
        except OSError as error:
            raise DigestMismatch(self._build, path, f"cannot be read ({error.strerror})") from error
        self._hashes[path] = found.sha256
        return found

    def _take_text(self, path: str, file: BinaryIO) -> StoredFile:
        if path.endswith(".py"):
            data = file.readall() if hasattr(file, "readall") else file.read()
            self._sources[path] = data
            return StoredFile(path, len(data), hashlib.sha256(data).hexdigest())
        hasher, size = hashlib.sha256(), 0
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
        return StoredFile(path, size, hasher.hexdigest())

    def _take_library(self, path: str, file: BinaryIO) -> StoredFile:
        if sys.platform == "linux":
            self._libraries[path], size, digest = _seal(file, path)
        else:
            self._libraries[path], size, digest = _copy(file, path)
        return StoredFile(path, size, digest)

    def _release(self) -> None:
        """Give back what was taken, when nothing of it was opened."""
        for library in self._libraries.values():
            if library.startswith(_HANDLES):
                os.close(int(library.removeprefix(_HANDLES)))
            else:
                shutil.rmtree(Path(library).parent, ignore_errors=True)

    def _changed(self, build: VerifiedBuild) -> str:
        """The file that differs, as far as the metadata tells."""
        digest = build.metadata.digest if build.metadata else None
        listed = digest.files if digest is not None and digest.algorithm == "sha256" else {}
        return next((path for path in listed if self._hashes.get(path) != listed[path].hex()), ".")

    def _relative(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix() if path.is_relative_to(self._folder) else ""


def _files_below(folder: Path) -> Iterator[str]:
    return (
        name
        for path in folder.rglob("*")
        if not path.is_dir() and not is_bytecode(name := path.relative_to(folder).as_posix())
    )


def _seal(file: BinaryIO, name: str) -> tuple[str, int, str]:
    """An anonymous file that nobody can write any more, its size and sha256; hashed while the next part is copied."""
    source, handle = (
        file.fileno(),
        os.memfd_create(name.rpartition("/")[2][:200], os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING),
    )
    buffers = bytearray(_CHUNK), bytearray(_CHUNK)
    hasher, size = hashlib.sha256(), 0

    def take(part: int) -> memoryview:
        read = os.preadv(source, [buffers[part % 2]], part * _CHUNK)
        os.pwrite(handle, taken := memoryview(buffers[part % 2])[:read], part * _CHUNK)
        return taken

    with ThreadPoolExecutor(1) as copier:
        coming = copier.submit(take, 0)
        for part in count(1):
            taken = coming.result()
            if not taken:
                break
            coming = copier.submit(take, part)
            hasher.update(taken)
            size += len(taken)
    seals = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL
    fcntl.fcntl(handle, fcntl.F_ADD_SEALS, seals)
    return f"{_HANDLES}{handle}", size, hasher.hexdigest()


def _copy(file: BinaryIO, name: str) -> tuple[str, int, str]:
    """A copy in a new folder that only this user can enter."""
    target = Path(tempfile.mkdtemp(prefix="kernelhub-")) / name.rpartition("/")[2]
    hasher, size = hashlib.sha256(), 0
    with target.open("xb") as copy:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
            size += len(chunk)
            copy.write(chunk)
    target.chmod(0o400)
    return str(target), size, hasher.hexdigest()


_STRICT_FOLDERS: list[str] = []


def _refuse_other_openings(folder: Path) -> None:
    """In the strict mode a kernel may not open a library of its folder by itself: those bytes were not hashed."""
    if not _STRICT_FOLDERS:
        sys.addaudithook(_watch)
    _STRICT_FOLDERS.append(f"{folder}{os.sep}")


def _watch(event: str, arguments: tuple[object, ...]) -> None:
    if event != "ctypes.dlopen" or not arguments or not isinstance(arguments[0], (str, bytes)):
        return
    with contextlib.suppress(UnicodeDecodeError):
        path = os.path.realpath(os.fsdecode(arguments[0]))
        if path.startswith(tuple(_STRICT_FOLDERS)):
            raise ImportFailed(path, "a kernel opens this library by itself, which the strict mode does not allow")
