"""The weights of an offloaded model as a mapping that reads them when they are asked for, one at a
time: for what iterates over a state dict.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

import infinity
from infinity.model import training_of
from infinity.values.leaves import leaves_of
from infinity.values.module_state import persistent_buffers


class OffloadedStateDict(Mapping[str, torch.Tensor]):
    """Names as in ``state_dict()``, tied weights under the first of theirs; what is asked for is a
    copy on the CPU. Valid inside the block; follows the training.
    """

    def __init__(self, offloaded: infinity.OffloadedModel) -> None:
        self._offloaded = offloaded
        training = training_of(offloaded)
        self._leaves = {leaf.name: leaf for leaf in leaves_of(training.model, training.records)}

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._leaves:
            return persistent_buffers(self._offloaded.model)[name].detach().cpu()
        leaf = self._leaves[name]
        parts = [part.parameter for part in leaf.parts]
        with self._offloaded.gathered(parts):
            copies = [part.detach().cpu().clone() for part in parts]
        if len(copies) == 1:
            return copies[0]
        return torch.cat([copy.reshape(-1) for copy in copies]).reshape(leaf.shape)

    def __iter__(self) -> Iterator[str]:
        yield from self._leaves
        yield from persistent_buffers(self._offloaded.model)

    def __len__(self) -> int:
        return len(self._leaves) + len(persistent_buffers(self._offloaded.model))
