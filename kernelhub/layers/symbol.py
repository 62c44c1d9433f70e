"""Symbols of kernels, loaded or only planned; this module needs no torch."""

from __future__ import annotations

from typing import Any, NamedTuple


class LoadedSymbol(NamedTuple):
    """A layer class or function of a kernel, and where it comes from (``org/repo@commit``)."""

    value: Any
    kernel: str
    variant: str
    symbol: str


class PlannedSymbol(NamedTuple):
    """What would be loaded: the same facts as ``LoadedSymbol``, without the code."""

    kernel: str
    variant: str
    symbol: str
