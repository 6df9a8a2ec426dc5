"""New inputs out of old ones: bytes changed anywhere, and values changed in what is JSON."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Sequence
from typing import Any

MOST_BYTES = 1 << 16
"""Of an input: what bounds time and memory in size has tests of its own."""
_VALUES: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2, 7, 64, 255, 4096, 4097, 1 << 31, 1 << 40),
    *((1 << 63) - 1, 1 << 63, -(1 << 63), 10**30, 0.5, -0.0, 1e308, 5e-324, "", "..", "/", "."),
    *("a", "a" * 300, "\0", "\ud800", "é", "tensor", "float32", "bfloat16", "00000000", "nan"),
    *([], {}, [[]], [1], ["a"], {"": None}, {"tensor": 0}, {"view": [0, 0]}, {"dict": {}}),
    *({"tuple": []}, {"set": [[]]}, {"items": [[1, 2]]}, {"array": 0}, {"numpy": ["<f4", "00"]}),
)
_TOKENS = (
    *(b"null", b"true", b"[", b"]", b"{", b"}", b",", b":", b'"', b"\\", b"\\u0000", b"\\ud800"),
    *(b"NaN", b"Infinity", b"-0", b"1e999", b"\xff", b"\xef\xbb\xbf", b"\x00" * 8, b"0" * 400),
    *(b"[" * 2000, b'{"a":' * 500, b"9" * 5000),
)


def mutated(source: bytes, others: Sequence[bytes], chance: random.Random) -> bytes:
    """Another input, of one and of parts of others."""
    made = source
    for _ in range(chance.choice((1, 1, 1, 2, 2, 4, 8))):
        as_json = _parsed(made) if chance.random() < 0.7 else None
        if as_json is None:
            made = chance.choice(_OF_BYTES)(made, chance.choice(others), chance)
        else:
            made = _json_text(_changed(as_json, _parsed(chance.choice(others)), chance))
    return made[:MOST_BYTES]


def _parsed(source: bytes) -> Any:
    try:
        return json.loads(source)
    except (ValueError, RecursionError):
        return None


def _json_text(value: Any) -> bytes:
    try:
        return json.dumps(value).encode()
    except (ValueError, RecursionError):
        return b"null"


def _places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything in a value."""
    found, left = [], [node]
    while left:
        inside = left.pop()
        keys = list(inside) if isinstance(inside, dict) else range(len(inside))
        for key in keys:
            found.append((inside, key))
            if isinstance(inside[key], dict | list):
                left.append(inside[key])
    return found


def _changed(value: Any, other: Any, chance: random.Random) -> Any:
    """A value with one thing in it put in, taken out, moved or changed."""
    if not isinstance(value, dict | list) or not value:
        return copy.deepcopy(chance.choice(_VALUES))
    places = _places(value)
    inside, key = chance.choice(places)
    what = chance.randrange(7)
    if what == 0:
        inside[key] = copy.deepcopy(chance.choice(_VALUES))
    elif what == 1:
        del inside[key]
    elif what == 2:
        source, where = chance.choice(places)
        inside[key] = copy.deepcopy(source[where])
    elif what == 3 and isinstance(inside, list):
        inside.insert(key, copy.deepcopy(inside[key]))
    elif what == 4 and isinstance(inside, dict):
        inside[str(chance.choice(_VALUES))[:300]] = inside.pop(key)
    elif what == 5 and isinstance(other, dict | list) and other:
        source, where = chance.choice(_places(other))
        inside[key] = copy.deepcopy(source[where])
    elif isinstance(inside[key], int):
        inside[key] += chance.choice((-4096, -8, -2, -1, 1, 2, 8, 4096, 1 << 32))
    else:
        inside[key] = [inside[key]]
    return value


def _flipped(source: bytes, _: bytes, chance: random.Random) -> bytes:
    made = bytearray(source or b"\0")
    made[chance.randrange(len(made))] = chance.randrange(256)
    return bytes(made)


def _cut(source: bytes, _: bytes, chance: random.Random) -> bytes:
    at, nbytes = chance.randrange(len(source) + 1), chance.choice((1, 2, 8, 64, 4096))
    return source[:at] + source[at + nbytes :]


def _put_in(source: bytes, _: bytes, chance: random.Random) -> bytes:
    at = chance.randrange(len(source) + 1)
    return source[:at] + chance.choice(_TOKENS) + source[at:]


def _spliced(source: bytes, other: bytes, chance: random.Random) -> bytes:
    return source[: chance.randrange(len(source) + 1)] + other[chance.randrange(len(other) + 1) :]


def _number(source: bytes, _: bytes, chance: random.Random) -> bytes:
    """Little-endian numbers, of lengths that headers begin with."""
    at, width = chance.randrange(len(source) + 1), chance.choice((1, 4, 8))
    bits = 8 * width
    value = chance.choice((0, 1, len(source), 1 << (bits - 1), (1 << bits) - 1, 100_000_001))
    return source[:at] + (value % (1 << bits)).to_bytes(width, "little") + source[at + width :]


_OF_BYTES: tuple[Callable[[bytes, bytes, random.Random], bytes], ...] = (
    *(_flipped, _cut, _put_in, _spliced, _number),
)
