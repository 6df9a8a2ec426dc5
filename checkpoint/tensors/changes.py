"""Tensors that change while they are saved: noticed, so that nothing mixed is published.

torch counts the in-place changes of a tensor. A count that is higher when everything has been read
than when the save was called means that what was read may be old in one part and new in another. A
tensor that has other memory by then (`p.data = ...`, `set_`, a swap of tensors, a storage of
another size) may have had the old one reused: that is a change, too. What torch does not count (a
change through numpy, `.data`, or by another library) is noticed only where bytes are written from
where they lie: see `checkpoint.transfer.writer`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from checkpoint.errors import ChangedTensorError
from checkpoint.tensors.sources import Source


class Versions:
    """How often the tensors behind some sources had been changed when this was made, and where
    they were.
    """

    def __init__(self, named: Iterable[tuple[str, Source]]) -> None:
        self._seen = [
            (name, source.owner, _state(source.owner))
            for name, source in named
            if isinstance(source.owner, torch.Tensor)
        ]

    def check(self) -> None:
        """Raises ChangedTensorError naming a tensor that has been changed since."""
        for name, tensor, seen in self._seen:
            if _state(tensor) != seen:
                raise ChangedTensorError(name)


def count_changes(tensors: Iterable[torch.Tensor]) -> None:
    """Counts one change in place of each, for whoever writes to an address as torch does by itself:
    saves notice it, and autograd refuses a graph from before it.
    """
    torch.autograd.graph.increment_version([t for t in tensors if not t.is_inference()])


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """Its version, which tensors of the inference mode lack, and its address."""
    return 0 if tensor.is_inference() else tensor._version, tensor.data_ptr()
