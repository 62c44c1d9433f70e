"""Setting: the environment variables that kernelhub reads, each when it is used and never at import."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from kernelhub.errors import InvalidConfig

DEFAULT_ENDPOINT = "https://huggingface.co"
TRUST_ROOT_NAME = "trust-root.json"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


def flag(name: str, *, default: bool = False) -> bool:
    """A yes/no variable; unset means ``default``.

    Raises:
        InvalidConfig: set to something that is neither.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    if value.strip().lower() in _TRUE:
        return True
    if value.strip().lower() in _FALSE:
        return False
    raise InvalidConfig(value, "neither yes nor no", f"one of {', '.join((*_TRUE, *_FALSE[1:]))}", f"variable {name}")


def seconds(name: str, default: float) -> float:
    """A positive number of seconds, at most a day.

    Raises:
        InvalidConfig: not a number in that range.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 < number <= 86_400:
        raise InvalidConfig(value, "not a number of seconds", "a number above 0, at most 86400", f"variable {name}")
    return number


def count(name: str, default: int, least: int, most: int) -> int:
    """A whole number from ``least`` to ``most``.

    Raises:
        InvalidConfig: not a number in that range.
    """
    value = os.environ.get(name)
    if value is None:
        return default
    plain = value.strip()
    number = int(plain) if plain.isascii() and plain.isdecimal() and len(plain) < 20 else -1
    if not least <= number <= most:
        expected = f"a whole number from {least} to {most}"
        raise InvalidConfig(value, "not a number in that range", expected, f"variable {name}")
    return number


def offline() -> bool:
    """Is the Hub off limits (``HF_HUB_OFFLINE``, or transformers' older name for it)?"""
    return flag("HF_HUB_OFFLINE") or flag("TRANSFORMERS_OFFLINE")


def endpoint() -> str:
    """The Hub's address without a trailing slash (``HF_ENDPOINT``)."""
    return (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")


def store_folder() -> Path:
    """Where builds are kept: ``KERNELHUB_CACHE``, else ``KERNELS_CACHE``, else ``kernelhub`` under ``HF_HOME``."""
    for name in ("KERNELHUB_CACHE", "KERNELS_CACHE"):
        if os.environ.get(name):
            return usable_path(Path(os.environ[name]), f"variable {name}")
    return hf_home() / "kernelhub"


def usable_path(path: Path, origin: str = "variables KERNELHUB_CACHE, HF_HOME, HOME") -> Path:
    """An absolute path, with ``~`` replaced.

    Raises:
        InvalidConfig: it needs a home folder or a current folder, and there is none.
    """
    try:
        return path.expanduser().absolute()
    except (RuntimeError, FileNotFoundError) as error:
        problem = "no home folder is known" if isinstance(error, RuntimeError) else "the current folder was deleted"
        raise InvalidConfig(str(path), problem, "an absolute path", origin) from None


def backend() -> str | None:
    """The backend to ask builds for when none is named (``KERNELHUB_BACKEND``): ``cpu`` on a CUDA Torch without GPU."""
    return os.environ.get("KERNELHUB_BACKEND") or None


def kernels_switched_off() -> str | None:
    """The variable that switches off all kernels of transformers' models, or None (``USE_HUB_KERNELS=0``)."""
    if flag("DISABLE_KERNEL_MAPPING"):
        return "DISABLE_KERNEL_MAPPING"
    # transformers' own rule: anything else than these is a no.
    yes = os.environ.get("USE_HUB_KERNELS", "yes").lower() in _TRUE
    return None if yes else "USE_HUB_KERNELS"


def liger_source() -> str | None:
    """Where the kernels for Liger's switches come from (``KERNELHUB_LIGER_SOURCE``): ``builtin`` or a repository."""
    return os.environ.get("KERNELHUB_LIGER_SOURCE") or None


def transformers_switch() -> str | None:
    """Whether new processes let kernelhub serve transformers (``KERNELHUB_TRANSFORMERS``): ``on``, ``shadow`` or None.

    Raises:
        InvalidConfig: set to something else than yes, no or shadow.
    """
    if os.environ.get("KERNELHUB_TRANSFORMERS", "").strip().lower() == "shadow":
        return "shadow"
    return "on" if flag("KERNELHUB_TRANSFORMERS") else None


def lock_path() -> Path | None:
    """The lock file in force: ``KERNELHUB_LOCK``, else ``kernelhub.lock`` in the current folder, else none."""
    if os.environ.get("KERNELHUB_LOCK"):
        return usable_path(Path(os.environ["KERNELHUB_LOCK"]), "variable KERNELHUB_LOCK")
    return next((path.absolute() for path in [Path("kernelhub.lock")] if path.is_file()), None)


def policy_path() -> Path | None:
    """The user's policy: ``KERNELHUB_POLICY``, else ``kernelhub/kernelhub.toml`` in the configuration folder, or none.

    Never a file of the current folder: a policy grants trust, and a folder may come from anywhere.
    """
    if os.environ.get("KERNELHUB_POLICY"):
        return usable_path(Path(os.environ["KERNELHUB_POLICY"]), "variable KERNELHUB_POLICY")
    return _configured("kernelhub.toml")


def trust_root_path() -> Path | None:
    """The file of the authorities whose signatures count that is named by ``KERNELHUB_TRUST_ROOT``, or None."""
    name = os.environ.get("KERNELHUB_TRUST_ROOT")
    return usable_path(Path(name), "variable KERNELHUB_TRUST_ROOT") if name else None


def refreshed_root_path() -> Path | None:
    """The trust root that was refreshed last, in the user's configuration folder, or None."""
    return _configured(TRUST_ROOT_NAME)


def config_folder() -> Path:
    """kernelhub's part of the user's configuration folder.

    Raises:
        InvalidConfig: nobody's home.
    """
    return usable_path(Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config"), "variable XDG_CONFIG_HOME") / "kernelhub"


def _configured(name: str) -> Path | None:
    """A file of the user's configuration folder, if it is there."""
    try:
        folder = config_folder()
    except InvalidConfig:  # nobody's home: no file either
        return None
    try:
        return next((path for path in [folder / name] if path.is_file()), None)
    except OSError as error:  # there may be one, and nobody can tell what it forbids
        problem = f"cannot be looked into ({error.strerror})"
        raise InvalidConfig(str(folder), problem, "a readable folder", "variable XDG_CONFIG_HOME") from error


def hf_home() -> Path:
    """huggingface_hub's home folder, from the same variables in the same order."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or str(Path(cache) / "huggingface")
    return usable_path(Path(home))


def hf_caches() -> list[Path]:
    """Where builds downloaded by others may be: ``KERNELS_CACHE``, then huggingface_hub's own cache."""
    own = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    found = []
    with contextlib.suppress(InvalidConfig):  # nobody's home: then nothing is there
        found += [usable_path(Path(name)) for name in (os.environ.get("KERNELS_CACHE"),) if name]
        found.append(usable_path(Path(own)) if own else hf_home() / "hub")
    return found
