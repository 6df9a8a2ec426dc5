"""Threads held back at lines that a seed chooses, while others go on.

A thread that comes to such a line waits until the others have come through some lines, or none of
them moves. What a thread does at its n-th line is a function of the seed, of its name and of n.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
WATCHED = tuple(f"{ROOT / 'swap' / part}" for part in ("update", "cache", "gradients", "storage"))
"""Where lines are counted: what threads do to one another goes through there."""
_STILL_SECONDS = 0.0005
"""After which others that have come through no line are taken to wait for this thread."""
_POLL_SECONDS = 0.00005
_MOST_LINES = 120


class Interleaving:
    """The decisions of one seed; ``held`` counts how often a thread was held back."""

    def __init__(self, seed: int) -> None:
        self.held = 0
        self._seed = seed
        self._passed = 0
        self._own = threading.local()
        # Some seeds hold few lines for long, some many: an order needs one or the other.
        self._chance = random.Random(f"{seed} chance").choice((0.002, 0.01, 0.05))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """To this thread and to those that are started inside."""
        threading.settrace(self._called)
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def _called(self, frame: FrameType, _: str, __: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(WATCHED) else None

    def _line(self, _: FrameType, event: str, __: Any) -> Any:
        if event == "line":
            self._pass()
        return self._line

    def _pass(self) -> None:
        own = self._own.__dict__
        if "chance" not in own:
            own["passed"] = 0
            own["chance"] = random.Random(f"{self._seed} {threading.current_thread().name}")
        own["passed"] += 1
        self._passed += 1  # an update that is lost to another thread's is no matter
        chance: random.Random = own["chance"]
        if chance.random() < self._chance:
            self.held += 1
            self._hold(chance.randrange(1, _MOST_LINES))

    def _hold(self, lines: int) -> None:
        first = seen = self._passed
        still_since = time.monotonic()
        while self._passed < first + lines:
            time.sleep(_POLL_SECONDS)
            if self._passed != seen:
                seen, still_since = self._passed, time.monotonic()
            elif time.monotonic() - still_since > _STILL_SECONDS:
                return
