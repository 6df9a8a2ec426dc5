"""What a process of a program does; it says all of it to the one that watches, a line for each."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from failures.interposed import Interposer
from torch import nn

import infinity
from aio.buffers import Slab
from infinity.block import OffloadBlock
from soaking.memory import train_in_memory
from soaking.models import digest_of, make
from soaking.offloaded import (
    Faults,
    LostError,
    Offloaded,
    Place,
    Tell,
    host_memory_of,
    options_of,
    train_step,
    until_it_works,
)
from soaking.programs import Block, Life, Task, life_of
from tests.support.interrupts import Remains

_PATIENCE_SECONDS = 60.0


class StoppedError(Exception):
    """What a program raises out of a block."""


def undisturbed(task: Task, place: Place, tell: Tell) -> None:
    """What all lives have to come to."""
    if task.max_parameter_bytes is None:
        tell("undisturbed", train_in_memory(task))
        return
    seen: list[list[str]] = []
    model, steps = make(task), len(task.steps)
    block = replace(life_of(task, 1 << 30).blocks[0], room=1.0)
    with _entered(task, block, model, place) as offloaded:
        trainee = Offloaded(task, offloaded)
        trainee.resume(None)
        weights = [trainee.digest()]
        for number in range(steps):
            seen.append(train_step(trainee, number, Faults((), None, place.top)))
            weights.append(trainee.digest())
    tell("undisturbed", {"seen": seen, "weights": weights, "values": digest_of(model)})


def live(task: Task, life: Life, place: Place, tell: Tell) -> None:
    """One life of a program."""
    interposer = Interposer(place.top) if life.is_disturbed else None
    if interposer is not None and life.kill is not None:
        interposer.arm_kill(life.kill)
    model = make(task)
    before: tuple[Any, ...] = ()
    for block in life.blocks:
        if not life.is_same_model:
            model = make(task)
        elif not place.has_durable():
            model.load_state_dict(make(task).state_dict())
        faults = Faults(block.faults, interposer, place.top)
        try:
            _live_block(task, block, model, place, faults, tell)
        except LostError:
            tell("lost")
        tell("failed", faults.num_failed)
        remains = _remains()
        if before and remains != before:
            tell("wrong", f"left behind: {remains}, not {before}")
        before = remains
    tell("ended")


def _remains() -> tuple[Any, ...]:
    """Descriptors, threads and memory."""
    found = Remains.of()
    slabs = sum(1 for one in gc.get_objects() if type(one) is Slab and not one._closed)
    return found.leftovers.descriptors, found.threads, slabs


def _entered(task: Task, block: Block, model: nn.Module, place: Place) -> OffloadBlock:
    options = options_of(task, block)
    host_memory = host_memory_of(partial(make, task), place.nvme, block, task)
    return infinity.offload(model, place.nvme, host_memory=host_memory, **options)


def _live_block(
    task: Task, block: Block, model: nn.Module, place: Place, faults: Faults, tell: Tell
) -> None:
    entered: list[tuple[OffloadBlock, infinity.OffloadedModel]] = []

    def enter() -> None:
        made = _entered(task, block, model, place)
        entered.append((made, made.__enter__()))

    before = digest_of(model)
    if faults.stopped("enter", 0, enter):
        if digest_of(model) != before:
            tell("wrong", "a block that was not entered has changed its model")
        enter()
    (made, offloaded) = entered[-1]
    error: BaseException | None = None
    reached = -1
    try:
        reached = _train(task, block, offloaded, place, faults, tell)
        if block.end == "raise":
            raise StoppedError
    except (StoppedError, LostError) as stop:
        error = stop
    except BaseException as wrong:
        made.__exit__(type(wrong), wrong, wrong.__traceback__)
        raise

    def leave() -> None:
        made.__exit__(type(error) if error else None, error, None)

    if isinstance(error, LostError):
        with suppress(infinity.MixedStateError):  # which the end of the block tells once more
            leave()
        raise error
    faults.stopped("exit", 0, leave)
    tell("left", reached, digest_of(model))


def _train(
    task: Task,
    block: Block,
    offloaded: infinity.OffloadedModel,
    place: Place,
    faults: Faults,
    tell: Tell,
) -> int:
    """Steps of a block, from what is durable on; gives how many were taken in all."""
    trainee = Offloaded(task, offloaded)
    step = _resumed(trainee, place, faults)
    tell("resumed", step, trainee.digest())
    pending: list[tuple[int, Any]] = []
    for number in range(step, min(step + block.num_steps, len(task.steps))):
        faulthandler.dump_traceback_later(_PATIENCE_SECONDS, exit=True)
        tell("step", number, train_step(trainee, number, faults))
        _reap(pending, tell)
        if block.looks[number]:
            tell("looked", number + 1, trainee.digest())
        keep = partial(_keep, trainee, block, number, place, pending)
        is_stopped = faults.stopped("durable", number, keep)
        if faults.has_failed:
            until_it_works(offloaded.flush)
        if not (is_stopped or pending or block.durable[number] == "nothing"):
            tell("durable", number + 1)
        step = number + 1
    _reap(pending, tell)
    faulthandler.cancel_dump_traceback_later()
    return step


def _resumed(trainee: Offloaded, place: Place, faults: Faults) -> int:
    step, bring_back = trainee.newest(place)
    resume = partial(trainee.resume, bring_back)
    if faults.stopped("resume", 0, resume):
        resume()
    return step


def _keep(
    trainee: Offloaded, block: Block, number: int, place: Place, pending: list[tuple[int, Any]]
) -> None:
    how, step = block.durable[number], number + 1
    if how in ("snapshot", "both"):
        point = trainee.offloaded.snapshot(f"step-{step}", block.keep, extra=trainee.extra(step))
        if how == "both":
            trainee.offloaded.save(place.saves, snapshot=point.name)
    elif how != "nothing":
        done = trainee.offloaded.save(place.saves, block=how == "save", extra=trainee.extra(step))
        if how == "save behind":
            pending.append((step, done))


def _reap(pending: list[tuple[int, Any]], tell: Tell) -> None:
    while pending:
        step, save = pending.pop()
        try:
            save.result()
        except OSError:
            continue
        tell("durable", step)


def tidy(task: Task, place: Place, tell: Tell) -> None:
    """Remove what is durable, as a user does; nothing may be left of all lives."""
    block = life_of(task, 1 << 30).blocks[0]
    with _entered(task, block, make(task), place) as offloaded:
        for one in offloaded.snapshots():
            offloaded.drop_snapshot(one.name)
        offloaded.save(place.saves, extra={"step": 0})
    left = [os.fspath(path) for folder in place.nvme for path in folder.rglob("*")]
    if len(list(place.saves.iterdir())) != 2:
        left += [os.fspath(path) for path in place.saves.iterdir()]
    left += [os.fspath(path) for path in place.saves.parent.iterdir() if path != place.saves]
    if left:
        tell("wrong", f"left behind: {left}")


def told_to(descriptor: int) -> Tell:
    """What a life says goes out at once: what was said before a kill has arrived."""

    def tell(*what: Any) -> None:
        os.write(descriptor, json.dumps(what).encode() + b"\n")

    return tell
