"""Fields of the JSON of a manifest, each taken for what it has to be, or refused by ValueError."""

from __future__ import annotations

import re
from typing import Any

from checkpoint.format.records import MAX_DIMENSIONS, MAX_SIZE, Shape

_CRC = re.compile("[0-9a-f]{8}")


def check_keys(node: Any, needed: set[str], allowed: set[str], what: str) -> None:
    """That a node is an object with all `needed` keys and none beside the `allowed` ones."""
    if not isinstance(node, dict):
        raise ValueError(f"a {what} that is no JSON object")
    if node.keys() == needed:
        return
    for key in needed - node.keys():
        raise ValueError(f"a {what} without {key!r}")
    for key in node.keys() - needed - allowed:
        raise ValueError(f"a {what} with an unknown key {key[:40]!r}")


def as_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a value that should be a string is not")
    return value


def as_size(value: Any) -> int:
    if type(value) is not int:
        raise ValueError("a value that should be an integer is not")
    if not 0 <= value <= MAX_SIZE:
        raise ValueError(f"{str(value)[:40]} is not between 0 and {MAX_SIZE}")
    return value


def as_shape(value: Any) -> Shape:
    if type(value) is not list:
        raise ValueError("sizes that are not a list")
    if len(value) > MAX_DIMENSIONS:
        raise ValueError(f"{len(value)} dimensions, more than {MAX_DIMENSIONS}")
    for size in value:
        as_size(size)
    return tuple(value)


def as_grains(value: Any) -> tuple[int, bytes]:
    """Bytes of a grain, and the checksums of all, four bytes each."""
    if type(value) is not list or len(value) != 2 or type(value[1]) is not str:
        raise ValueError("'grains' is not a size and a text")
    size, digits = as_size(value[0]), value[1]
    try:
        sums = bytes.fromhex(digits)
    except ValueError:
        raise ValueError("grains with a checksum that is not hexadecimal digits") from None
    if not sums or len(sums) % 4 or sums.hex() != digits:
        raise ValueError("grains with a checksum that is not eight hexadecimal digits")
    return size, sums


def as_crc(value: Any) -> int:
    if not isinstance(value, str) or _CRC.fullmatch(value) is None:
        raise ValueError("a checksum that is not eight hexadecimal digits")
    return int(value, 16)
