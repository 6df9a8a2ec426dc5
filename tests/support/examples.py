"""On how many examples a property is tried: on a part of them in ``make test``, on twice as many as
named in ``make proof``. The profiles are in ``tests/conftest.py``.
"""

from __future__ import annotations

from hypothesis import settings

_USUAL = 100
"""Examples of a property that names no number, without a profile."""
_LEAST = 10


def is_a_part() -> bool:
    """Whether this is ``make test``, or less. What refuses memory waits for it first, and takes
    from seconds to a minute by which examples are drawn: there always the same ones.
    """
    return settings().max_examples < _USUAL


def examples(number: int) -> int:
    """``number`` in the proportion of the profile; never below ``number`` or 10 of them."""
    scaled = number * settings().max_examples // _USUAL
    return max(scaled, min(number, _LEAST))
