"""There is no memory for a moment, on the threads that training waits for: what was to be done is
done when there is some, or is refused by name. Nothing waits for ever, and no value is of no step.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import infinity
from aio import AioError, Slab
from swap.cache.weight_cache import WeightCache
from swap.gradients.inbox import GradientInbox
from swap.gradients.store import GradientStore
from swap.interruptions.mixture import MixedStateError
from swap.interruptions.undo import Undo
from swap.plan.layout import PIECE, pack
from swap.update.passes import Pass
from swap.update.pipeline import UpdatePipeline
from swap.update.speculation import Speculation
from swap.update.stages import Job, Stages, Step
from tests.support.models import Stack, seeded, vector_loss
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import specs_of
from tests.support.training import least_budget, same_values, values_of

STEP = Step(updates={}, gradient_scale=1.0)


@contextmanager
def short(owner: type, name: str, *, calls: int = 1, first: int = 0) -> Iterator[None]:
    """So many calls of a method find no memory, from the one of this number on."""
    method, numbers = getattr(owner, name), iter(range(first + calls))

    def called(*args: Any, **kwargs: Any) -> Any:
        if next(numbers, -1) >= first:
            raise MemoryError
        return method(*args, **kwargs)

    with patch.object(owner, name, called):
        yield


@contextmanager
def first_step(folder: Path) -> Iterator[tuple[Stack, infinity.OffloadedModel]]:
    """A model whose first step is to be taken. What was saved before that is loaded in the end, and
    trains from there as if nothing had lacked.
    """
    model = seeded(Stack)
    budget = least_budget(lambda: seeded(Stack), folder)
    with infinity.offload(model, folder, host_memory=budget) as offloaded:
        offloaded.save(folder / "saved")
        vector_loss(model, 0).backward()
        yield model, offloaded
        offloaded.load(folder / "saved")
        vector_loss(model, 0).backward()
        offloaded.step()
    expected = seeded(Stack)
    with infinity.offload(expected, folder, host_memory=budget) as offloaded:
        vector_loss(expected, 0).backward()
        offloaded.step()
    assert same_values(values_of(model), values_of(expected))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("owner", "name", "first"),
    [
        (GradientStore, "capture", 0),
        (Speculation, "validate", 0),
        (UpdatePipeline, "submit", 0),
        (UpdatePipeline, "_add", 0),
        (UpdatePipeline, "_begin", 0),
        (WeightCache, "begin_update", 0),
        (WeightCache, "begin_update", 1),
        (Speculation, "end", 0),
    ],
)
def test_a_step_that_had_no_memory_in_its_midst_is_refused_from_then_on(
    owner: type, name: str, first: int, tmp_path: Path
) -> None:
    with first_step(tmp_path) as (model, offloaded):
        with short(owner, name, first=first), pytest.raises(MixedStateError):
            offloaded.step()
        with pytest.raises(MixedStateError):
            vector_loss(model, 1)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("name", "calls"), [("_next_pass", 3), ("_stop", 2), ("_pass", 1), ("_wait_for_work", 1)]
)
def test_the_thread_of_the_update_goes_on_where_there_was_no_memory(
    name: str, calls: int, tmp_path: Path
) -> None:
    with (
        first_step(tmp_path) as (_, offloaded),
        short(UpdatePipeline, name, calls=calls),
        ExitStack() as stack,
    ):
        if name in ("_stop", "_pass", "_wait_for_work"):
            stack.enter_context(pytest.raises(MixedStateError))
        if name == "_stop":
            stack.enter_context(short(Stages, "start_write"))
        offloaded.step()
        offloaded.flush()


class Failing:
    """Stages whose first job is published, and then says that a device failed."""

    def __init__(self) -> None:
        self.abandoned: list[int] = []

    def publish(self, job: Job) -> None:
        job.is_published = job.subgroup.index == 0
        raise RuntimeError("the device is gone")

    def abandon(self, job: Job) -> None:
        if not self.abandoned:
            self.abandoned.append(-1)
            raise MemoryError
        self.abandoned.append(job.subgroup.index)


def test_what_is_published_is_not_left_to_be_updated_again() -> None:
    stages: Any = Failing()
    groups = list(pack(specs_of([PIECE] * 3), PIECE).subgroups)
    work = Pass(STEP, is_validated=True, is_complete=True)
    work.writing.extend(Job(group, step=STEP) for group in groups[:2])
    work.ahead.append(groups[2])
    with pytest.raises(MemoryError):
        work.bring_home(stages)
    assert [group.index for group in work.bring_home(stages)] == [1, 2]
    assert stages.abandoned == [-1, 1]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["_wait_for_one", "_start_pieces", "_wait_for_batch"])
def test_gradients_arrive_where_there_was_no_memory(name: str) -> None:
    stored: list[int] = []
    with short(GradientInbox, name, calls=2, first=1):
        add_some(lambda parameter, *_, **__: stored.append(parameter), lambda *_: None)
    assert stored == [0] * 5 + [1] * 5


@pytest.mark.timeout(60)
@pytest.mark.parametrize("failing", ["store", "start"])
def test_a_gradient_is_lost_by_name_where_there_is_no_memory_to_tell_of_it(failing: str) -> None:
    stored: list[tuple[int, int]] = []
    lost: list[int] = []
    tries = iter(range(3))

    def store(parameter: int, start: int, *_: Any, **__: Any) -> None:
        stored.append((parameter, start))
        if failing == "store" and len(stored) == 2:
            raise AioError("of the disk", errno=errno.EIO)

    def lose(parameter: int, failure: BaseException) -> None:
        if next(tries, None) is not None:
            raise MemoryError
        lost.append(parameter)

    is_short = short(GradientInbox, "_slab_range", first=1 if failing == "start" else 1 << 30)
    with is_short:
        add_some(store, lose)
    assert lost == [0]
    assert [start for parameter, start in stored if parameter == 1] == [
        number * PIECE for number in range(5)
    ]
    assert len(stored) == len(set(stored))
    assert len([1 for parameter, _ in stored if parameter == 0]) <= 2


def add_some(store: Any, lose: Any) -> None:
    """Two gradients of five pieces each."""
    device = SimulatedDevice()
    with Slab(4 * PIECE * 4) as slab:
        device.register(slab)
        inbox = GradientInbox(device, slab, store, lose, Undo())
        for parameter in range(2):
            inbox.add(parameter, torch.zeros(5 * PIECE))
        inbox.wait()
        inbox.close()
