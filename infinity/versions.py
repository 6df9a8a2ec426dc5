"""Version counters: updates count, and changes behind the library's back are noticed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from infinity.discovery import Record


class Versions:
    """The version of every parameter as it was when it was last known to be meant so."""

    def __init__(self, records: Sequence[Record]) -> None:
        self._records = records
        self._noted: list[int] = []

    def note(self) -> None:
        """Whatever changed parameters in place until now was meant to."""
        with torch._C.DisableTorchFunctionSubclass():
            self._noted = [record.parameter._version for record in self._records]

    def count_updates(self, indices: Sequence[int]) -> None:
        """Tell autograd, as an in-place update would: a graph from before the step is refused."""
        torch.autograd.graph.increment_version([self._records[i].parameter for i in indices])
        self.note()

    def check(self) -> None:
        """What a program writes into weights between two steps may or may not reach their home.

        Raises ``RuntimeError`` naming a parameter that was changed in place.
        """
        expected = self._noted
        self.note()
        for record, before, now in zip(self._records, expected, self._noted, strict=True):
            if now != before:
                raise RuntimeError(
                    f"{record.name} was changed in place while it was offloaded (by an "
                    "initialisation, an assignment, or a module that changes its weights in "
                    "forward, such as nn.Embedding with max_norm); change values inside `with "
                    "offloaded.gathered([parameter], modify=True):`"
                )
