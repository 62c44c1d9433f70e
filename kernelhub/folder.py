"""Local folder: builds on this machine, read in place: a user's own, or the collection shipped with kernelhub."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from kernelhub.buildpath import METADATA
from kernelhub.errors import FolderNotFound, RevisionNotFound
from kernelhub.revision import Revision, version_of_branch
from kernelhub.variant import Variant

COLLECTION_REPOSITORY = "kernelhub/layers"


@dataclass(frozen=True)
class LocalFolder:
    """The builds below a folder: ``<folder>/build/<variant>``, ``<folder>/<variant>``, or the folder itself.

    ``unnamed`` is set when the folder itself is a build whose name is not a variant: it is taken as it is.
    """

    label: str
    builds: dict[str, Path]
    unnamed: Path | None = None

    @classmethod
    def open(cls, folder: Path) -> LocalFolder:
        """Look for builds below ``folder``.

        Raises:
            FolderNotFound: the folder does not exist or holds no build.
        """
        if not folder.is_dir():
            raise FolderNotFound(str(folder), "this machine", "no such folder")
        named = Variant.is_name(folder.name)
        if named or _is_build(folder):
            builds = {folder.name: folder} if named else {}
            return cls(str(folder), builds, None if named else folder)
        parent = folder / "build" if (folder / "build").is_dir() else folder
        builds = {path.name: path for path in sorted(parent.iterdir()) if path.is_dir() and Variant.is_name(path.name)}
        if not builds:
            raise FolderNotFound(str(folder), "this machine", "no __init__.py and no build/<variant> folder in it")
        return cls(str(folder), builds)


def collection_folder() -> Path:
    """The folder of Hub repositories that is shipped inside the package."""
    return Path(str(resources.files("kernelhub"))) / "collection"


def open_builtin(revision: Revision | None) -> LocalFolder:
    """The shipped collection at a version; the newest when none is given, as it is pinned with the package.

    Raises:
        RevisionNotFound: it has no such version.
    """
    root = collection_folder() / COLLECTION_REPOSITORY
    versions = {number: path for path in root.iterdir() if (number := version_of_branch(path.name)) is not None}
    wanted = Revision.parse("latest") if revision is None else revision
    fitting = [number for number in sorted(versions) if wanted.admits(number)]
    if not fitting:
        raise RevisionNotFound("builtin", str(revision), sorted(versions))
    return LocalFolder(f"builtin@v{fitting[-1]}", LocalFolder.open(versions[fitting[-1]]).builds)


def _is_build(folder: Path) -> bool:
    return (folder / "__init__.py").is_file() or (folder / METADATA).is_file()
