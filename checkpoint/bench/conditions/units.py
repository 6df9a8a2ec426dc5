"""Sizes as people write and read them."""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "m", "g", "t"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("ki", "mi", "gi", "ti"), 1)},
}


def parse_size(text: str) -> int:
    """Bytes of "4GiB", "4GB", "256k" or a plain number. Raises ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([kmgt]i?)?b?", text.strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size: write for example 4GiB, 64KiB or 4096")
    return int(float(match[1]) * _UNITS[match[2] or ""])


def format_size(nbytes: float) -> str:
    """A size in the largest binary unit that leaves at least one before the point."""
    for unit, power in (("TiB", 4), ("GiB", 3), ("MiB", 2), ("KiB", 1)):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.4g} {unit}"
    return f"{nbytes:.0f} B"
