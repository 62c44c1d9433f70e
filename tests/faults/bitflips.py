#!/usr/bin/env python3
"""Flip single bits in stored files: each has to be found before anything is imported (R34, R35).

Half of the flips are found by an ordinary load (a stat shows the write); the other half hide their time stamps and
inode from it, as a failing disk does, and have to be found in a shared store and by ``kernelhub cache verify``, which
hash every file. Every tenth trial cuts a file to nothing instead.

    python tests/faults/bitflips.py --flips 1000 --seed 1
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
from typing import TYPE_CHECKING, NamedTuple

from scene import ENVIRONMENT, REPO, report, scene

from kernelhub.environment import Environment
from kernelhub.errors import DigestMismatch
from kernelhub.request import KernelRequest
from kernelhub.session import Session
from kernelhub.verify import rehash, verify_stored

if TYPE_CHECKING:
    from pathlib import Path

    from kernelhub.store import StoredBuild


class Figures(NamedTuple):
    flips: int
    found: int
    hidden: int
    failures: list[str]


def run(flips: int, seed: int) -> Figures:
    """Damage a stored file ``flips`` times, each time only that."""
    dice = random.Random(seed)
    found = hidden = 0
    failures: list[str] = []
    with scene() as (folder, hub):
        session = Session(
            cache_dir=folder / "store",
            endpoint=hub.url,
            token=False,
            lockfile=False,
            environment=Environment.parse(ENVIRONMENT),
        )
        resolution = session.resolve(KernelRequest.parse(REPO))
        session.obtain(resolution)
        for flip in range(flips):
            [build] = session.store.builds()
            file = dice.choice(build.manifest.files)
            path = build.files_folder / file.path
            body = path.read_bytes()
            what = _damage(path, body, dice, cut=flip % 10 == 9)
            disguised = flip % 2 == 1
            if disguised:
                hidden += 1
                _pretend_verified(build)
                verify_stored(build, resolution)  # a stat cannot know
                build = dataclasses.replace(build, always_hash=True)
            try:
                verify_stored(build, resolution)
                failures.append(f"flip {flip}: {what} was not found")
            except DigestMismatch as error:
                found += str(file.path) in str(error)
            try:
                rehash(build)
                failures.append(f"flip {flip}: {what} was not found by a full check")
            except DigestMismatch:
                pass
            path.write_bytes(body)
            path.chmod(0o444)
    return Figures(flips, found, hidden, failures)


def _damage(path: Path, body: bytes, dice: random.Random, *, cut: bool) -> str:
    path.chmod(0o644)
    if cut:
        path.write_bytes(b"")
        return f"{path.name} cut to nothing"
    place, bit = dice.randrange(len(body)), dice.randrange(8)
    with path.open("r+b") as file:
        file.seek(place)
        file.write(bytes([body[place] ^ 1 << bit]))
    return f"bit {bit} of byte {place} of {path.name}"


def _pretend_verified(build: StoredBuild) -> None:
    """Write the receipt that a verification would have written just after the damage."""
    from kernelhub.store import FileStat

    stats = {file.path: FileStat.of(os.lstat(build.files_folder / file.path)) for file in build.manifest.files}
    build.write_receipt(stats)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    figures = run(arguments.flips, arguments.seed)
    facts: dict[str, object] = {
        "flips": figures.flips,
        "found before import": figures.found,
        "of them hidden from stat": figures.hidden,
    }
    return report(f"bit flips, seed {arguments.seed}", facts, figures.failures)


if __name__ == "__main__":
    sys.exit(main())
