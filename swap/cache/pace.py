"""When to look which weights to read ahead: looking far along the schedule takes a while."""

from __future__ import annotations

from swap.cache.arena import Arena
from swap.plan.layout import ParameterSpec

_LOOKS = 16


class Pace:
    """It is time when a part of what ``arena`` is paced by has been used since the last look, or
    when what had no room to land may have some.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._used_bytes = 0
        self._stranded: ParameterSpec | None = None

    def is_time(self, used_bytes: int) -> bool:
        """So many bytes of weights are used now. After True, it begins anew."""
        self._used_bytes += used_bytes
        if self._stranded is None:
            is_time = self._used_bytes >= self._arena.pace_bytes // _LOOKS
        else:
            is_time = self._arena.can_land(self._stranded)
        if is_time:
            self._used_bytes, self._stranded = 0, None
        return is_time

    def ended_at(self, spec: ParameterSpec) -> None:
        """The look ended where there was no room for the weights of ``spec``."""
        if not self._arena.can_land(spec):
            self._stranded = spec
