"""References: which modules of transformers hold an object, so that all of them can be given another one."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

KERNELS = "transformers.integrations.hub_kernels"
"""The module that imports `kernels`, or defines what stands in its place."""

Namespace = dict[str, Any]


def replace(replaced: Mapping[int, Any]) -> Iterator[tuple[Namespace, str, Any]]:
    """Give every module of transformers that holds one of these objects (by ``id``) the new one.

    Yields what was replaced: the namespace, the name in it, and the old object.
    """
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "transformers":
            names = vars(module)
            for key, value in list(names.items()):
                if id(value) in replaced:
                    names[key] = replaced[id(value)]
                    yield names, key, value


def exchange(old: Namespace, new: Namespace) -> None:
    """After ``KERNELS`` ran again: let everybody hold the new functions and classes that it defines."""
    own = {name: value for name, value in old.items() if callable(value) and _home(value) == KERNELS}
    for _ in replace({id(value): new[name] for name, value in own.items() if name in new}):
        pass


def _home(value: Any) -> str:
    return str(getattr(value, "__module__", ""))
