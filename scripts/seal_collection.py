#!/usr/bin/env python3
"""Write the metadata.json of every build in the shipped collection; `--check` only tells whether they are current."""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import TYPE_CHECKING

from kernelhub.buildpath import METADATA, is_bytecode
from kernelhub.folder import collection_folder
from kernelhub.metadata import seal
from kernelhub.revision import version_of_branch
from kernelhub.variant import UNIVERSAL, Variant

if TYPE_CHECKING:
    from pathlib import Path

NAME = "kernelhub-layers"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a build is not sealed")
    check = parser.parse_args().check
    stale = [build for build in sorted(collection_folder().glob("*/*/v*/build/*")) if seal_build(build, check)]
    for build in stale:
        print(f"{'stale' if check else 'sealed'}: {build.relative_to(collection_folder())}")
    return 1 if check and stale else 0


def seal_build(build: Path, check: bool) -> bool:
    """Seal one build folder; True when its metadata was not what it should be."""
    files = read_files(build)
    content = hashlib.sha256(b"".join(path.encode() + files[path] for path in sorted(files))).hexdigest()
    noarch = Variant.parse(build.name).noarch or UNIVERSAL
    facts: dict[str, object] = {
        "name": NAME,
        "id": f"_kernelhub_layers_{noarch}_{content[:7]}",
        "version": version_of_branch(build.parent.parent.name),
        "license": "Apache-2.0",
        "python-depends": [],
        "kernel-depends": [],
        # The format has no type for "any backend": universal builds run wherever the CPU does.
        "backend": {"type": "cpu" if noarch == UNIVERSAL else noarch},
    }
    sealed = seal(files, facts)
    target = build / METADATA
    if target.is_file() and target.read_bytes() == sealed:
        return False
    if not check:
        target.write_bytes(sealed)
    return True


def read_files(build: Path) -> dict[str, bytes]:
    """The files of a build as its digest covers them: all but metadata and bytecode."""
    paths = {path.relative_to(build).as_posix(): path for path in sorted(build.rglob("*")) if path.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if name != METADATA and not is_bytecode(name)}


if __name__ == "__main__":
    sys.exit(main())
