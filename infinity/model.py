"""The handle that a user holds inside the block: steps, gradients, values, saving, reports."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import nn

from aio.errors import check_flag, is_flag
from checkpoint.directory.destination import check_place
from checkpoint.directory.relocation import StripeDirs
from checkpoint.ranks.coordinator import apart
from infinity.autograd.modifying import Parameters, asked, records_of
from infinity.optim.optimizer import OffloadedOptimizer
from infinity.optim.stepping import as_norm, clip_coefficient
from infinity.parameters.offloaded.handlers import check_not_amid, runs_program
from infinity.parameters.offloaded.modes import own_modes
from infinity.parameters.offloaded.parameter import cannot_be_copied
from infinity.parameters.records import Record
from infinity.ranks.collectives import LOAD, SAVE
from infinity.report import Report, make_report, write_trace
from infinity.snapshots.entries import Snapshot, checked_name
from infinity.snapshots.pending import PendingSnapshot
from infinity.snapshots.points import Snapshots
from infinity.tiling.weight import TiledWeight
from infinity.training import Training
from infinity.values import loading, persistence
from swap.storage.drives.endurance import DRIVE_ENDURANCE
from swap.tiers import check_count, parse_amount


class OffloadedModel:
    """What ``with infinity.offload(...) as offloaded`` gives. Every method raises ``RuntimeError``
    after the block.
    """

    # What a program sets on it, such as another max_grad_norm, would do nothing without a word.
    __slots__ = ("__weakref__", "_snapshots", "_training")

    def __init__(self, training: Training, snapshots: Snapshots) -> None:
        self._training = training
        self._snapshots = snapshots

    @property
    def model(self) -> nn.Module:
        """The model that was offloaded."""
        return self._training.model

    @property
    def optimizer(self) -> OffloadedOptimizer:
        """A ``torch.optim.Optimizer`` of all parameters that are trained."""
        return self._training.optimizer

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise cannot_be_copied()

    # Training.

    @runs_program
    def step(self) -> None:
        """Clip (``max_grad_norm``), take an optimizer step, clear the gradients.

        Returns before the update is finished: the next forward waits for each parameter's own
        update only. Raises ``AioError`` when the update before this one failed; nothing of this
        step is done then.
        """
        self._training.check_open()
        with self._training.gradients.cleared_after_step():
            self.optimizer.step()
        self.optimizer.zero_grad()

    @runs_program
    def backward(self, loss: torch.Tensor) -> None:
        """``loss.backward()``; float16 is scaled, and a step that overflows skipped. Raises
        ``RuntimeError`` while another backward pass runs.
        """
        check_not_amid("backward()")
        self._training.check_whole()
        if not isinstance(loss, torch.Tensor):
            raise TypeError(f"loss is a {type(loss).__name__}, not a tensor")
        with self._training.gradients.passes.alone(sys._getframe()):
            self._training.gradients.scale.backward(loss)

    @own_modes
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients at the next step so that their norm is at most ``max_norm``; return
        the norm before. An infinite ``max_norm`` clips nothing. Raises ``TypeError`` or
        ``ValueError`` for one that is no number, NaN or negative.
        """
        check_not_amid("clip_grad_norm_()")
        self._training.check_whole()
        is_endless = isinstance(max_norm, float) and max_norm == math.inf
        bound = math.inf if is_endless else parse_amount(max_norm, name="max_norm")
        gradients = self._training.gradients
        gradients.take_left()
        present, norm = gradients.present, gradients.norm() * gradients.clip_factor
        if not present:
            return as_norm(0.0)
        gradients.clip(clip_coefficient(norm, bound))
        return as_norm(norm)

    @property
    def grad_norm(self) -> torch.Tensor:
        """2-norm over all gradients of the last step, unscaled and before clipping; 0-d float32 on
        the CPU.
        """
        self._training.check_open()
        if self._training.norm is None:
            raise RuntimeError("grad_norm is that of the last step, and no step was taken yet")
        return self._training.norm

    @property
    def loss_scale(self) -> float:
        """What ``backward`` multiplies the loss by: 1 but for float16."""
        self._training.check_open()
        scale = self._training.loss_scale_state
        return 1.0 if scale is None else scale.value

    def gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """A copy of the accumulated gradient on the CPU, clipped as ``clip_grad_norm_`` was told
        to, scaled as ``backward`` did; or None.
        """
        self._begin("gradient()")
        return self._gradient(parameter)

    def _gradient(self, parameter: torch.Tensor) -> torch.Tensor | None:
        if isinstance(parameter, TiledWeight):
            parts = [self._gradient(tile) for tile in parameter.tiles]
            known = [part for part in parts if part is not None]
            return torch.cat(known) if len(known) == len(parts) else None
        return self._training.gradients.read(self._training.index_of(parameter))

    def flush(self) -> None:
        """Wait until the last step is finished and every value is at home. Raises ``AioError`` if
        the step was stopped by an I/O error; a further call tries to finish it.
        """
        self._begin("flush()")
        self._training.state.flush()

    # Values.

    @runs_program
    def gathered(
        self, params: Parameters = None, modify: bool = False
    ) -> AbstractContextManager[None]:
        """Real, full tensors in ``params`` (default: all) inside the block, beyond the budget.

        With ``modify`` changed elements are kept (and become the master exactly), once background
        saves have read what was there; without, changes are lost, as they are where the block ends
        with an exception. Inside, ``step`` and ``load`` are refused, with ``modify`` ``save`` and
        ``export`` too. Where the end raises ``AioError`` (on other ranks ``RankFailedError``), each
        parameter holds what it held before or after, the same on all ranks. Nested in another, the
        tensors are the same; what they hold as the outermost of a thread with ``modify`` ends is
        kept. Both ends wait for forward passes that other threads are in the midst of, 10 s at the
        most; keep passes that may begin just then away from it by a lock.
        """
        if not is_flag(modify):  # told without its values, which may be a parameter's
            kind = type(modify).__name__
            raise TypeError(f"modify is a {kind}, not True or False; give parameters in a list")
        training, params = self._training, asked(params)

        def chosen() -> Sequence[Record]:
            training.check_unchanged()
            return records_of(params, training.records, training.index_of)

        return training.loans.lend(chosen, modify, training.saves)

    def save(
        self,
        path: str | os.PathLike[str],
        block: bool = True,
        extra: Any = None,
        *,
        stripe_dirs: Sequence[str | os.PathLike[str]] | None = None,
        only_trainable: bool = False,
        snapshot: str | None = None,
    ) -> Any:
        """Save weights, masters, moments, steps, buffers, extra state of modules (and what those
        without parameters write into state dicts by themselves), loss scale and torch's random
        state (CPU and CUDA) at ``path``. Gradients are not saved; a warning says where there are
        any.

        ``extra`` is any state tree, each rank's own; ``load`` returns it. What else training goes
        on from belongs there: ``random.getstate()``, ``numpy.random.get_state()``, schedulers, the
        place in the data. Returns what
        ``checkpoint.save`` returns, when it is durable; without ``block`` at once what
        ``checkpoint.save_async`` returns: then the next step waits until the state has been read,
        and the end of the block until it is saved, and raises its error if nobody has. As those.

        ``stripe_dirs``: directories that take the data instead, as in ``checkpoint.save``.
        A step or load of another thread meanwhile is a ``ChangedTensorError``, as is a weight in
        host memory that was changed in place before it was read (``gathered(modify=True)`` waits).
        ``only_trainable`` leaves frozen weights out (checkpoints of adapters); ``load`` takes such
        a one over the same frozen weights, and refuses it over others.

        ``snapshot`` saves what the one of that name has, its ``extra`` too, in place of the state
        of now: no step waits for that, with or without ``block``. Until it is done, dropping that
        snapshot, taking another of its name and saving any snapshot wait. Raises as ``restore``,
        and ``ValueError`` with ``extra`` or ``only_trainable``.
        """
        check_place(path)
        how = persistence.How(block=block, stripe_dirs=stripe_dirs, only_trainable=only_trainable)
        check_not_amid("save()")
        if snapshot is not None:
            if extra is not None or only_trainable:
                raise ValueError("a snapshot is saved as it is: leave extra and only_trainable out")
            return self._save_snapshot(snapshot, path, how)
        self._training.check_unchanged()
        self._training.loans.check_unmodified("save()")
        save = partial(persistence.save, self._training, path, extra, how)
        return self._training.rank_context.meet_for(SAVE, self._training.steps, save, tells=True)

    def _save_snapshot(self, name: str, path: str | os.PathLike[str], how: persistence.How) -> Any:
        self._training.check_open()
        checked_name(name)
        self._check_alone("save(snapshot=)")
        return self._snapshots.save(self._training, name, path, how.stripe_dirs, block=how.block)

    @own_modes
    def load(self, path: str | os.PathLike[str], *, stripe_dirs: StripeDirs | None = None) -> Any:
        """Load what ``save`` wrote; returns its ``extra``. Training continues bit-identically, on
        as many ranks, where it draws from torch's random generators alone; see ``values.loading``.
        Raises as ``checkpoint.load``, and ``ValueError`` naming what does not match this model; in
        that case nothing was changed. What stops it later (a corrupt file, an I/O error, Ctrl-C)
        leaves values mixed: all but loading or restoring is a ``MixedStateError`` until that works.
        Over ranks Ctrl-C may also end what they do together (``RankFailedError``); load in a new
        block then.
        """
        check_place(path)
        self._begin("load()")
        self._training.loans.check_none("load()")
        ranks, load = self._training.rank_context, partial(self._load, path, stripe_dirs)
        return ranks.meet_for(LOAD, [0], load, tells=False)  # at other steps after one was stopped

    def _load(self, path: str | os.PathLike[str], stripe_dirs: StripeDirs | None) -> Any:
        self._training.saves.wait_done()
        with self._training.gradients.passes.alone(sys._getframe()):
            ranks, then = self._training.rank_context.coordinator, self._training.loaded
            begin = apart(ranks, self._training.begin_replacing)  # others wait for this one
            return loading.load(self._training, path, stripe_dirs, begin=begin, then=then)

    @overload
    def snapshot(
        self,
        name: str,
        keep: int | None = None,
        *,
        extra: Any = None,
        block: Literal[True] = True,
    ) -> Snapshot: ...

    @overload
    def snapshot(
        self, name: str, keep: int | None = None, *, extra: Any = None, block: Literal[False]
    ) -> PendingSnapshot: ...

    @overload
    def snapshot(
        self, name: str, keep: int | None = None, *, extra: Any = None, block: bool
    ) -> Snapshot | PendingSnapshot: ...

    def snapshot(
        self, name: str, keep: int | None = None, *, extra: Any = None, block: bool = True
    ) -> Snapshot | PendingSnapshot:
        """Take a durable restore point of all that ``save`` saves, on the ``nvme`` directories.

        When this returns it survives the end of the process, however it comes, and power loss. What
        is on NVMe is not copied: it is kept as it is, beside what training goes on to write, so a
        snapshot takes space as steps replace what it has, at most all that it has. What is in host
        memory is written. ``restore`` brings it back, in this block or another.

        A snapshot of the same name is replaced, at once. With ``keep`` the oldest snapshots of this
        model (parameters of these names and shapes) beyond so many are dropped when the new one is
        durable. ``extra`` is as in ``save``.

        Without ``block`` it is that of the moment of the call all the same, and becomes durable
        behind training: until then it does not exist, and what it replaces stays. The next step
        waits until what is in host memory has been read, the end of the block until all is done.
        ``result()`` of what is returned waits, and gives the snapshot. So do, first of all, another
        ``snapshot``, ``restore``, ``drop_snapshot``, ``save(snapshot=)`` and ``load``; ``flush``
        and ``snapshots`` do not. An error that nobody asked for is raised by the next call that
        gives the same name, or else by the end of the block, as that of a background save.

        Raises ``ValueError`` for a name that is not 1 to 100 letters, digits, ``.``, ``_`` and
        ``-``; ``RuntimeError`` with several ranks, which have ``save``; ``FileExistsError`` for the
        name of a snapshot of another model, or of another version of the library;
        ``CorruptCheckpointError`` for that of a damaged one; ``BlockingIOError`` while another
        block uses the snapshots of these directories; ``OSError`` naming the file where the disk is
        full, or the file system has no hard links. Training and all earlier snapshots are as before
        then.
        """
        check_not_amid("snapshot()")
        self._training.check_unchanged()
        checked_name(name)
        check_flag("block", block)
        if keep is not None:
            check_count(keep, name="keep")
        self._training.loans.check_unmodified("snapshot()")
        self._check_alone("snapshot()")
        self._training.state.flush()
        persistence.warn_of_gradients(self._training, f"the snapshot {name}")
        if block:
            return self._snapshots.take(self._training, name, keep, extra)
        return self._snapshots.take_behind(self._training, name, keep, extra)

    def snapshots(self) -> list[Snapshot]:
        """The snapshots on the ``nvme`` directories, the oldest first; also those of other models.
        One that is still on its way (``block=False``) is not there yet. One that is damaged, or of
        another version of the library, is a warning. Raises ``OSError`` where it cannot be told
        which there are; the next call reads again.
        """
        self._begin("snapshots()")
        return self._snapshots.listed()

    @own_modes
    def restore(self, name: str) -> Any:
        """Let everything be as in a snapshot; returns its ``extra``. Training goes on from there
        with the bits of a run that was never interrupted, as after ``load``.

        What is on NVMe now, and was then, is not read, where the state is cut as it was: in this
        block, and in another that has the same model, options and budgets. Else it is copied, and
        converted as by ``load``. Gradients are cleared, a step that an I/O error stopped forgotten.

        Raises ``FileNotFoundError`` for a name that is not there; ``ValueError`` naming what does
        not match this model, and ``AioError`` naming a file that is missing: nothing was changed
        then. An interrupt, or an I/O error later, leaves values mixed, as that of ``load`` does.
        """
        self._begin("restore()")
        checked_name(name)
        self._training.loans.check_none("restore()")
        self._check_alone("restore()")
        self._training.saves.wait_done()
        with self._training.gradients.passes.alone(sys._getframe()):
            begin, then = self._training.state.discard_step, self._training.loaded
            return self._snapshots.restore(self._training, name, begin, then)

    def drop_snapshot(self, name: str) -> None:
        """Remove a snapshot; what only it has is free then. Nothing but this, ``keep`` and a
        snapshot of the same name ever removes one. Raises ``FileNotFoundError`` for a name that is
        not there.
        """
        self._begin("drop_snapshot()")
        self._check_alone("drop_snapshot()")
        self._snapshots.drop(self._training.state, checked_name(name))

    def _begin(self, call: str) -> None:
        check_not_amid(call)
        self._training.check_open()

    def _check_alone(self, what: str) -> None:
        world_size = self._training.rank_context.world_size
        if world_size > 1:
            raise RuntimeError(
                f"{what} is for one process, and the model is partitioned over {world_size} "
                "ranks; use offloaded.save(path) and offloaded.load(path)"
            )

    def export(self, folder: str | os.PathLike[str]) -> list[str]:
        """Write the weights as Hugging Face safetensors shards with an index; returns the paths.

        They are in the dtype that is computed with. With a ``compute_dtype`` of 16 bits the float32
        masters are in what ``save`` writes: offload a float32 model with ``optimizer=None`` and
        that as ``weights``, and export from there, for the masters.
        """
        check_place(folder, "folder")
        check_not_amid("export()")
        training = self._training
        training.check_unchanged()
        training.loans.check_unmodified("export()")
        export = partial(persistence.export, training, folder)
        return training.rank_context.meet_for(SAVE, training.steps, export, tells=False)

    def report(self, drive_endurance: int | str = DRIVE_ENDURANCE) -> Report:
        """Bytes per tier, traffic, stalls, overlap, peaks so far; ``print`` it for a table.

        ``drive_endurance``: bytes that each drive is rated for (its TBW).
        """
        self._begin("report()")
        training = self._training
        numbers = training.budget.host_bytes, max(training.steps), drive_endurance
        peak_bytes = training.rank_context.peak_host_bytes
        return make_report(training.state, training.activations, *numbers, peak_bytes)

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Write the recent timeline as JSON that Perfetto and chrome://tracing open."""
        self._begin("trace()")
        write_trace(self._training.state.timeline, path)


def training_of(offloaded: OffloadedModel) -> Training:
    """What is behind the handle, for our own modules."""
    return offloaded._training
