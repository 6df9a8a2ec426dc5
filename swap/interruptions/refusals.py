"""What keeps values from being changed, for as long as it does: that they are lent to the program,
or given out as the block ends.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

Refusal = Callable[[], None]
"""Raises if values may not be changed now."""


class Refusals:
    """Those of a state. Whoever is about to change its values ``check``s them as nobody else may
    change any: a look before that is outdated by what another thread does meanwhile.
    """

    def __init__(self) -> None:
        self._refusals: list[Refusal] = []

    def add(self, refusal: Refusal) -> None:
        self._refusals.append(refusal)

    def remove(self, refusal: Refusal) -> None:
        """Idempotent."""
        with suppress(ValueError):
            self._refusals.remove(refusal)

    def check(self) -> None:
        """Raises what the first one raises that refuses."""
        for refusal in [*self._refusals]:
            refusal()


def refuse_at_end() -> None:
    """Of a block that ends."""
    raise RuntimeError("the block of the model ends: no step is taken any more, nor a load")
