"""Tensors that change while they are saved: noticed, so that nothing mixed is published.

torch counts the in-place changes of a tensor. A count that is higher when everything has been read
than when the save was called means that what was read may be old in one part and new in another.
What torch does not count (a change through numpy, or by another library) is noticed where bytes
are written from where they lie: see `checkpoint.writer`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from checkpoint.errors import ChangedTensorError
from checkpoint.sources import Source


class Versions:
    """How often the tensors behind some sources had been changed when this was made."""

    def __init__(self, named: Iterable[tuple[str, Source]]) -> None:
        self._seen = [
            (name, source.owner, source.owner._version)
            for name, source in named
            if isinstance(source.owner, torch.Tensor) and not source.owner.is_inference()
        ]

    def check(self) -> None:
        """Raises ChangedTensorError naming a tensor that has been changed since."""
        for name, tensor, version in self._seen:
            if tensor._version != version:
                raise ChangedTensorError(name)
