"""The gradients since the last step, and what they are still to be multiplied by.

Clipping and the scale of the loss are not done to gradients where they lie: the next step does both
in passing.

Invariant: the pending factors are of all gradients that are there, and of no other. A gradient that
joins them is brought to their scale, after they were clipped; both go with the last of them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from aio.errors import let_go
from infinity.backward_passes import BackwardPasses
from infinity.optim.loss_scale import GradientScale, LossScale
from infinity.parameters.offloaded.histories import ChangeCount, history_of
from infinity.parameters.offloaded.parameter import take_grad
from infinity.parameters.offloaded.placeholders import came_frozen
from infinity.parameters.records import Record
from infinity.ranks.context import RankContext
from infinity.tiling.gradients import taken
from swap.interruptions.forks import check_process
from swap.tiered import TieredState


class Accumulated:
    """``scale`` is that of the loss; ``clip_factor`` is what clipping wants of the gradients."""

    def __init__(
        self,
        records: Sequence[Record],
        state: TieredState,
        rank_context: RankContext,
        loss_scale: LossScale | None,
    ) -> None:
        self._process, self._records = os.getpid(), records
        self._state = state
        self._rank_context = rank_context
        self.scale = GradientScale(loss_scale)
        self.clip_factor = 1.0
        self.passes = BackwardPasses()
        self._consumed: set[int] = set()
        self._zeroed: set[int] = set()
        """Those that a program has set to zero, and nothing was added to since."""
        self._is_clearing = False
        """Whether who takes a step now clears the gradients after it."""
        self._is_to_be_cleared = False
        """Whether he was to, and has not yet: an interrupt may have kept him from it."""
        self._ages = [0] * len(records)
        self._counts = [ChangeCount() for _ in records]
        self.changed = False
        """Whether a program has changed one of those that are there in place."""
        self._adding = threading.Lock()

    @property
    def present(self) -> frozenset[int]:
        """Parameters with a gradient, once all that are on their way have arrived."""
        self._rank_context.finish_gradients()
        self._state.collect_gradients()
        return self._state.gradients.present

    @property
    def arrived(self) -> frozenset[int]:
        """Of those, the ones that have, on this rank."""
        return self._state.gradients.present

    @property
    def worth_keeping(self) -> frozenset[int]:
        """Of those, the ones that ``zero_grad(set_to_none=False)`` has not just cleared."""
        return self.arrived - self._zeroed

    def norm(self) -> float:
        """The 2-norm over all, unscaled and before clipping. Ranks take it together, also of none:
        one that has some is not to wait for those that do not come.
        """
        return self._rank_context.norm() / self.scale.value

    def read(self, index: int) -> torch.Tensor | None:
        """A copy on the CPU, clipped and scaled; or None."""
        if index not in self.present:
            return None
        gradient = self._rank_context.gradient(self._records[index])
        return gradient if self.clip_factor == 1.0 else gradient.mul_(self.clip_factor)

    def age(self, index: int) -> int:
        """How often that of a parameter was cleared or replaced."""
        return self._ages[index]

    def state_of(self, index: int) -> tuple[int, int]:
        """Another one whenever that of a parameter is."""
        return self._ages[index], self._counts[index].changes

    def counts(self, index: int) -> tuple[ChangeCount]:
        """What counts the changes of that of a parameter, until it is cleared or replaced."""
        return (self._counts[index],)

    def clip(self, factor: float) -> None:
        """Let all that are there have ``factor`` times their values."""
        self.clip_factor *= factor
        if factor != 1.0:
            for index in self.present:
                self._counts[index].changes += 1

    def values(self, index: int, age: int) -> torch.Tensor:
        """``read`` for who has it as it was of that ``age``, on the compute device.

        Raises ``RuntimeError`` naming one that cannot be had.
        """
        name = self._records[index].name
        self._check_age(index, age)
        if index in self._consumed:
            raise RuntimeError(
                f"the gradient of {name} was used by the step, which left nothing of it; read or "
                "change it before the step, read offloaded.grad_norm after it, and clear it by "
                "optimizer.zero_grad(), zero_() or p.grad = None"
            )
        self._check_unscaled(name)
        values = self.read(index)
        if values is None:
            raise RuntimeError(f"{name} has no gradient")
        return values.to(self._state.device)

    def _check_age(self, index: int, age: int) -> None:
        if age != self._ages[index]:
            raise RuntimeError(
                f"this gradient of {self._records[index].name} was cleared or replaced; clone() "
                "what is to be kept"
            )

    def _check_unscaled(self, name: str) -> None:
        if self.scale.value != 1.0:
            raise RuntimeError(
                f"the gradient of {name} is multiplied by the loss scale, {self.scale.value:g}; "
                "clip by offloaded.clip_grad_norm_(max_norm), read offloaded.gradient(parameter)"
            )

    def overwrite(self, index: int, age: int, values: torch.Tensor) -> None:
        """A program has changed all values of the gradient of that ``age``, be it that a step has
        used those before.
        """
        self._check_age(index, age)
        if is_any := bool(values.any()):
            self._check_unscaled(self._records[index].name)
        self._consumed.discard(index)
        with self._or_lost(index):
            self._rank_context.drop_gradients(index)  # what is on its way would be added to them
            self.keep(index, values)
        if not is_any:
            self._zeroed.add(index)

    def keep(self, index: int, values: torch.Tensor) -> None:
        """A program has changed what ``values`` gave."""
        self.changed = True
        self._counts[index].changes += 1
        self._zeroed.discard(index)
        with self._or_lost(index):
            self._clip_now()
            record = self._records[index]
            flat = values.detach().cpu().reshape(-1)
            self._rank_context.note_change(record, flat)
            part = flat[record.first : record.first + record.spec.numel]
            self._state.clear_gradients(index)
            self._state.add_gradient(index, part)

    def has(self, index: int) -> bool:
        """Whether there is one that was not cleared, be it that a step has used it."""
        check_process(self._process, "the offloaded model")
        if index in self._consumed or self._rank_context.has_gradient(index):
            return True
        return self._state.has_gradient(index)

    def set(self, index: int, gradient: torch.Tensor | None) -> None:
        """Replace the gradient of a parameter by one that a program made, or clear it. One that
        cannot be kept is lost, and no step is taken until it is cleared.
        """
        check_process(self._process, "the offloaded model")  # a child would wait for other ranks
        self._rank_context.drop_gradients(index)
        self._state.clear_gradients(index)
        self._consumed.discard(index)
        self._zeroed.discard(index)
        self._ages[index] += 1
        self._counts[index].marks.clear()  # who has it still may not keep the graph
        self._counts[index] = ChangeCount()
        if gradient is not None:
            with self._or_lost(index):
                self._clip_now()
                self._rank_context.add_gradient(index, self.scale.assigned(gradient))
            self._note_history(index, gradient)
        elif not self._has_any():
            self._forget_factors()

    def take(self, index: int, parameter: torch.Tensor) -> bool:
        """Move what autograd accumulated into ``parameter`` to those that are kept; False if there
        is nothing.

        Raises ``RuntimeError`` naming a parameter whose gradient was used and not cleared, or that
        came frozen, and for a pass beside another; then no step is taken before all gradients are
        cleared.
        """
        gradient = take_grad(parameter)
        if gradient is None:
            return False
        try:
            self._check_trained(index)
            self.passes.brings()
        except RuntimeError as refusal:
            self._state.gradients.lose(index, refusal)
            raise
        if self._is_to_be_cleared:
            self._rank_context.drop_gradients()
            self._forget_used()
        if index in self._consumed:
            raise RuntimeError(
                f"{self._records[index].name} got a gradient on top of one that a step has used; "
                "call offloaded.step(), or optimizer.zero_grad() after optimizer.step()"
            )
        with self._adding:  # autograd has several threads for several devices
            if torch.is_grad_enabled() and self.has(index):
                self._ages[index] += 1  # where it makes graphs, it adds up in another tensor
            self.add(index, taken(gradient))
            self._note_history(index, gradient)
        return True

    def _note_history(self, index: int, gradient: torch.Tensor) -> None:
        if gradient.requires_grad:
            self._counts[index].marks.append(history_of(gradient))

    def forget_histories(self) -> None:
        """Let go of the graphs that the gradients depend on."""
        for count in self._counts:
            count.marks.clear()

    def _check_trained(self, index: int) -> None:
        record = self._records[index]
        if not record.spec.trainable:
            raise came_frozen(record.name, "cannot keep the gradient that a backward pass brought")

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """A gradient that arrives, of the pass that runs now."""
        self._counts[index].changes += 1
        self._zeroed.discard(index)
        with self._or_lost(index):
            self._clip_now()
            self._rank_context.add_gradient(index, self.scale.taken(gradient))

    def begin_step(
        self, present: Sequence[int], steps: Sequence[int], groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """All ranks take the same step. Raises ``RankDifferenceError`` if they do not."""
        factors = {
            "the scale of the loss": self.scale.value,
            "what clipping multiplies gradients by": self.clip_factor,
        }
        self._rank_context.begin_step(present, steps, groups, factors)

    def check_unused(self) -> None:
        """Raises ``RuntimeError`` naming a parameter whose gradient a step has used: in memory
        another step would use it once more.
        """
        if self._consumed and not self._is_to_be_cleared:
            raise RuntimeError(
                f"step() with the gradient of {self._records[min(self._consumed)].name} that the "
                "step before has used, and that is gone; call offloaded.step(), or "
                "optimizer.zero_grad() after optimizer.step()"
            )

    def consume(self, indices: Iterable[int]) -> None:
        """A step has used these, or was skipped because of them: they are to be cleared."""
        self.clip_factor = 1.0
        self._consumed.update(indices)
        self._is_to_be_cleared = self._is_clearing

    @contextmanager
    def cleared_after_step(self) -> Iterator[None]:
        """A step is taken inside, and ``clear`` is called after it: or, if an interrupt comes
        between, what was used is forgotten when the next gradient arrives.
        """
        self._is_clearing = True
        try:
            yield
        finally:
            self._is_clearing = False

    def take_left(self) -> None:
        """Take what an interrupted backward pass left on parameters, where autograd has put it."""
        for record in self._records:
            self.take(record.index, record.parameter)

    def clear(self) -> None:
        """Forget all."""
        check_process(self._process, "the offloaded model")
        for record in self._records:
            take_grad(record.parameter)  # an interrupt may have left it there
        self._rank_context.drop_gradients()
        self._state.clear_gradients()
        self._forget_used()

    def _forget_used(self) -> None:
        self._consumed.clear()
        self._zeroed.clear()
        self._ages = [age + 1 for age in self._ages]
        self.forget_histories()
        self._counts = [ChangeCount() for _ in self._ages]
        self._forget_factors()
        self._is_to_be_cleared = False

    @contextmanager
    def _or_lost(self, *indices: int) -> Iterator[None]:
        """What fails inside has taken the gradients of these parameters with it."""
        try:
            yield
        except BaseException as failure:
            for index in indices:
                self._state.gradients.lose(index, let_go(failure))
            raise

    def _clip_now(self) -> None:
        """Clip the gradients now, in their own dtype, as ``torch.nn.utils`` does."""
        if self.clip_factor == 1.0:
            return
        self._state.collect_gradients()
        factor, self.clip_factor = self.clip_factor, 1.0
        unclipped = sorted(self._state.gradients.present)
        while unclipped:
            with self._or_lost(*unclipped):
                clipped = self._state.gradients.read(unclipped[0]).mul_(factor)
                self._rank_context.note_change(self._records[unclipped[0]], torch.tensor([factor]))
                self._state.clear_gradients(unclipped[0])
                self._state.add_gradient(unclipped[0], clipped)
            del unclipped[0]

    def _has_any(self) -> bool:
        gradients = self._state.gradients
        if self._consumed or gradients.present or gradients.lost:
            return True
        return any(self._rank_context.has_gradient(record.index) for record in self._records)

    def _forget_factors(self) -> None:
        self.changed = False
        self.scale.clear()
        self.clip_factor = 1.0
