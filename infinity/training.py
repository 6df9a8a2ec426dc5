"""What training of one offloaded model consists of, behind the handle: its parts, the steps that
act on them, and what the optimizer, the parameters and the hooks on modules call.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from aio.process.threads import Latch
from infinity.activations.offloading import Activations
from infinity.autograd.kept_views import KeptViews
from infinity.autograd.modifying import Loans
from infinity.autograd.module_hooks import ModelHooks
from infinity.autograd.phases import Passes, Phases
from infinity.autograd.refusals import check_use, refusal_after_block
from infinity.autograd.residency import ModuleResidency
from infinity.autograd.saved_tensors import SavedTensors
from infinity.autograd.versions import Versions
from infinity.background import BackgroundSaves
from infinity.optim.accumulated import Accumulated
from infinity.optim.left_gradients import LeftGradients
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import OffloadedOptimizer, StepTaker
from infinity.optim.rule import OptimizerRule
from infinity.optim.state_reference import StateReference
from infinity.optim.stepping import as_norm, clip_coefficient, options_of, updates_for
from infinity.parameters.offloaded.becoming import become_offloaded, hooked
from infinity.parameters.offloaded.handlers import check_not_moving
from infinity.parameters.offloaded.histories import ChangeCount
from infinity.parameters.offloaded.modes import own_modes, unseen
from infinity.parameters.offloaded.parameter import take_grad
from infinity.parameters.records import Record
from infinity.ranks.context import RankContext
from infinity.restoring import Restoring
from swap.interruptions.apart import run_apart
from swap.interruptions.forks import check_process
from swap.interruptions.mixture import MixedStateError
from swap.interruptions.undo import Undo
from swap.plan.rules import ParameterUpdate
from swap.storage.checksums import CorruptSwapError
from swap.tiered import TieredState
from swap.tiers import Budget
from swap.update.stages import Step

_UNCLIPPED_STEPS = 4
"""After so many steps in a row without clipping, the next one is expected not to clip either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What ``offload`` makes a ``Training`` of."""

    model: nn.Module
    records: list[Record]
    state: TieredState
    rule: OptimizerRule
    budget: Budget
    optimizer_for: Callable[[StepTaker], OffloadedOptimizer]
    activations: Activations
    max_grad_norm: float | None
    loss_scale: LossScale | None
    compute_dtype: torch.dtype | None
    checkpoint_bytes: int
    rank_context: RankContext
    run: str
    """A name of this block alone, the same on all ranks."""


class Training:
    """The parts of an offloaded model, and what happens to them."""

    def __init__(self, parts: Parts) -> None:
        self.model, self.records, self.state = parts.model, parts.records, parts.state
        self.rule, self.checkpoint_bytes = parts.rule, parts.checkpoint_bytes
        self.loss_scale_state, self.rank_context = parts.loss_scale, parts.rank_context
        self.budget, self.activations = parts.budget, parts.activations
        records, state, rank_context = parts.records, parts.state, parts.rank_context
        self.steps = [0] * len(records)
        self.gradients = Accumulated(records, state, rank_context, parts.loss_scale)
        self.norm: torch.Tensor | None = None  # 2-norm of the gradients of the last step
        self._index = {id(record.parameter): record.index for record in records}
        self._max_grad_norm, self._may_clip = parts.max_grad_norm, parts.max_grad_norm is not None
        self._repeatable = self.rule.is_repeatable and parts.loss_scale is None
        self.residency = ModuleResidency(
            records, rank_context.weights, state.device, rank_context.outside_bytes
        )
        self._phases = Phases(state.timeline, state.device)
        self._saved = SavedTensors(
            records, rank_context.weights, self._phases, parts.activations, self.residency
        )
        self.versions = Versions(records, self.residency)
        self._views = KeptViews(records, rank_context.weights.held, self.residency)
        self.loans = Loans(records, state, self.residency, rank_context, self.versions, self._views)
        self.saves = BackgroundSaves()
        passes = Passes(self._end_pass) if self.rule.kept_by is None else None
        hooked = (self.residency, self._phases, self.versions, self._saved)
        self._hooks = ModelHooks(
            parts.model, records, *hooked, parts.compute_dtype, passes, self.loans
        )
        self.begun = Latch()
        self._restoring = Restoring(parts.model, state, rank_context, self.begun)
        self._process, self._open, self._unclipped_steps = os.getpid(), True, 0
        self.reference = StateReference(parts.run, records, parts.rule.kept_by)
        self.optimizer = parts.optimizer_for(self)

    # What must hold before anything else is done.

    def check_open(self, what: str = "model") -> None:
        """Raises ``RuntimeError`` after the block, and in another process."""
        check_process(self._process, f"the offloaded {what}")
        if not self._open:
            raise refusal_after_block()

    def check_unchanged(self) -> None:
        """Raises ``RuntimeError`` naming a parameter that was changed in place, or is new."""
        self.check_whole()
        self.versions.check()

    def check_whole(self) -> None:
        """Raises ``MixedStateError`` where values are of no one moment."""
        self.check_open()
        self.state.mixture.check()

    def index_of(self, parameter: torch.Tensor) -> int:
        """Raises ``ValueError`` for a tensor that is no parameter of the model, ``TypeError`` for
        what is no tensor.
        """
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(
                f"{parameter!r:.80} is a {type(parameter).__name__}, not a parameter; give the "
                "tensor itself, such as model.get_parameter('head.weight')"
            )
        if (index := self._index.get(id(parameter))) is None:
            shape = tuple(parameter.shape)
            raise ValueError(f"a parameter of shape {shape} is none of the offloaded model")
        return index

    # Steps.

    @own_modes
    def take_step(self) -> None:
        """Fix norm, clipping, options and step counts, and start the update."""
        self.check_open()
        if self.rule.kept_by is None and self.gradients.present:
            raise RuntimeError(
                "the model was offloaded with optimizer=None, which is for inference; pass "
                "infinity.AdamW(...) or a factory to take steps"
            )
        self.saves.wait_read()  # also of those that hooks of this very step have begun
        self.check_unchanged()
        self.loans.check_none("step()")
        self.gradients.check_unused()
        self._phases.end_backward()
        self.gradients.take_left()
        present = sorted(self.gradients.present)
        self.gradients.begin_step(present, self.steps, self.optimizer.param_groups)
        self.rule.check_step()
        if not present:  # groups may count steps all the same
            self.rule.advance(self.optimizer.param_groups, ())
            return
        self.residency.reset()
        gradients = self.gradients
        self.norm = as_norm(whole_norm := gradients.norm())
        norm = whole_norm * gradients.clip_factor
        scale = gradients.clip_factor / gradients.scale.value
        if self._max_grad_norm is not None:
            scale *= clip_coefficient(norm, self._max_grad_norm)
        self._may_clip = self._may_clip or gradients.changed
        is_clipped = scale != 1.0 or gradients.changed
        self._unclipped_steps = 0 if is_clipped else self._unclipped_steps + 1
        if gradients.scale.overflows(norm):
            run_apart(self._skipped, "infinity-step")
            return
        self._views.find(present)
        self.state.step(self._updates(present), scale, then=partial(self._taken, present))

    def _skipped(self) -> None:
        """The step is none. One that an interrupt stopped before is looked at again."""
        self.gradients.scale.count_step(is_skipped=True)
        self.gradients.consume(self.state.gradients.capture())

    def _taken(self, present: Sequence[int]) -> None:
        """The step is under way. One that raised was not, and is taken again with its clipping."""
        self.gradients.scale.count_step(is_skipped=False)
        self.gradients.consume(present)
        for index in present:
            self.steps[index] += 1
            self._saved.generations[index] += 1
        self.versions.count_updates(present)
        self.residency.outdate(present)
        self.rank_context.end_step(present)
        self._views.expire_outdated(present)
        self.reference.stepped()
        stepped = (self.records[i].parameter for i in present)
        self.rule.advance(self.optimizer.param_groups, stepped)

    def _end_pass(self) -> None:
        self.state.timeline.mark_step()
        self.state.weights.end_cycle()
        self.rank_context.end_step(())

    def expect_step(self) -> Step | None:
        """The step that is likely to be taken next, for updates before it is; None if unknown, or
        of weights that ``gathered`` changes yet. As if none were clipped, if none was of late.
        """
        may_clip = self._may_clip or self.gradients.clip_factor != 1.0
        is_clipped = may_clip and self._unclipped_steps < _UNCLIPPED_STEPS
        is_known = self._repeatable and not is_clipped and not self.loans.modified()
        return Step(updates=self._updates(None), gradient_scale=1.0) if is_known else None

    def _updates(self, present: Sequence[int] | None) -> dict[int, ParameterUpdate]:
        """What the next step means for those parameters, or for all that are in a group."""
        groups, read = self.optimizer.param_groups, self.rule.options_read
        options = options_of(groups, self.index_of, read, self.name_of)
        return updates_for(present, options, self.records, self.steps)

    def clear_gradients(self) -> None:
        if self._open:
            self.gradients.clear()

    def describe_state(self) -> dict[str, Any]:
        self.check_whole()
        scale = self.loss_scale_state
        return self.reference.describe(self.steps, None if scale is None else scale.saved())

    def check_state(self, state_dict: Mapping[str, Any]) -> None:
        self.check_whole()
        self.reference.check(state_dict, self.steps)

    def restore_loss_scale(self, saved: Sequence[Any] | None) -> None:
        if self.loss_scale_state is not None:
            self.loss_scale_state.restore(saved)

    def begin_replacing(self) -> Callable[[], None]:
        """Finish the last step; or, where that cannot be, have what is returned forget it."""
        self._views.find(range(len(self.records)))
        self.state.wait_for_updates()
        cannot_finish = isinstance(self.state.pipeline.failure, CorruptSwapError)
        if self.state.mixture.is_left or cannot_finish:
            return self.state.discard_step
        self.state.flush()
        return self.state.flush  # of a step that another thread begins until values are replaced

    def loaded(self) -> None:
        """Other values are at home, and other state."""
        self.clear_gradients()
        self.residency.reset()
        self.rank_context.weights.drop()  # threads may have read while values were written
        self._views.expire_all()
        self.residency.outdate(range(len(self.records)))
        run_apart(partial(self.versions.count_updates, range(len(self.records))), "infinity-load")

    # What parameters call.

    def has_gradient(self, index: int) -> bool:
        return self.gradients.has(index)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        check_not_moving(f"the gradient of {self.records[index].name}")
        self.gradients.set(index, gradient)

    def gradient_values(self, index: int, age: int) -> torch.Tensor:
        self.check_open(self.records[index].name)
        check_use(f"the gradient of {self.records[index].name}")
        return own_modes(self.gradients.values)(index, age)

    def gradient_age(self, index: int) -> int:
        return self.gradients.age(index)

    def gradient_counts(self, index: int) -> Sequence[ChangeCount]:
        return self.gradients.counts(index)

    @own_modes
    def keep_gradient(self, index: int, values: torch.Tensor) -> None:
        self.gradients.keep(index, values)

    @own_modes
    def overwrite_gradient(self, index: int, age: int, values: torch.Tensor) -> None:
        self.check_open(self.records[index].name)
        check_not_moving(f"the gradient of {self.records[index].name}")
        self.gradients.overwrite(index, age, values)

    def in_place(self, indices: Collection[int]) -> AbstractContextManager[None]:
        """Weights of these parameters are in place inside."""
        name = self.records[min(indices)].name
        self.check_open(name)
        check_use(name)
        return self.residency.in_place(indices, sys._getframe(1))

    @property
    def is_computing(self) -> bool:
        return self.residency.is_computing

    def is_gathered(self, index: int) -> bool:
        return self.residency.is_gathered([index])

    def gave_view(self, index: int, view: torch.Tensor) -> None:
        self._views.add(index, view)

    def name_of(self, index: int) -> str:
        return self.records[index].name

    def watch_gradients(self, index: int) -> None:
        parameter = self.records[index].parameter
        if not self._hooks_on(parameter):
            parameter.register_post_accumulate_grad_hook(self._take_gradient)

    def _hooks_on(self, parameter: torch.Tensor) -> list[int]:
        """The numbers of ours. Not handles: an interrupt may have taken one."""
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        return [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is self]

    def changes_told(self, index: int) -> int:
        return self.versions.changes_told(index)

    def updates_counted(self, index: int) -> int:
        return self.versions.updates_counted(index)

    def version_beside_updates(self, index: int, tensor: torch.Tensor) -> int:
        return self.versions.beside_updates(index, tensor)

    def changed_copy(self, index: int, told: int) -> None:
        if self._open:
            self.versions.changed_copy(index, told)

    @unseen
    def _take_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd accumulated into ``parameter``: move that to the gradient store."""
        if self.gradients.take(self.index_of(hooked(parameter)), parameter):
            self._phases.backward_works()

    def _leave_gradients(self) -> None:
        """To autograd, from now on."""
        for parameter in [record.parameter for record in self.records]:
            for number in self._hooks_on(parameter):
                del parameter._post_accumulate_grad_hooks[number]

    # Beginning and ending.

    def attach(self, undo: Undo) -> None:
        """Give the model its offloaded face; ``undo`` takes it off again, whatever happens."""
        undo.push(self.saves.tell_at_end)
        undo.push(self._restore)
        for record in self.records:
            self._restoring.add(record)
            take_grad(record.parameter)
            become_offloaded(
                record.parameter, record.index, self, record.spec.dtype, self.state.device
            )
        self.state.speculation.expect_step = self.expect_step
        undo.callback(self.residency.detach)
        undo.callback(self._views.expire_all)
        self.residency.attach(self.model)
        undo.enter_context(self._saved)
        self._hooks.attach(undo)
        undo.callback(self._leave_gradients)
        for record in self.records:
            if record.spec.trainable:
                self.watch_gradients(record.index)
        undo.callback(self.residency.reset)
        undo.tell(self.rank_context.leave)
        for index, gradient in self._restoring.gradients.items():
            if self.records[index].spec.trainable:  # accumulated to, as plain PyTorch does
                self.gradients.add(index, gradient)
        self.versions.watch(self.model)
        undo.push(self.versions.check_at_end)
        undo.push(self.loans.end)
        came, trains = self._restoring.gradients, self.rule.kept_by is not None
        left = LeftGradients(self.records, self.gradients, came, trains=trains)
        undo.push(left.settle)
        self._restoring.begin(left.given_back)

    def _restore(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        """See ``Restoring``; what it left after an interrupt, when called again."""
        if not self.begun.is_set():  # here; other ranks may be on their way through theirs
            self.rank_context.leave(error)
        if self._open:
            self._restoring.before(lambda: max(self.steps), *self.saves.waits(), self._tell_mixture)
        self._open = False
        self.state.speculation.expect_step = None
        self._restoring.run()

    def _tell_mixture(self) -> None:
        """Values that are of no one moment are not given back, see ``Restoring``; other ranks are
        told, too.
        """
        try:
            self.state.mixture.check()
        except MixedStateError as error:
            self.rank_context.leave(error)
            raise
