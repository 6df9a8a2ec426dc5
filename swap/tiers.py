"""The three places a byte can live, and what the user allows in each.

DEVICE is the memory of the compute device. On a CPU it is a bounded arena in host memory, and its
bytes count against the host budget. HOST is (pinned) host memory. NVME is swap files on one or more
directories.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any


class Tier(enum.Enum):
    """A home for bytes, fastest first."""

    DEVICE = "device"
    HOST = "host"
    NVME = "nvme"


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Upper bounds in bytes; ``device_bytes=None`` leaves the device arena to the placement."""

    host_bytes: int
    device_bytes: int | None = None


class BudgetError(ValueError):
    """A memory budget cannot work.

    ``least_host_bytes`` is the smallest host budget that would (0 where the device budget is at
    fault).
    """

    def __init__(self, message: str, *, least_host_bytes: int = 0) -> None:
        super().__init__(message)
        self.least_host_bytes = least_host_bytes


def too_small(budget: Budget, least: int, arena_for: str, whole: int) -> BudgetError:
    """Of a model that needs at least ``least`` bytes, ``arena_for`` what, and ``whole`` for all."""
    return BudgetError(
        f"host_memory={format_bytes(budget.host_bytes)} is too small: this model needs at "
        f"least {format_bytes(least)} ({least} bytes): {arena_for}, the rest for staging the "
        f"optimizer and for small parameters; {format_bytes(whole)} ({whole} bytes) would hold "
        "everything in memory",
        least_host_bytes=least,
    )


def format_bytes(nbytes: float) -> str:
    """``nbytes`` for people: ``1.50 GiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.2f} {unit}"
        value /= 1024
    return f"{value:.2f} TiB"


def parse_bytes(size: int | str, *, name: str = "size") -> int:
    """Bytes from an int or from text such as ``"16GiB"``, ``"500 MB"``, ``"4096"``.

    Raises ``ValueError`` naming the argument when the text is not a size or the size is not
    positive or no machine has it, ``TypeError`` when it is neither an int nor text (a float, say).
    """
    if not isinstance(size, int | str):
        raise TypeError(
            f"{name}={size!r} is a {type(size).__name__}; write bytes as an int or text such as "
            "'16GiB' or '500MB'"
        )
    nbytes = size if isinstance(size, int) else _parse_text(size, name)
    if isinstance(size, bool) or nbytes <= 0:
        raise ValueError(f"{name}={size!r} is not a positive number of bytes")
    if nbytes > _MOST_BYTES:
        raise ValueError(f"{name} is more bytes than any machine has")
    return nbytes


def parse_number(value: Any, *, name: str) -> float:
    """The finite float that an int, a float, or a tensor or array of one of them, stands for.

    Raises ``TypeError`` naming the argument when it is no number, ``ValueError`` when it is NaN or
    infinite.
    """
    number = _float_of(value)
    if number is None:
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a number")
    if not math.isfinite(number):
        raise ValueError(
            f"{name}={number} is not a {'' if math.isnan(number) else 'finite '}number"
        )
    return number


def parse_amount(value: Any, *, name: str) -> float:
    """As ``parse_number``, of 0 or more."""
    number = parse_number(value, name=name)
    if number < 0.0:
        raise ValueError(f"{name}={number} is negative; give 0 or more")
    return number


def check_count(value: object, *, name: str, least: int = 1, most: int | None = None) -> None:
    """Raises ``TypeError`` naming an argument that is no int, ``ValueError`` one out of range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}, not a whole number")
    if value < least:
        raise ValueError(f"{name}={value} must be {least} or more")
    if most is not None and value > most:
        raise ValueError(f"{name} must be {most:,} or less")


def _float_of(value: Any) -> float | None:
    if value is None or isinstance(value, str | bytes | bytearray):
        return None  # text is no number, whatever it says
    try:
        return float(value)
    except OverflowError:  # a whole number that is larger than any float
        return math.inf
    except (TypeError, ValueError, RuntimeError):  # what it is decides which, such as a tensor
        return None


_MOST_BYTES = 1 << 100
_UNITS = {"": 1, "B": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate(("K", "M", "G", "T"), start=1)
}


def _parse_text(text: str, name: str) -> int:
    digits = text.strip().rstrip("BKMGTibkmgt ")
    unit = text.strip()[len(digits) :].strip()
    known = {key.lower(): factor for key, factor in _UNITS.items()}
    try:
        number = int(digits) if digits.isdecimal() else float(digits)
        return int(number * known[unit.lower()])
    except (KeyError, ValueError, OverflowError):
        raise ValueError(
            f"{name}={text!r} is not a size; write bytes as an int or text such as '16GiB' or "
            "'500MB'"
        ) from None
