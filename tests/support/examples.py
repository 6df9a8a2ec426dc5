"""On how many examples a property is tried: on a part of them in ``make test``, on twice as many as
named in ``make proof``. The profiles are in ``tests/conftest.py``.
"""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100
"""Examples of a property that names no number, without a profile."""
_LEAST = 10


def examples(number: int) -> int:
    """``number`` in the proportion of the profile; never below ``number`` or 10 of them."""
    scaled = number * settings().max_examples // _USUAL
    return max(scaled, min(number, _LEAST))
