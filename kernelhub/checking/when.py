"""When: at which moment ``kernelize`` checks its kernels, and how it chooses among candidates, as users write it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from kernelhub.errors import InvalidConfig

_FIRST = re.compile(r"first:([1-9][0-9]{0,5})", re.ASCII)
_SELECTIONS = ("first", "fastest")


@dataclass(frozen=True)
class When:
    """``bind``: check before binding. ``calls``: check so many calls of every bound layer."""

    bind: bool = False
    calls: int = 0

    @classmethod
    def parse(cls, text: str) -> When:
        """Read ``off``, ``bind`` or ``first:N``.

        Raises:
            InvalidConfig: it is something else.
        """
        first = _FIRST.fullmatch(text) if isinstance(text, str) else None
        if first is not None:
            return cls(calls=int(first[1]))
        if text not in ("off", "bind"):
            raise InvalidConfig(text, "not a time to check", "'off', 'bind' or 'first:N'", "check")
        return cls(bind=text == "bind")


def checked_selection(text: str) -> str:
    """``first`` (the first candidate) or ``fastest``.

    Raises:
        InvalidConfig: it is something else.
    """
    if text not in _SELECTIONS:
        raise InvalidConfig(text, "not a way to choose a candidate", "'first' or 'fastest'", "select")
    return text
