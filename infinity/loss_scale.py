"""Dynamic loss scaling for float16 gradients."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class LossScale:
    """Halved when a gradient overflowed (that step is skipped), doubled after ``growth_interval``
    good steps.

    The scale is a power of two, so scaling and unscaling are exact. Follows Micikevicius et al.,
    arXiv 1710.03740.
    """

    value: float = 2.0**16
    growth_interval: int = 2000
    good_steps: int = 0
    skipped_steps: int = 0

    def overflowed(self, norm: float) -> bool:
        """Take note of a step with that gradient norm; True if it must be skipped."""
        if not math.isfinite(norm):
            self.value = max(1.0, self.value / 2)
            self.good_steps = 0
            self.skipped_steps += 1
            return True
        self.good_steps += 1
        if self.good_steps >= self.growth_interval:
            self.value *= 2
            self.good_steps = 0
        return False
