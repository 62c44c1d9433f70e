"""Damaged inputs: each is a function of seed and number alone, so any of them can be made again.

A document is first changed in its structure (a value of a JSON tree, a line of TOML, a field of an ELF header or
table), then in its bytes; half of the inputs get only one of both.
"""

from __future__ import annotations

import json
import random
import struct
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_LONGEST = 1 << 18  # bytes of an input
_MOST_CHANGES = 6

TEXT_TOKENS = (
    *(b"{", b"}", b"[", b"]", b"[[", b"]]", b"#", b"//", b"\\", b",", b":", b"=", b".", b"..", b"/", b"'"),
    *(b'"', b'""', b'"""', b" ", b"\n", b"\r\n", b"\0", b"\x1b[2J"),
    *(b"null", b"true", b"NaN", b"Infinity", b"-0", b"1e400", b"1.0", b"1" * 20, b"9" * 5000, b"0x10", b"1979-05-27"),
    *(b"\\ud800", b"\\udc00", b"\\u0000", b"\xef\xbb\xbf", b"\xff", "é".encode(), "\u202e".encode(), b"\\U00110000"),
    *(b"<<<<<<< HEAD\n", b"../", b"a\\b", b"__pycache__/", b".pyc", b"[" * 40, b'{"a":' * 40, b"a." * 40, b'"\\' * 40),
)
_TEXTS = (
    "",
    "a/b",
    "../..",
    "v1",
    "main",
    "0" * 40,
    "\0",
    "\x1b[2J",
    "é",
    "a" * 300,
    "sha256",
    "cuda",
    "x.pyc",
    "/etc",
)
_NUMBERS = (0, -1, 1, 2, 255, 10**6, 2**31, 2**63, 2**64, 10**400, 0.5, -0.0, float("inf"), float("nan"))


class Mutator(NamedTuple):
    """Makes inputs from intact ones; ``reshape`` knows their structure, ``tokens`` are put between their bytes."""

    corpus: Sequence[bytes]
    reshape: Callable[[bytes, random.Random], bytes]
    tokens: Sequence[bytes]

    def make(self, seed: int, number: int) -> bytes:
        """The input with that number."""
        dice = random.Random((seed << 40) + number)
        data = dice.choice(self.corpus)
        kind = dice.randrange(4)
        if kind != 0:
            for _ in range(dice.choice((1, 1, 2, 4))):
                data = self.reshape(data, dice)
        if kind != 1:
            for _ in range(dice.randint(1, _MOST_CHANGES)):
                data = dice.choice(_CHANGES)(self, data, dice)
        return data[:_LONGEST]


def _flip(mutator: Mutator, data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]


def _insert(mutator: Mutator, data: bytes, dice: random.Random) -> bytes:
    at = dice.randrange(len(data) + 1)
    return data[:at] + dice.choice(mutator.tokens) + data[at:]


def _replace(mutator: Mutator, data: bytes, dice: random.Random) -> bytes:
    start, end = _range(data, dice)
    return data[:start] + dice.choice(mutator.tokens) + data[end:]


def _delete(mutator: Mutator, data: bytes, dice: random.Random) -> bytes:
    start, end = _range(data, dice)
    return data[:start] + data[end:]


def _repeat(mutator: Mutator, data: bytes, dice: random.Random) -> bytes:
    start, end = _range(data, dice)
    times = dice.choice((1, 1, 2, 8, 200, 2000))
    return data[:end] + data[start:end] * min(times, _LONGEST // max(1, end - start)) + data[end:]


def _splice(mutator: Mutator, data: bytes, dice: random.Random) -> bytes:
    other = dice.choice(mutator.corpus)
    return data[: dice.randrange(len(data) + 1)] + other[dice.randrange(len(other) + 1) :]


def _cut(mutator: Mutator, data: bytes, dice: random.Random) -> bytes:
    return data[: dice.randrange(len(data) + 1)]


_CHANGES = (_flip, _flip, _flip, _insert, _insert, _replace, _delete, _repeat, _splice, _cut)


def _range(data: bytes, dice: random.Random) -> tuple[int, int]:
    start = dice.randrange(len(data) + 1)
    return start, min(len(data), start + dice.choice((1, 2, 4, 16, 64)))


def reshape_json(data: bytes, dice: random.Random) -> bytes:
    """Another value at one place of the tree, or a key twice."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return data
    places = list(_places(tree))
    if not places:
        return json.dumps(_value(dice)).encode()
    parent, key = dice.choice(places)
    change = dice.randrange(4)
    if change == 0:
        del parent[key]
    elif change == 1 and isinstance(parent, dict):
        parent[dice.choice(_TEXTS)] = parent[key]
    elif change == 2 and isinstance(parent, dict):
        text = json.dumps(tree)
        name = json.dumps(key)
        return text.replace(f"{name}:", f"{name}: {json.dumps(_value(dice))}, {name}:", 1).encode()
    else:
        parent[key] = _value(dice)
    return json.dumps(tree).encode()


def _places(tree: Any) -> Any:
    """Each container with each of its keys."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, (dict, list)):
            keys = list(node) if isinstance(node, dict) else range(len(node))
            yield from ((node, key) for key in keys)
            waiting += [node[key] for key in keys]


def _value(dice: random.Random) -> Any:
    simple: Any = dice.choice((*_TEXTS, *_NUMBERS, None, True, False, [], {}))
    return dice.choice((simple, [simple], {dice.choice(_TEXTS): simple}, [[simple, {"a": simple}]]))


def reshape_toml(data: bytes, dice: random.Random) -> bytes:
    """Another value on one line, or a line gone, twice or elsewhere; JSON in its own way."""
    if data.lstrip()[:1] in (b"[", b"{") and not data.lstrip().startswith((b"[t", b"[p", b"[s", b"[k", b"[[")):
        return reshape_json(data, dice)
    lines = data.split(b"\n")
    at, other = dice.randrange(len(lines)), dice.randrange(len(lines))
    change = dice.randrange(4)
    if change == 0:
        key = lines[at].partition(b"=")[0]
        lines[at] = key + b"= " + _toml(_value(dice)).encode("utf-8", "replace")
    elif change == 1:
        lines.insert(other, lines[at])
    elif change == 2:
        del lines[at]
    else:
        lines[at], lines[other] = lines[other], lines[at]
    return b"\n".join(lines)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return json.dumps(value).replace("Infinity", "inf").replace("NaN", "nan")


def reshape_elf(data: bytes, dice: random.Random) -> bytes:
    """Another number in one field of the header, a segment, the dynamic section or a table that it leads to."""
    fields = _elf_fields(data)
    if not fields:
        return data
    at, size = dice.choice(fields)
    other, _ = dice.choice(fields)
    found = dice.choice(
        (
            dice.choice((0, 1, 2, 3, 7, 8, 0x7F, 0xFF, 0x6FFFFEF5, 0x6FFFFFFE, 5, 6)),
            dice.choice((-1, -2, 1 << 31, (1 << 31) - 1, 1 << 62, 1 << 16)),
            len(data) + dice.choice((-1, 0, 1)),
            dice.getrandbits(64),
            int.from_bytes(data[other : other + size], "little"),
            int.from_bytes(data[at : at + size], "little") + dice.choice((-8, -1, 1, 8)),
        )
    )
    return data[:at] + (found % (1 << 8 * size)).to_bytes(size, "little") + data[at + size :]


def _elf_fields(data: bytes) -> list[tuple[int, int]]:
    """Place and size of the numbers that a reader follows; those of a little-endian file that is still whole enough."""
    wide = data[4:5] == b"\x02"
    word = 8 if wide else 4
    try:
        segments, _, _, _, entry, count = struct.unpack_from("<QQIHHH" if wide else "<IIIHHH", data, 32 if wide else 28)
        fields = [(4, 1), (5, 1), (16, 2), (18, 2), (segments_at := 32 if wide else 28, word), (54 if wide else 42, 2)]
        fields.append((segments_at + (24 if wide else 16), 2))
        for number in range(min(count, 16)):
            start = segments + number * entry
            fields += [(start, 4), *((start + at, word) for at in range(8 if wide else 4, entry, word))]
            kind, at, size = struct.unpack_from("<I4xQ16xQ" if wide else "<II8xI", data, start)
            if kind == 2:
                fields += _dynamic_fields(data, at, size, word)
    except (struct.error, OverflowError):
        return []
    return [(at, size) for at, size in fields if at >= 0 and at + size <= len(data)]


def _dynamic_fields(data: bytes, start: int, size: int, word: int) -> list[tuple[int, int]]:
    """The entries, and the first words of what they point to: these files are mapped where they lie."""
    fields = []
    for at in range(start, min(start + size, len(data) - 2 * word), 2 * word):
        fields += [(at, word), (at + word, word)]
        value = int.from_bytes(data[at + word : at + 2 * word], "little")
        fields += [(value + step, 4) for step in range(0, 96, 4)] if value < len(data) else []
    return fields
