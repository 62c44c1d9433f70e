"""RepoInfo: the Hub repository that a loaded kernel came from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RepoInfo:
    """A Hub repository and the commit of it that was loaded."""

    repo_id: str
    revision: str
