"""The handle that a user holds inside the block: steps, gradients, values, saving, reports."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from checkpoint.directory.relocation import StripeDirs
from infinity.activations.offloading import Activations
from infinity.autograd.modes import own_modes
from infinity.autograd.modifying import Loans, Parameters, records_of
from infinity.autograd.module_hooks import ModelHooks
from infinity.autograd.phases import Passes, Phases
from infinity.autograd.refusals import check_not_traced
from infinity.autograd.residency import Residency
from infinity.autograd.saved_tensors import SavedTensors
from infinity.autograd.versions import Versions
from infinity.background import BackgroundSaves
from infinity.optim.accumulated import Accumulated
from infinity.optim.loss_scale import LossScale
from infinity.optim.optimizer import OffloadedOptimizer, advance_groups
from infinity.optim.stepping import as_norm, clip_coefficient, options_of, updates_for
from infinity.parameters.parameter import become_offloaded, take_grad
from infinity.parameters.records import Record
from infinity.ranks.collectives import LOAD, SAVE
from infinity.ranks.context import Sharing
from infinity.report import Report, make_report, write_trace
from infinity.restoring import Restoring
from infinity.values import loading, persistence
from swap.apart import run_apart
from swap.forks import check_process
from swap.plan.rules import AdamRule, FrozenRule, ParameterUpdate, UpdateRule
from swap.storage.endurance import DRIVE_ENDURANCE
from swap.tiered import TieredState
from swap.tiers import Budget
from swap.undo import Undo
from swap.update.stages import Step

_UNCLIPPED_STEPS = 4
"""After so many steps in a row without clipping, the next one is expected not to clip either."""


class OffloadedModel:
    """What ``with infinity.offload(...) as offloaded`` gives. Every method raises ``RuntimeError``
    after the block.
    """

    def __init__(
        self,
        model: nn.Module,
        records: list[Record],
        state: TieredState,
        *,
        rule: UpdateRule,
        budget: Budget,
        activations: Activations,
        max_grad_norm: float | None,
        loss_scale: LossScale | None,
        compute_dtype: torch.dtype | None,
        checkpoint_bytes: int,
        sharing: Sharing,
    ) -> None:
        self.checkpoint_bytes = checkpoint_bytes
        self.model = model
        self.rule = rule
        self.sharing = sharing
        self._budget = budget
        self.optimizer: OffloadedOptimizer
        self.records = records
        self.state = state
        self._index = {id(record.parameter): record.index for record in records}
        self._max_grad_norm = max_grad_norm
        self.loss_scale_state = loss_scale
        self._gradients = Accumulated(records, state, sharing, loss_scale)
        self._unclipped_steps = 0
        self._repeatable = isinstance(rule, AdamRule) and loss_scale is None
        self._norm: torch.Tensor | None = None
        self.steps = [0] * len(records)
        weights = sharing.weights
        self._residency = Residency(records, weights, state.device, sharing.visitor_bytes)
        self._phases = Phases(state.timeline)
        self._activations = activations
        self._saved = SavedTensors(
            records, weights, self._phases, activations, lambda: self._residency.held
        )
        self._versions = Versions(records, self._residency.kept_out)
        self._loans = Loans(records, self._residency, sharing, self._versions)
        self._saves = BackgroundSaves()
        passes = Passes(self._end_pass) if isinstance(rule, FrozenRule) else None
        parts = (self._residency, self._phases, self._versions, self._saved)
        self._hooks = ModelHooks(model, records, *parts, compute_dtype, passes)
        self._restoring = Restoring(model, state, sharing)
        self._process, self._open = os.getpid(), True

    # Training.

    def step(self) -> None:
        """Clip (``max_grad_norm``), take an optimizer step, clear the gradients.

        Returns before the update is finished: the next forward waits for each parameter's own
        update only. Raises ``AioError`` when the update before this one failed; nothing of this
        step is done then.
        """
        self._check_open()
        with self._gradients.cleared_after_step():
            self.optimizer.step()
        self.optimizer.zero_grad()

    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``; float16 is scaled, and a step that overflows skipped. Raises
        ``RuntimeError`` while another backward pass runs.
        """
        self._check_open()
        with self._gradients.passes.alone(sys._getframe()):
            self._gradients.scale.backward(loss)

    @own_modes()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients at the next step so that their norm is at most ``max_norm``; return
        the norm before.
        """
        self._check_open()
        gradients = self._gradients
        gradients.take_left()
        if not gradients.present:
            return as_norm(0.0)
        norm = gradients.norm() * gradients.clip_factor
        gradients.clip_factor *= clip_coefficient(norm, max_norm)
        return as_norm(norm)

    @property
    def grad_norm(self) -> torch.Tensor:
        """2-norm over all gradients of the last step, unscaled and before clipping; 0-d float32 on
        the CPU.
        """
        self._check_open()
        if self._norm is None:
            raise RuntimeError("grad_norm is that of the last step, and no step was taken yet")
        return self._norm

    @property
    def loss_scale(self) -> float:
        """What ``backward`` multiplies the loss by: 1 but for float16."""
        self._check_open()
        return 1.0 if self.loss_scale_state is None else self.loss_scale_state.value

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of the accumulated gradient on the CPU, clipped as ``clip_grad_norm_`` was told
        to, scaled as ``backward`` did; or None.
        """
        self._check_open()
        return self._gradients.read(self._index_of(parameter))

    def flush(self) -> None:
        """Wait until the last step is finished and every value is at home. Raises ``AioError`` if
        the step was stopped by an I/O error; a further call tries to finish it.
        """
        self._check_open()
        self.state.flush()

    # Values.

    @contextmanager
    def gathered(self, params: Parameters = None, modify: bool = False) -> Iterator[None]:
        """Real, full tensors in ``params`` (default: all) inside the block; they take memory beyond
        the budget.

        With ``modify`` changed elements are kept (and become the master exactly), once background
        saves have read what was there; without, changes are lost. Inside, ``step`` and ``load``
        are refused, with ``modify`` ``save`` and ``export`` too. Nested in another, the tensors are
        the same; what they hold as the last with ``modify`` ends is kept.
        """
        self._check_unchanged()
        chosen = records_of(params, self.records, self._index_of)
        self.state.flush()
        with self._loans.lend(chosen, modify):
            yield
            self._saves.wait_read()

    def save(self, path: str | os.PathLike[str], block: bool = True, extra: Any = None) -> Any:
        """Save weights, masters, moments, steps, buffers, extra state of modules, loss scale and
        random state at ``path``. Gradients are not saved; a warning says where there are any.

        ``extra`` is any state tree, each rank's own; ``load`` returns it. Returns what
        ``checkpoint.save`` returns, when it is durable; without ``block`` at once what
        ``checkpoint.save_async`` returns: then the next step waits until the state has been read,
        and the end of the block until it is saved, and raises its error if nobody has. As those.
        """
        self._check_unchanged()
        self._loans.check_unmodified("save()")
        self.sharing.meet(SAVE, max(self.steps))
        self.state.flush()
        outcome = persistence.save(self, path, extra, block=block)
        if not block:
            self._saves.add(outcome)
        return outcome

    @own_modes()
    def load(self, path: str | os.PathLike[str], *, stripe_dirs: StripeDirs | None = None) -> Any:
        """Load what ``save`` wrote; returns its ``extra``. Training continues bit-identically, on
        as many ranks; see ``values.loading``. Raises as ``checkpoint.load``, and ``ValueError``
        naming what does not match this model; in that case nothing was changed.
        """
        self._check_open()
        self._loans.check_none("load()")
        self.sharing.meet(LOAD, max(self.steps))
        self._saves.wait_done()
        self.state.flush()
        return loading.load(self, path, stripe_dirs, then=self._loaded)

    def _loaded(self) -> None:
        self.optimizer.zero_grad()
        self._residency.reset()
        run_apart(partial(self._versions.count_updates, range(len(self.records))), "infinity-load")

    def export(self, folder: str | os.PathLike[str]) -> list[str]:
        """Write the weights as Hugging Face safetensors shards with an index; returns the paths."""
        self._check_unchanged()
        self._loans.check_unmodified("export()")
        self.sharing.meet(SAVE, max(self.steps))
        self.state.flush()
        return persistence.export(self, folder)

    def report(self, drive_endurance: int | str = DRIVE_ENDURANCE) -> Report:
        """Bytes per tier, traffic, stalls, overlap, peaks so far; ``print`` it for a table.

        ``drive_endurance``: bytes that each drive is rated for (its TBW).
        """
        self._check_open()
        numbers = self._budget.host_bytes, max(self.steps), drive_endurance
        return make_report(self.state, self._activations, *numbers, self.sharing.peak_host_bytes)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the recent timeline as JSON that Perfetto and chrome://tracing open."""
        self._check_open()
        write_trace(self.state.timeline, path)

    # What the optimizer, the parameters and the hooks call.

    @own_modes()
    def take_step(self) -> None:
        """Fix norm, clipping, options and step counts, and start the update."""
        self._check_open()
        if isinstance(self.rule, FrozenRule) and self._gradients.present:
            raise RuntimeError(
                "the model was offloaded with optimizer=None, which is for inference; pass "
                "infinity.AdamW(...) or a factory to take steps"
            )
        self._check_unchanged()
        self._loans.check_none("step()")
        self._phases.end_backward()
        self._gradients.take_left()
        present = sorted(self._gradients.present)
        self.sharing.begin_step(present, self.steps, self.optimizer.param_groups)
        if not present:
            return
        self._residency.reset()
        gradients = self._gradients
        self._norm = as_norm(whole_norm := gradients.norm())
        norm = whole_norm * gradients.clip_factor
        scale = gradients.clip_factor / gradients.scale.value
        if self._max_grad_norm is not None:
            scale *= clip_coefficient(norm, self._max_grad_norm)
        self._unclipped_steps = self._unclipped_steps + 1 if scale == 1.0 else 0
        if gradients.scale.overflowed(norm):
            gradients.consume(self.state.gradients.capture())
            return
        updates = self._updates(present)
        self.state.step(updates, scale, then=partial(self._taken, present))

    def _taken(self, present: Sequence[int]) -> None:
        """The step is under way. One that raised was not, and is taken again with its clipping."""
        self._gradients.consume(present)
        for index in present:
            self.steps[index] += 1
            self._saved.generations[index] += 1
        self._versions.count_updates(present)
        self.sharing.end_step(present)
        advance_groups(self.rule, self.optimizer, (self.records[i].parameter for i in present))

    def _end_pass(self) -> None:
        self.state.weights.end_cycle()
        self.sharing.end_step(())

    def propose(self) -> Step | None:
        """The step that is likely to be taken next, for updates before it is; None if unknown. As
        if no gradient were clipped, which is proposed after some steps in which none was.
        """
        may_clip = self._max_grad_norm is not None or self._gradients.clip_factor != 1.0
        if not self._repeatable or (may_clip and self._unclipped_steps < _UNCLIPPED_STEPS):
            return None
        return Step(updates=self._updates(None), gradient_scale=1.0)

    def clear_gradients(self) -> None:
        self._gradients.clear()

    def has_gradient(self, index: int) -> bool:
        return self._gradients.has(index)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        self._gradients.set(index, gradient)

    def in_place(self, indices: Collection[int]) -> AbstractContextManager[None]:
        """Weights of these parameters are in place inside."""
        self._check_open(self.records[min(indices)].name)
        check_not_traced()
        return self._residency.in_place(indices, sys._getframe(1))

    @property
    def is_computing(self) -> bool:
        return self._residency.is_computing

    def is_gathered(self, index: int) -> bool:
        return self._residency.is_gathered([index])

    def name_of(self, index: int) -> str:
        return self.records[index].name

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        """Autograd accumulated into ``parameter``: move that to the gradient store."""
        if self._gradients.take(self._index_of(parameter), parameter):
            self._phases.backward_works()

    def _leave_gradients(self) -> None:
        """To autograd, from now on. Not by handles: an interrupt may have taken one."""
        for record in self.records:
            hooks = getattr(record.parameter, "_post_accumulate_grad_hooks", None) or {}
            for number, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is self:
                    del hooks[number]

    # Opening and closing, for ``offload``.

    def attach(self, undo: Undo) -> None:
        """Give the model its offloaded face; ``undo`` takes it off again, whatever happens."""
        undo.push(self._saves.tell_at_end)
        undo.callback(self._restore)
        for record in self.records:
            self._restoring.add(record)
            take_grad(record.parameter)
            become_offloaded(
                record.parameter, record.index, self, record.spec.dtype, self.state.device
            )
        self.state.propose = self.propose
        undo.callback(self._residency.detach)
        self._residency.attach(self.model)
        undo.enter_context(self._saved)
        self._hooks.attach(undo)
        undo.callback(self._leave_gradients)
        for record in self.records:
            if record.spec.trainable:
                record.parameter.register_post_accumulate_grad_hook(self._take_gradient)
        undo.callback(self._residency.reset)
        undo.push(self.sharing.leaving)
        for index, gradient in self._restoring.gradients.items():
            if self.records[index].spec.trainable:  # accumulated to, as plain PyTorch does
                self._gradients.add(index, gradient)
        self._versions.watch(self.model)
        undo.push(self._versions.check_at_end)
        undo.push(self._loans.end)
        self._restoring.gradients.clear()

    def _restore(self) -> None:
        """See ``Restoring``; what it left after an interrupt, when called again."""
        if self._open:
            self._restoring.before(lambda: max(self.steps), *self._saves.waits())
        self._open = False
        self.state.propose = None
        self._restoring.run()

    def _check_unchanged(self) -> None:
        """Raises ``RuntimeError`` naming a parameter that was changed in place, or is new."""
        self._check_open()
        self._versions.check()

    def _check_open(self, what: str = "model") -> None:
        check_process(self._process, f"the offloaded {what}")
        if not self._open:
            raise RuntimeError(
                "the model is not offloaded any more: use it inside the `with` block"
            )

    def _index_of(self, parameter: torch.Tensor) -> int:
        index = self._index.get(id(parameter))
        if index is None:
            shape = tuple(parameter.shape)
            raise ValueError(f"a parameter of shape {shape} is none of the offloaded model")
        return index

    def _updates(self, present: Sequence[int] | None) -> dict[int, ParameterUpdate]:
        """What the next step means for those parameters, or for all that are in a group."""
        options = options_of(self.optimizer.param_groups, self._index_of)
        return updates_for(present, options, self.records, self.steps)
