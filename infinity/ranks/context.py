"""What an ``OffloadedModel`` asks of the ranks that it shares its parameters with, and the answers
of one process that shares them with nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import torch

from checkpoint.ranks.coordinator import Coordinator, SingleProcess
from infinity.parameters.first_values import StoredValues
from infinity.parameters.local_values import read_values, weight_of, write_back
from infinity.parameters.records import Record
from infinity.ranks.gathered_weights import Weights
from swap.tiered import TieredState

T = TypeVar("T")


class RankContext(Protocol):
    """Everything in which one process and several ranks differ. All ranks make the same calls in
    the same order, but for ``has_gradient`` and ``drop_gradients``.
    """

    rank: int
    world_size: int
    weights: Weights
    coordinator: Coordinator
    """For checkpoints."""

    def leave(self, error: BaseException | None) -> None:
        """The block is left: first of all, tell the other ranks if that is because of an error."""

    @property
    def is_whole(self) -> bool:
        """Whether values of all ranks can still be had; False after a rank has failed."""

    @property
    def outside_bytes(self) -> int:
        """Weights that may stay for who reaches for them outside of their module."""

    @property
    def peak_host_bytes(self) -> int:
        """The most host memory that passing values between ranks took."""

    def note(
        self, record: Record, values: torch.Tensor | StoredValues
    ) -> torch.Tensor | StoredValues:
        """First values of a parameter, whole; returns those that this rank keeps, yet to be read
        where they are stored.
        """

    def agree_on_values(self) -> None:
        """All first values were noted. Raises ``RankDifferenceError`` if they were not the same."""

    def is_given_back(self, record: Record) -> bool:
        """Whether a rank gets its values back as the block ends: on one that has them nowhere to
        go, as the parameter came on meta, another may wait for the part that is kept there.
        """

    def meet(self, kind: int, step: int) -> None:
        """All ranks do this now, after that many steps."""

    def meet_for(
        self, kind: int, steps: Sequence[int], action: Callable[[], T], *, tells: bool
    ) -> T:
        """What ``action`` gives, which all ranks do now. An interrupt in it of which the others are
        not told takes this rank out: they would wait for it. One that ``tells`` tells them of all
        but what comes before its first meeting, and of that they are told as by a save.
        """

    def note_change(self, record: Record, values: torch.Tensor) -> None:
        """A program has made ``values`` of the gradient, or multiplied it by them."""

    def begin_step(
        self,
        present: Sequence[int],
        steps: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        factors: Mapping[str, float],
    ) -> None:
        """All ranks take the same step, with gradients that were changed alike and are to be
        multiplied by the same ``factors``. Raises ``RankDifferenceError`` if they do not.
        """

    def end_step(self, updated: Iterable[int]) -> None:
        """These parameters are being updated."""

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """The gradient of this process, whole: it is averaged over ranks, and kept."""

    def has_gradient(self, index: int) -> bool:
        """Whether one is on its way."""

    def finish_gradients(self) -> None:
        """Every gradient that was added is kept."""

    def drop_gradients(self, index: int | None = None) -> None:
        """Forget gradients on their way, of one parameter or all."""

    def norm(self) -> float:
        """The 2-norm over all gradients of all ranks. Raises ``RankDifferenceError`` where some are
        of some ranks alone.
        """

    def gradient(self, record: Record) -> torch.Tensor:
        """A copy of the gradient, whole, on the CPU, in the shape of the parameter."""

    def weight_of(self, record: Record) -> torch.Tensor:
        """A copy of the weights, whole, in the shape of the parameter, on the compute device."""

    def write_back(self, records: Sequence[Record]) -> None:
        """Take what a program made of the weights of ``records``, of all or of none."""

    def read_values(self, record: Record, out: torch.Tensor) -> None:
        """Fill ``out``, contiguous, with what was computed with, or the master where that says
        more.
        """


class SingleRank:
    """One process has everything."""

    rank = 0
    world_size = 1
    coordinator: Coordinator = SingleProcess()
    is_whole = True
    peak_host_bytes = 0

    def __init__(self, state: TieredState) -> None:
        self._state = state
        self.weights: Weights = state.weights
        self.outside_bytes = 0 if state.arena is None else state.arena.nbytes // 2

    def leave(self, error: BaseException | None) -> None:
        """There is nobody to tell."""

    def note(
        self, record: Record, values: torch.Tensor | StoredValues
    ) -> torch.Tensor | StoredValues:
        return values

    def agree_on_values(self) -> None:
        """There is nobody to disagree with."""

    def is_given_back(self, record: Record) -> bool:
        return record.device.type != "meta"

    def meet(self, kind: int, step: int) -> None:
        """There is nobody to meet."""

    def meet_for(
        self, kind: int, steps: Sequence[int], action: Callable[[], T], *, tells: bool
    ) -> T:
        return action()

    def note_change(self, record: Record, values: torch.Tensor) -> None:
        """There is nobody to disagree with."""

    def begin_step(
        self,
        present: Sequence[int],
        steps: Sequence[int],
        groups: Sequence[Mapping[str, Any]],
        factors: Mapping[str, float],
    ) -> None:
        """There is nobody to disagree with."""

    def end_step(self, updated: Iterable[int]) -> None:
        """The cache of weights knows."""

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        self._state.add_gradient(index, gradient)

    def has_gradient(self, index: int) -> bool:
        return False

    def finish_gradients(self) -> None:
        """They are kept at once."""

    def drop_gradients(self, index: int | None = None) -> None:
        """They are kept at once."""

    def norm(self) -> float:
        return self._state.gradients.norm()

    def gradient(self, record: Record) -> torch.Tensor:
        return self._state.gradients.read(record.index).view(record.shape)

    def weight_of(self, record: Record) -> torch.Tensor:
        return weight_of(self._state, record)

    def write_back(self, records: Sequence[Record]) -> None:
        write_back(self._state, records)

    def read_values(self, record: Record, out: torch.Tensor) -> None:
        read_values(self._state, record, out)
