"""Fusion: the key of a config that names several layers of one parent, which one kernel replaces together.

Accepted forms, for one kernel that stands in for a norm and the MLP after it::

    (("RMSNorm", "model.layers.*.post_attention_layernorm"), ("MLP", "model.layers.*.mlp"))      as in transformers
    "RMSNorm=model.layers.*.post_attention_layernorm + MLP=model.layers.*.mlp"                   for TOML and JSON

Each pair is a layer or class name and a path pattern. The patterns differ in their last name only, which is plain: the
layers are children of one module. The order counts: the kernel's layout is built from the layers in this order, the
first takes the kernel's forward and the others pass on what it returns. One pair alone is the fusion of one layer, for
a kernel with other parameters than the layer has; its path may end in a pattern: ``DecoderLayer=model.layers.*``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from kernelhub.errors import InvalidConfig

EXPECTED = 'pairs of a class and a path below one parent: (("RMSNorm", "layers.*.norm"), ("MLP", "layers.*.mlp"))'
_MEMBER = re.compile(
    r"(?P<name>[A-Za-z_][A-Za-z0-9_]*)=(?P<path>[A-Za-z0-9_*]+(?:\.[A-Za-z0-9_*]+)*)",
    re.ASCII,
)
_SIGN = "="
_PLUS = "+"


@dataclass(frozen=True)
class Member:
    """One layer of a fusion: the name that it has to answer to, the pattern of its parent's path, its name there."""

    name: str
    parent: str
    child: str

    @classmethod
    def parse(cls, text: str) -> Member:
        """Read ``MLP=model.layers.*.mlp``; ``parse(str(x)) == x``.

        Raises:
            InvalidConfig: it is spelled otherwise.
        """
        match = _MEMBER.fullmatch(text)
        if match is None:
            raise InvalidConfig(text, "not a layer of a fusion", '"MLP=model.layers.*.mlp"')
        parent, _, child = match["path"].rpartition(".")
        return cls(match["name"], parent, child)

    def __str__(self) -> str:
        return f"{self.name}{_SIGN}{self.parent}.{self.child}" if self.parent else f"{self.name}{_SIGN}{self.child}"


@dataclass(frozen=True)
class Fusion:
    """The layers that one kernel replaces together, in the order that the kernel wants them in."""

    members: tuple[Member, ...]

    def __post_init__(self) -> None:
        if not self.members:
            raise InvalidConfig((), "a fusion without layers", EXPECTED)
        if len({member.parent for member in self.members}) > 1:
            raise InvalidConfig(str(self), "the layers of a fusion have one parent", EXPECTED)
        if len(self.members) > 1 and any("*" in member.child for member in self.members):
            raise InvalidConfig(
                str(self), "a pattern at the end of a path", "plain names of the layers in their parent"
            )
        if len({member.child for member in self.members}) < len(self.members):
            raise InvalidConfig(str(self), "a layer named twice", "each layer of a fusion once")

    @classmethod
    def parse(cls, text: str) -> Fusion:
        """Read the text form; ``parse(str(x)) == x``.

        Raises:
            InvalidConfig: unreadable, several parents, or a layer named twice.
        """
        return cls(tuple(Member.parse(part.strip()) for part in text.split(_PLUS)))

    @classmethod
    def of(cls, key: tuple[Any, ...]) -> Fusion:
        """The same for a tuple of (class name, path pattern) pairs, as transformers spells it.

        Raises:
            InvalidConfig: as ``parse``, or no tuple of pairs.
        """
        pairs = [pair for pair in key if isinstance(pair, (tuple, list)) and [*map(type, pair)] == [str, str]]
        if len(pairs) != len(key):
            raise InvalidConfig(key, "not the key of a fusion", EXPECTED)
        return cls(tuple(Member.parse(_SIGN.join(pair)) for pair in pairs))

    @classmethod
    def is_text(cls, key: str) -> bool:
        """Is this meant as the text form, and not as a layer name or a path?"""
        return _SIGN in key

    @property
    def parent(self) -> str:
        """The path pattern of the module that holds the layers; empty for the model itself."""
        return self.members[0].parent

    def __str__(self) -> str:
        return f" {_PLUS} ".join(map(str, self.members))
