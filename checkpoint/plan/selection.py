"""Which leaves of a checkpoint a caller asked for, by shell patterns over their names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

from checkpoint.format.names import closest


class Selection:
    """Patterns as in the shell (`*`, `?`, `[abc]`), each of which must match something.

    Raises ValueError if there are none.
    """

    def __init__(self, only: str | Sequence[str] | None) -> None:
        patterns = [only] if isinstance(only, str) else only
        self._patterns = None if patterns is None else list(patterns)
        if self._patterns == []:
            raise ValueError("only=[] asks for nothing; leave `only` out to have everything")
        self._compiled = [re.compile(fnmatch.translate(text)) for text in self._patterns or ()]
        self._matched = [False] * len(self._compiled)
        self._names: list[str] = []

    @property
    def is_everything(self) -> bool:
        return self._patterns is None

    def wants(self, name: str) -> bool:
        """Whether a leaf of this name was asked for."""
        if self._patterns is None:
            return True
        hit = False
        for index, pattern in enumerate(self._compiled):
            if pattern.match(name):
                self._matched[index] = hit = True
        if not hit:
            self._names.append(name)
        return hit

    def check_matched(self) -> None:
        """Raises ValueError naming a pattern that nothing matched, when all names were seen."""
        for text, matched in zip(self._patterns or (), self._matched, strict=True):
            if not matched:
                similar = closest(text, self._names)
                hint = f"; there is {', '.join(map(repr, similar))}" if similar else ""
                raise ValueError(f"only={text!r} matches no name in the checkpoint{hint}")
