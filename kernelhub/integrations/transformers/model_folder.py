"""Model folder: the kernel config of a model, kept beside its weights as ``kernel_config.json``.

What lies in a model's folder may come from anybody. It grants no trust and pins nothing (S-07): it can only choose
among the kernels of the user's own lock and those shipped with kernelhub.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernelhub import setting
from kernelhub.config import KernelConfig
from kernelhub.document import read_document
from kernelhub.errors import InvalidConfig
from kernelhub.integrations.transformers.conversion import with_trust
from kernelhub.lockfile import Lock
from kernelhub.resolution import DEFAULT_REVISION

if TYPE_CHECKING:
    import os

    from kernelhub.config import KernelChoice

FILE_NAME = "kernel_config.json"

_logger = logging.getLogger("kernelhub")


def save_config(config: KernelConfig, folder: str | os.PathLike[str]) -> Path:
    """Write a config into the folder of a model, without what it says about trust; returns the file's path."""
    path = Path(folder) / FILE_NAME
    path.write_text(json.dumps(with_trust(config, False).to_dict(), indent=2) + "\n", encoding="utf-8")
    return path


def load_config(folder: str | os.PathLike[str]) -> KernelConfig:
    """The config that lies in a model's folder, as far as it may be followed.

    Kernels count that are shipped with kernelhub, or that the lock in force has (``KERNELHUB_LOCK``, or
    ``kernelhub.lock`` in the current folder unless that is the model's). The log names the others. Who wants to follow
    the whole file, as a config of their own, reads it with ``KernelConfig.from_file``.

    Raises:
        InvalidConfig: no such file, it cannot be read, or it wants to grant trust.
    """
    path = Path(folder) / FILE_NAME
    config = KernelConfig.from_dict(read_document(path))
    _refuse_trust(config, path)
    lock = _lock_beside(Path(folder))
    entries = [entry for entry in config.entries if all(_may_choose(choice, lock) for _, choice in entry.choices)]
    if left := [entry.layer for entry in config.entries if entry not in entries]:
        advice = f"kernel_config=KernelConfig.from_file({str(path)!r}) follows all of it, or lock its kernels"
        _logger.warning("%s: %s not followed, from a model's folder only locked kernels are: %s", path, left, advice)
    return KernelConfig(KernelConfig.of_entries(entries).kernel_mapping, False, config.inherit_mapping)


def found_in(name: Any) -> KernelConfig | None:
    """The same for the name of a model; None if that is no folder, or has nothing that may be followed."""
    try:
        there = (Path(name) / FILE_NAME).is_file()
    except (TypeError, OSError, ValueError):
        return None
    config = load_config(name) if there else None
    return config if config else None


def _refuse_trust(config: KernelConfig, path: Path) -> None:
    for choice in config.choices():
        if choice.trust_remote_code:
            problem = "trust_remote_code in a model's folder"
            raise InvalidConfig(str(choice.request), problem, "trust given in code, by the user", str(path))


def _may_choose(choice: KernelChoice | None, lock: Lock) -> bool:
    if choice is None or choice.request.is_builtin:
        return True
    repo_id = choice.request.repo_id
    return repo_id is not None and lock.find(repo_id, choice.request.revision or DEFAULT_REVISION) is not None


def _lock_beside(folder: Path) -> Lock:
    """The lock in force, unless the folder brings it itself."""
    path = setting.lock_path()
    if path is None or folder.resolve() in path.resolve().parents:
        return Lock()
    return Lock.read(path)
