"""Which leaves of a checkpoint a caller asked for, by shell patterns over their names."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from checkpoint.format.names import closest

_SPECIAL = re.compile(r"[*?\[]")


class Selection:
    """Patterns as in the shell (`*`, `?`, `[abc]`), each of which must match something if `strict`.

    Raises ValueError if there are none, TypeError for what is no text.
    """

    def __init__(self, only: str | Sequence[str] | None, *, strict: bool = True) -> None:
        self.is_strict = strict
        patterns = [only] if isinstance(only, str) else only
        self._patterns = None if patterns is None else _listed(patterns)
        if self._patterns == []:
            raise ValueError("only=[] asks for nothing; leave `only` out to have everything")
        # Lists of names are long, as are checkpoints: only what has to be is tried one by one.
        self._plain = {text for text in self._patterns or () if not _SPECIAL.search(text)}
        self._compiled = {
            text: re.compile(fnmatch.translate(text))
            for text in self._patterns or ()
            if text not in self._plain
        }
        self._matched: set[str] = set()
        self._wanted: dict[str, bool] = {}

    def anew(self) -> Selection:
        """The same patterns, for another checkpoint: they have matched nothing yet."""
        return Selection(self._patterns, strict=self.is_strict)

    @property
    def is_everything(self) -> bool:
        return self._patterns is None

    def wants(self, name: str) -> bool:
        """Whether a leaf of this name was asked for."""
        if self._patterns is None:
            return True
        hit = self._wanted.get(name)
        if hit is None:
            hit = self._wanted[name] = self._match(name)
        return hit

    def _match(self, name: str) -> bool:
        matched = {text for text, pattern in self._compiled.items() if pattern.match(name)}
        if name in self._plain:
            matched.add(name)
        self._matched |= matched
        return bool(matched)

    def check_matched(self, seen: str = "the checkpoint") -> None:
        """Raises ValueError naming a pattern that nothing matched, when all names were `seen`."""
        for text in self._patterns if self._patterns and self.is_strict else ():
            if text not in self._matched:
                similar = closest(text, [name for name, hit in self._wanted.items() if not hit])
                hint = f"; there is {', '.join(map(repr, similar))}" if similar else ""
                raise ValueError(f"only={text!r} matches no name in {seen}{hint}")


def _listed(patterns: object) -> list[str]:
    if isinstance(patterns, Mapping):  # of `load(path, tree)` the tree would stay as it was
        raise TypeError(
            f"only is a {type(patterns).__name__}, not patterns; give a tree that is to be written"
            " to as into=, or the names of leaves in a list"
        )
    texts: list[Any] = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    for text in texts:
        if not isinstance(text, str):
            raise TypeError(f"only={text!r} is no pattern; give the names of leaves, as strings")
    return texts
