"""Archive: tensors and facts in one ``.safetensors`` file, written tensor by tensor and read with suspicion.

The file holds nothing but numbers and JSON, so reading it runs no code. Everything in it may be hostile all the same:
sizes are limited before anything is read, and names, dtypes and shapes are compared with what the facts say.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open

from kernelhub.durable import open_regular
from kernelhub.errors import InvalidGolden

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO

FORMAT = "kernelhub-golden"
VERSION = 1
MOST_BYTES = 1 << 30
_MOST_HEADER = 16 << 20
_CHUNK = 16 << 20
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_EXPECTED = "a file written by `kernelhub capture`"


@dataclass
class Writer:
    """Takes tensors one at a time; ``most_bytes`` is what they may be together."""

    path: Path
    most_bytes: int
    _spool: BinaryIO
    _entries: dict[str, dict[str, Any]] = field(default_factory=dict)
    _size: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor under a name that is not taken yet.

        Raises:
            InvalidGolden: it does not fit any more, or has a dtype that the format does not have.
        """
        size = tensor.numel() * tensor.element_size()
        if self._size + size > self.most_bytes:
            problem = f"needs more than {self.most_bytes} bytes"
            raise InvalidGolden(str(self.path), problem, "fewer layers, smaller inputs, or a larger limit")
        if tensor.dtype not in _DTYPES:
            raise InvalidGolden(name, f"a tensor of {tensor.dtype}", f"one of {', '.join(_DTYPES.values())}")
        offsets = [self._size, self._size + size]
        self._entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        for chunk in _bytes_of(tensor):
            self._spool.write(chunk)
        self._size += size

    def finish(self, facts: dict[str, Any]) -> None:
        """Write the whole file in the place of an older one, or nothing."""
        stamp = {"format": FORMAT, "version": str(VERSION), "facts": json.dumps(facts)}
        header = json.dumps({"__metadata__": stamp, **self._entries}).encode()
        header += b" " * (-len(header) % 8)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(len(header).to_bytes(8, "little") + header)
                self._spool.seek(0)
                shutil.copyfileobj(self._spool, file, _CHUNK)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def writing(path: Path, most_bytes: int) -> Iterator[Writer]:
    """A writer for ``path``; what it has not finished leaves nothing behind."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as spool:
            yield Writer(path, most_bytes, spool)
    except OSError as error:
        raise InvalidGolden(
            str(path), f"cannot be written ({error.strerror or error})", "a folder to write in"
        ) from error


@dataclass(frozen=True)
class Archive:
    """The facts of a file; tensors are read when they are asked for."""

    path: Path
    facts: dict[str, Any]

    @classmethod
    def open(cls, path: Path, most_bytes: int = MOST_BYTES) -> Archive:
        """Read the facts.

        Raises:
            InvalidGolden: no such file, too large, damaged, or something else.
        """
        _check_sizes(path, most_bytes)
        with _reading(path) as file:
            stamp = file.metadata() or {}
        if stamp.get("format") != FORMAT or stamp.get("version") != str(VERSION):
            told = f"is {stamp.get('format')!a} version {stamp.get('version')!a}"
            raise InvalidGolden(str(path), told, f"{_EXPECTED}, version {VERSION}")
        try:
            facts = json.loads(stamp.get("facts", ""))
        except (ValueError, RecursionError) as error:
            raise InvalidGolden(str(path), f"its facts are no JSON ({error})", _EXPECTED) from None
        if not isinstance(facts, dict):
            raise InvalidGolden(str(path), "its facts are no object", _EXPECTED)
        return cls(path, facts)

    def tensor(self, name: object) -> torch.Tensor:
        """One tensor, on the CPU.

        Raises:
            InvalidGolden: there is none of that name.
        """
        with _reading(self.path) as file:
            if not isinstance(name, str) or name not in file.keys():  # noqa: SIM118  # it is no mapping
                raise InvalidGolden(str(self.path), f"lacks the tensor {name!a}", _EXPECTED)
            found: torch.Tensor = file.get_tensor(name)
            return found


def _check_sizes(path: Path, most_bytes: int) -> None:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            header = int.from_bytes(file.read(8) or b"", "little")
    except OSError as error:
        raise InvalidGolden(str(path), f"cannot be read ({error.strerror or error})", _EXPECTED) from error
    if size > most_bytes + _MOST_HEADER:
        raise InvalidGolden(str(path), f"{size} bytes", f"at most {most_bytes + _MOST_HEADER}")
    if not 2 <= header <= min(_MOST_HEADER, size - 8):
        raise InvalidGolden(str(path), f"a header of {header} bytes in a file of {size}", _EXPECTED)


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), "pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise InvalidGolden(str(path), f"is damaged ({error})", _EXPECTED) from None


def _bytes_of(tensor: torch.Tensor) -> Iterator[bytes]:
    plain = tensor.detach().contiguous().cpu()
    size = plain.numel() * plain.element_size()
    for start in range(0, size, _CHUNK):
        yield ctypes.string_at(plain.data_ptr() + start, min(_CHUNK, size - start))
