"""Gradients that are there as the block begins or ends without a step.

A training block takes those in that parameters come with, and their memory is free then. What has
accumulated since the last step goes with the block, and a warning says so: given back it would take
the memory of the model once more, beside values that come back beside the budget already.

An inference block takes no step, so what parameters come with is given back: the same tensors,
which have stayed in the memory of the program. So it is with gradients of frozen parameters.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch

from infinity.optim.accumulated import Accumulated
from infinity.parameters.records import Record

_log = logging.getLogger(__name__)


class LeftGradients:
    """Those of one block, ``given_back`` as it ends. Made when all that parameters came with (by
    index) were accumulated, but for those of frozen ones.
    """

    def __init__(
        self,
        records: Sequence[Record],
        accumulated: Accumulated,
        came: Mapping[int, torch.Tensor],
        *,
        trains: bool,
    ) -> None:
        self._records = records
        self._accumulated = accumulated
        self._trains = trains
        self.given_back = {
            index: gradient
            for index, gradient in came.items()
            if not (trains and records[index].spec.trainable)
        }
        self._states = {index: accumulated.state_of(index) for index in self.given_back}

    def settle(self, kind: type[BaseException] | None, *_: object) -> None:
        """What is given back has the values that it has now, if it is still there. One warning
        names what goes, unless an error is on its way. Can be called again.
        """
        for index, state in self._states.items():
            if not self._records[index].spec.trainable:
                continue
            if not self._accumulated.has(index):
                self.given_back.pop(index, None)
            elif self._accumulated.state_of(index) != state:
                values = self._accumulated.read(index)
                if values is not None and index in self.given_back:
                    self.given_back[index].detach().copy_(values)
        left = sorted(self._accumulated.worth_keeping - self.given_back.keys())
        if left and kind is None:
            _log.warning(
                "the offload block ends with gradients that %d parameters (%s first) have "
                "accumulated%s, and they go with it; %sread them there by "
                "offloaded.gradient(parameter)",
                len(left),
                self._records[left[0]].name,
                " since the last step" if self._trains else "",
                "take that step inside, or " if self._trains else "",
            )
        self._accumulated.forget_histories()
