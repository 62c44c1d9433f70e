"""Preflight record: what preflight found about the libraries of a stored build, kept beside its receipt.

A verdict holds for these very files and for a process like the one that gave it: the same torch, C and C++ libraries,
Python and kernelhub. For any other, and when the record is damaged, the libraries are judged anew. Where others can
write, none is kept or believed.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from kernelhub.host import fingerprint
from kernelhub.preflight import LibraryReport, PreflightReport, is_library, preflight

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kernelhub.source import Source
    from kernelhub.verify import VerifiedBuild

NAME = "preflight"


def judge(build: VerifiedBuild, source: Source) -> PreflightReport:
    """What there is to say about the native libraries of a verified build, before any of them is opened."""
    paths = sorted(path for path in source.paths() if is_library(path))
    if build.stored is None or not paths or sys.platform != "linux":
        return _judge_anew(build, source, paths)
    kept = build.stored.kept(NAME, fingerprint())
    report = None if kept is None else _read(build.build, kept, paths)
    if report is None:
        report = _judge_anew(build, source, paths)
        if not any(library.unread for library in report.libraries):
            build.stored.keep(NAME, _plain(report), fingerprint())
    return report


def _judge_anew(build: VerifiedBuild, source: Source, paths: list[str]) -> PreflightReport:
    names = [build.metadata.id] if build.metadata and build.metadata.id else []
    return preflight(build.build, build.variant, paths, source.open, names=names)


def _plain(report: PreflightReport) -> dict[str, Any]:
    return {"libraries": [library._asdict() for library in report.libraries], "notes": report.notes}


def _read(build: str, facts: Mapping[str, Any], paths: list[str]) -> PreflightReport | None:
    """A report as it was kept; None when the record says something else than a report on these libraries."""
    try:
        libraries = tuple(_read_library(library) for library in facts["libraries"])
        notes = _texts(facts["notes"])
    except (KeyError, TypeError, ValueError):
        return None
    return PreflightReport(build, libraries, notes) if [each.path for each in libraries] == paths else None


def _read_library(facts: Mapping[str, Any]) -> LibraryReport:
    path, registers = facts["path"], facts["registers"]
    if not isinstance(path, str) or not isinstance(registers, bool):
        raise TypeError
    return LibraryReport(path, _texts(facts["reasons"]), _texts(facts["notes"]), registers, _texts(facts["namespaces"]))


def _texts(values: object) -> tuple[str, ...]:
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise TypeError
    return tuple(values)
