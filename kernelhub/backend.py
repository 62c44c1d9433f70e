"""Backends: the compute platforms that a build can be made for, one row each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from kernelhub.errors import InvalidBackend, did_you_mean


class Release(NamedTuple):
    """A ``major.minor`` pair, compared as integers (12.10 is newer than 12.9)."""

    major: int
    minor: int

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


class BackendKind(NamedTuple):
    """One row of the table: how a backend is spelled wherever it occurs.

    ``token`` starts the backend part of a compiled variant (``cu130``); ``major_digits`` says how many digits
    of the number behind it are the major version (0: the token carries no version); ``noarch`` is the name in
    ``torch-<noarch>``; ``device`` is torch's device type; ``aliases`` are accepted in configs besides ``name``.
    """

    name: str
    token: str
    major_digits: int
    noarch: str
    device: str
    aliases: tuple[str, ...] = ()


# Order is the order in which a process is asked for its backend (hub-format: TPU first, CPU last).
BACKENDS: tuple[BackendKind, ...] = (
    BackendKind("tpu", "tpu", 0, "tpu", "xla"),
    BackendKind("neuron", "neuron", 0, "neuron", "neuron"),
    BackendKind("cuda", "cu", 2, "cuda", "cuda"),
    BackendKind("rocm", "rocm", 1, "rocm", "cuda"),
    BackendKind("metal", "metal", 0, "metal", "mps", ("mps",)),
    BackendKind("xpu", "xpu", 4, "xpu", "xpu"),
    BackendKind("cann", "cann", 1, "npu", "npu", ("npu",)),
    BackendKind("cpu", "cpu", 0, "cpu", "cpu"),
)
_BY_NAME = {spelling: kind for kind in BACKENDS for spelling in (kind.name, *kind.aliases)}
_BY_TOKEN = {kind.token: kind for kind in BACKENDS}
_TOKEN = re.compile(r"(?P<token>[a-z]+)(?P<digits>[0-9]*)", re.ASCII)

ACCEPTED_NAMES: tuple[str, ...] = tuple(sorted(_BY_NAME))


def backend_kind(name: str) -> BackendKind:
    """The backend called ``name`` in a config, a target or an argument (``mps`` and ``npu`` are aliases).

    Raises:
        InvalidBackend: no such backend; the message lists the accepted names.
    """
    kind = _BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        plain = str(name).lower().partition(":")[0]
        raise InvalidBackend(
            name, f"unknown name{did_you_mean(plain, ACCEPTED_NAMES)}", f"one of {', '.join(ACCEPTED_NAMES)}"
        )
    return kind


def device_backend(device_type: str, *, rocm: bool = False) -> str:
    """The backend name of a torch device type; on ROCm torch calls its devices ``cuda`` too."""
    if device_type == "cuda":
        return "rocm" if rocm else "cuda"
    return next((kind.name for kind in BACKENDS if kind.device == device_type), device_type)


@dataclass(frozen=True)
class Backend:
    """A backend with the version it was built for or runs with, e.g. ``cu130`` = CUDA 13.0."""

    name: str
    release: Release | None = None

    @property
    def kind(self) -> BackendKind:
        return backend_kind(self.name)

    @classmethod
    @lru_cache(maxsize=4096)  # a listing of thousands of builds names few backends
    def parse(cls, text: str) -> Backend:
        """Read the backend part of a compiled variant's name (``cpu``, ``cu1210``, ``rocm714``, ``xpu20253``).

        Raises:
            InvalidBackend: not a backend, or not its canonical spelling.
        """
        match = _TOKEN.fullmatch(text)
        kind = _BY_TOKEN.get(match["token"]) if match else None
        if match is None or kind is None:
            tokens = ", ".join(sorted(_BY_TOKEN))
            raise InvalidBackend(text, "unknown backend", f"one of {tokens}, with its version digits")
        release = split_release(match["digits"], kind.major_digits)
        if (release is None) != (kind.major_digits == 0) or (release is None and match["digits"]):
            raise InvalidBackend(text, "no readable version", f"like {_example(kind)}")
        return cls(kind.name, release)

    def __str__(self) -> str:
        return self._text

    @cached_property
    def _text(self) -> str:
        version = "" if self.release is None else f"{self.release.major}{self.release.minor}"
        return f"{self.kind.token}{version}"

    def describe(self) -> str:
        """For people: ``CUDA 13.0`` is written ``cuda 13.0``."""
        return self.name if self.release is None else f"{self.name} {self.release}"


@lru_cache(maxsize=4096)
def split_release(digits: str, major_digits: int) -> Release | None:
    """Split ``1210`` into 12.10; None for other text, when there is no minor left or a part has a leading zero."""
    major, minor = digits[:major_digits], digits[major_digits:]
    if not major_digits or not minor or len(digits) > _MOST_DIGITS or not (digits.isascii() and digits.isdigit()):
        return None
    if (len(major) > 1 and major.startswith("0")) or (minor.startswith("0") and minor != "0"):
        return None
    return Release(int(major), int(minor))


_MOST_DIGITS = 8  # far above every real version; keeps int() away from hostile lengths


def _example(kind: BackendKind) -> str:
    examples = {2: "130 for 13.0", 1: "63 for 6.3", 4: "20253 for 2025.3"}
    return f"{kind.token}{examples[kind.major_digits]}" if kind.major_digits else kind.token
