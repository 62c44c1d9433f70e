"""Suggestion: what to ask for instead of a build whose libraries cannot be loaded here, as text to type."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernelhub.compatibility import select
from kernelhub.errors import KernelHubError
from kernelhub.preflight import preflight_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kernelhub.environment import Environment
    from kernelhub.index import Index
    from kernelhub.resolution import Resolution
    from kernelhub.store import Store

_MOST_ASKED = 5  # versions whose listing is looked at


def suggest(resolution: Resolution, index: Index, environment: Environment, store: Store) -> str:
    """A sentence that names other versions with a build for this machine; empty when none is known.

    A build that is stored is judged by its libraries too; of others only the name is known.
    """
    if resolution.folder is not None:
        return ""
    try:
        if index.refs(resolution.name).pins:  # a lock says which version it is
            return ""
        fitting = list(_fitting_versions(resolution, index, environment, store))
    except KernelHubError:  # the Hub cannot be asked: what failed before is what to tell
        return ""
    if not fitting:
        return "No other version has a build for this machine."
    requests = " or ".join(f"'{resolution.name}@v{version}'" for version in fitting)
    return f"Another version has a build for this machine: ask for {requests}."


def _fitting_versions(resolution: Resolution, index: Index, environment: Environment, store: Store) -> Iterator[int]:
    """Newest first."""
    others = [pair for pair in index.refs(resolution.name).versions.items() if pair[1] != resolution.commit]
    for version, commit in reversed(others[-_MOST_ASKED:]):
        best = select(index.builds(resolution.name, commit), environment).best
        if best is not None and _is_loadable(resolution.name, commit, str(best), store):
            yield version


def _is_loadable(repo_id: str, commit: str, variant: str, store: Store) -> bool:
    """May it be loaded here, as far as this machine knows its libraries?"""
    stored = store.find(repo_id, commit, variant)
    return stored is None or preflight_folder(repo_id, variant, stored.files_folder).refused is None
