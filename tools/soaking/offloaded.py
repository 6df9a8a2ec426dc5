"""A task in an offload block: trained, brought back, repeated where an error stopped it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import torch
from failures.attempts import unnamed
from failures.interposed import KINDS, Interposer
from torch import nn

import checkpoint
import infinity
from soaking.models import DTYPES, FACTORIES, LR, STATE_DTYPES, digest_of, factor
from soaking.programs import Block, Fault, Task
from soaking.training import SEED, after, fill_row, passes
from tests.support.training import WHOLE, least_budget

_MAX_TRIES = 6
_MIDDLE_BYTES = 6 << 20
"""Of state that the models have, about: what lies between the least budget and all."""
Tell = Callable[..., None]


class LostError(Exception):
    """What the run has can not be gone on with, and said so by name: the next life begins with what
    is durable.
    """


@dataclass(slots=True)
class Place:
    """Where a program lives: directories for its state, and one for its checkpoints."""

    top: Path
    nvme: list[Path] = field(default_factory=list)

    @classmethod
    def make(cls, top: Path, num_directories: int) -> Place:
        place = cls(top, [top / f"nvme{number}" for number in range(num_directories)])
        for folder in (*place.nvme, place.saves.parent):
            folder.mkdir()
        return place

    @property
    def saves(self) -> Path:
        return self.top / "saved" / "last"

    def has_durable(self) -> bool:
        """Whether there may be something to go on from."""
        points = self.nvme[0].glob(".infinity/snapshots-*/*/points/*")
        return self.saved_step() > 0 or any(points)

    def saved_step(self) -> int:
        """Of the checkpoint; 0 if there is none."""
        try:
            found = checkpoint.load(self.saves, only=["extra.*"])["extra"]["value"]
        except (FileNotFoundError, checkpoint.IncompleteCheckpointError):
            return 0
        return int(found["step"])


def options_of(task: Task, block: Block) -> dict[str, Any]:
    """What `offload` is given, but for the budget."""
    optimizer: Any = FACTORIES.get(task.optimizer)
    if task.optimizer in STATE_DTYPES:
        optimizer = infinity.AdamW(lr=LR, state_dtype=STATE_DTYPES[task.optimizer])
    return {
        "optimizer": optimizer,
        "compute_dtype": DTYPES[task.dtype],
        "max_grad_norm": task.max_grad_norm,
        "max_parameter_bytes": task.max_parameter_bytes,
        "activations": block.activations,
        "overlap": block.overlap,
        "verify_swap": block.verifies,
    }


def host_memory_of(
    model: Callable[[], nn.Module], nvme: list[Path], block: Block, task: Task
) -> int:
    if block.room == 1.0:
        return WHOLE
    least = least_budget(model, nvme, **options_of(task, block))
    return least + int(block.room * _MIDDLE_BYTES)


class Offloaded:
    """A trainee in its block, which goes on from where it is."""

    def __init__(self, task: Task, offloaded: infinity.OffloadedModel) -> None:
        self.task, self.offloaded = task, offloaded
        self.model = offloaded.model
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(offloaded.optimizer, factor)

    def backward(self, loss: torch.Tensor) -> None:
        self.offloaded.backward(loss)

    def clear(self) -> None:
        self.offloaded.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        self.offloaded.clip_grad_norm_(max_norm)

    def step(self) -> None:
        self.offloaded.step()

    def schedule(self) -> None:
        self.scheduler.step()

    def change_row(self, parameter: nn.Parameter) -> None:
        with self.offloaded.gathered([parameter], modify=True):
            fill_row(parameter)

    @property
    def taken(self) -> int:
        """Steps that were begun, finished or not."""
        return max(self.offloaded._training.steps)

    def digest(self) -> str:
        with self.offloaded.gathered():
            return digest_of(self.model)

    def extra(self, step: int) -> dict[str, Any]:
        return {"step": step, "scheduler": self.scheduler.state_dict()}

    def newest(self, place: Place) -> tuple[int, Callable[[], Any] | None]:
        """The newest step that is durable, and what brings it back; 0 if there is none."""
        saved = place.saved_step()
        points = {one.step: one.name for one in self.offloaded.snapshots()}
        step = max([saved, *points])
        if step in points:
            return step, partial(self.offloaded.restore, points[step])
        return step, partial(self.offloaded.load, place.saves) if step else None

    def resume(self, bring_back: Callable[[], Any] | None) -> None:
        """Go on from there, from the beginning if that is nothing."""
        if bring_back is None:
            torch.manual_seed(SEED)
        else:
            self.scheduler.load_state_dict(bring_back()["scheduler"])


class Faults:
    """Makes calls of the C library fail in the stages that a block has a fault for, and says what
    did not hold.
    """

    def __init__(self, faults: tuple[Fault, ...], interposer: Interposer | None, root: Path):
        self._faults, self._interposer, self._root = list(faults), interposer, root
        self.num_failed = 0
        self.has_failed = False
        """Whether the stage that was taken last had a fault."""
        self._unsynced: set[str] = set()
        """Files that are not synced again: the kernel tells once that it has lost pages."""

    def stopped(self, place: str, step: int, action: Callable[[], object]) -> bool:
        """Take `action`; whether a fault that was put there has stopped it. Raises what did not
        hold.
        """
        self.has_failed = False
        fault = next((f for f in self._faults if (f.place, f.step) == (place, step)), None)
        if fault is None and place in ("enter", "resume", "exit"):
            fault = next((f for f in self._faults if f.place == place), None)
        if fault is None or self._interposer is None:
            try:
                action()
            except OSError as told:
                if not self._was_told(told):
                    raise
                return True
            return False
        self._faults.remove(fault)
        self.has_failed = True
        kind = KINDS[fault.kind]
        outcome = self._interposer.attempt(action, kind, fault.number)
        self.has_failed = bool(outcome.failed)
        self.num_failed += self.has_failed
        error = outcome.error
        if error is None:
            return False
        if self._was_told(error):
            return True
        if isinstance(error, AssertionError) or not outcome.failed:
            raise error
        is_mixed = isinstance(error, infinity.MixedStateError)
        if not is_mixed and (wrong := unnamed(error, kind, self._root)):
            raise AssertionError(f"{fault}, {outcome.failed}: {'; '.join(wrong)}") from error
        if isinstance(error, infinity.RestoreError):
            error.retry()
        elif _is_sync(error):
            self._unsynced.add(error.filename)
        return True

    def _was_told(self, error: BaseException) -> bool:
        return _is_sync(error) and error.filename in self._unsynced


def until_it_works(action: Callable[[], object]) -> None:
    """On disks that work again. Raises `LostError` where a load has to come first."""
    for _ in range(_MAX_TRIES):
        try:
            action()
        except infinity.MixedStateError as error:
            raise LostError from error
        except OSError:
            continue
        else:
            return
    action()


def train_step(trainee: Offloaded, number: int, faults: Faults) -> list[str]:
    """Step `number`; one that was stopped is finished, or taken from its beginning."""
    random, buffers = torch.get_rng_state(), [b.clone() for b in trainee.model.buffers()]
    before = trainee.taken
    seen: list[str] = []

    def go() -> None:
        seen[:] = passes(trainee, trainee.task, number)
        trainee.step()

    if faults.stopped("step", number, go):
        if trainee.taken == before:
            until_it_works(partial(_begin_again, trainee, random, buffers))
            go()
        trainee.clear()
    if faults.has_failed:  # in the update, which goes on behind the step
        until_it_works(trainee.offloaded.flush)
    trainee.schedule()
    until_it_works(partial(after, trainee, trainee.task, number))
    return seen


def _begin_again(trainee: Offloaded, random: torch.Tensor, buffers: list[torch.Tensor]) -> None:
    trainee.clear()
    trainee.model.train()
    trainee.offloaded.flush()
    torch.set_rng_state(random)
    for buffer, value in zip(trainee.model.buffers(), buffers, strict=True):
        buffer.copy_(value)


def _is_sync(error: BaseException) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and str(error).startswith("cannot sync ")
