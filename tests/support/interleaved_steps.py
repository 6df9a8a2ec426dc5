"""A few steps of training over tiers, whose threads take turns by a seed, beside a plain twin.

Beside passes and steps there are saves behind them, which read everything while training goes on to
the next step; snapshots, which are looked at and restored later; and, with some seeds, transfers
that fail, after which the step is finished and the program goes on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch

from aio import AioError, Engine
from swap.device.visits import Pace
from swap.plan.layout import PIECE, pack
from swap.tiered import TieredState
from swap.update.stages import Step
from tests.support.interleaved_saves import Behind, Point, read_all
from tests.support.late_engine import Faults
from tests.support.simulated_device import SimulatedDevice
from tests.support.tiers import (
    RULE,
    Plain,
    assert_same,
    fill_both,
    placement_of,
    random_values,
    same_bits,
    specs_of,
)
from tests.support.turn_engine import TurnEngine
from tests.support.turns import Turns

ROOT = Path(__file__).parents[2]
WATCHED = tuple(f"{ROOT / 'swap' / part}" for part in ("update", "cache", "gradients", "storage"))
"""What threads do to one another goes through there."""
NUM = 4
_MOST = 3 * PIECE
_EIO = 5
T = TypeVar("T")


@dataclass(slots=True)
class Counts:
    """What a seed did. ``switches``: how often another thread went on than before."""

    switches: int = 0
    steps: int = 0
    saves: int = 0
    snapshots: int = 0
    restored: int = 0
    failed: int = 0

    def __iadd__(self, other: Counts) -> Counts:
        for name, number in other.as_numbers().items():
            setattr(self, name, getattr(self, name) + number)
        return self

    def as_numbers(self) -> dict[str, int]:
        return asdict(self)


def run_seed(seed: int, folder: Path) -> Counts:
    """Raises AssertionError where a bit differs, and DeadlockError where nobody can go on."""
    chance, counts, faults = random.Random(seed), Counts(), Faults()
    turns = Turns(seed, WATCHED)

    def engine(lanes: int, **_: Any) -> TurnEngine:
        return TurnEngine(lanes, files, seed=seed, faults=faults)

    with ExitStack() as stack:
        files = stack.enter_context(Engine("posix", queue_depth=4))
        stack.enter_context(patch("swap.storage.opening.Engine", engine))
        stack.enter_context(turns.applied())
        is_faulty = chance.random() < 0.4
        visits = random.Random(f"visits of {seed}")
        stack.enter_context(patch.object(Pace, "is_sooner_there", lambda *_: visits.random() < 0.5))
        state, plain = _both(chance, folder, seed, is_faulty=is_faulty)
        stack.callback(state.close)
        program = _Program(state, plain, chance, counts)
        program.count = 1000 * seed
        program.run(faults if is_faulty else None)
        counts.failed, counts.switches = faults.raised, turns.switches
        device: Any = state.compute
        if device is not None:
            device.check()
    return counts


def _both(
    chance: random.Random, folder: Path, seed: int, *, is_faulty: bool
) -> tuple[TieredState, Plain]:
    """Of gradients whose spill fails there is no other copy: none is spilled where that may be."""
    dtype = chance.choice((torch.float32, torch.bfloat16, torch.float16))
    sizes = [chance.choice((1, PIECE, chance.randrange(1, _MOST))) for _ in range(NUM)]
    specs = specs_of(sizes, dtype)
    device = SimulatedDevice(seed) if chance.random() < 0.5 else None
    room = chance.choice((1.0, 2.0, 10.0)) * max(s.padded_numel for s in specs) * dtype.itemsize
    arena_bytes = -(-int(room) // PIECE) * PIECE
    on_host = {number for number in range(2 * NUM) if chance.random() < 0.3}
    apart = random.Random(f"spares of {seed}")
    spared = {number for number in range(2 * NUM) if apart.random() < 0.7}
    placement = placement_of(
        pack(specs, 2 * PIECE),
        state_on_nvme=lambda unit: unit not in on_host,
        gradient_on_nvme=lambda group: not is_faulty and group + NUM not in on_host,
        arena_bytes=arena_bytes,
        spared=lambda group: group in spared,
        num_slots=chance.choice((1, 2, 4)),
        inbox_bytes=0 if device is None else 2 * _MOST * 4 // PIECE * PIECE,
        device_bytes=0 if device is None else arena_bytes,
    )
    state = TieredState(placement, RULE, [folder], device=device)
    plain = Plain(specs)
    fill_both(state, plain, seed)
    if chance.random() < 0.8:
        everything = range(NUM)
        state.speculation.expect_step = lambda: Step(
            updates=plain.updates(everything), gradient_scale=1.0
        )
    return state, plain


class _Program:
    """What one seed does to both."""

    def __init__(
        self, state: TieredState, plain: Plain, chance: random.Random, counts: Counts
    ) -> None:
        self.state, self.plain, self.chance, self.counts = state, plain, chance, counts
        self.count = 0
        self.points: list[Point] = []
        self.behind: Behind | None = None

    def run(self, faults: Faults | None) -> None:
        for _ in range(self.chance.choice((2, 3))):
            if faults is not None:
                kind: Any = self.chance.choice(("write", "write", "read", "any"))
                after, times = self.chance.randrange(40), self.chance.choice((1, 1, 3))
                faults.arm(kind, _EIO, after=after, times=times)
            self._step()
            self._between()
        if faults is not None:
            faults.disarm()
        self._end_save()
        self.again(self.state.flush)
        for point in self.points:
            point.check(self.state)
        assert_same(self.state, self.plain)

    def again(self, call: Callable[[], T]) -> T:
        """Until no transfer fails in it: a step that was stopped is finished first."""
        while True:
            try:
                return call()
            except AioError:
                self._finish()

    def _finish(self) -> None:
        while True:
            try:
                self.state.finish_step()
                return
            except AioError:
                continue

    def _step(self) -> None:
        if self.chance.random() < 0.4:
            self._begin_save()
        self._pass(range(NUM), trains=False)
        self._pass(reversed(range(NUM)), trains=True)
        if self.chance.random() < 0.2:  # more than the step that was expected
            self._pass([self.chance.randrange(NUM)], trains=True)
        scale = 0.5 if self.chance.random() < 0.2 else 1.0
        options = {"lr": 3e-3} if self.chance.random() < 0.2 else {}
        updates = self.plain.updates(sorted(self.plain.gradients), **options)
        self._end_save()
        self.again(lambda: self.state.step(updates, scale))
        self.plain.step(updates, scale)
        self.counts.steps += 1

    def _pass(self, parameters: Any, *, trains: bool) -> None:
        """Forward or backward: the weights of one layer after the other, and its gradient."""
        for parameter in parameters:
            holder = (self.count, parameter)
            (weight,) = self.again(partial(self.state.weights.acquire, [parameter], holder))
            assert same_bits(weight, self.plain.weight(parameter)), f"weight of p{parameter}"
            self.count += 1
            if trains:
                self._add_gradient(parameter)
                assert same_bits(weight, self.plain.weight(parameter)), "a weight in use"
            del weight  # there may be room for no other
            self.state.weights.release(holder)

    def _add_gradient(self, parameter: int) -> None:
        spec = self.plain.specs[parameter]
        gradient = random_values(self.count, spec.numel, spec.dtype)
        self.again(lambda: self.state.add_gradient(parameter, gradient))
        self.plain.add_gradient(parameter, gradient)

    # Saves behind training, from one step to the next.

    def _begin_save(self) -> None:
        self.again(self.state.finish_step)
        self.behind = Behind(self.state, self.plain)
        self.counts.saves += 1

    def _end_save(self) -> None:
        """As the guard of a save does before a step."""
        if self.behind is not None:
            self.behind.end()
            self.behind = None

    # Between steps.

    def _between(self) -> None:
        """What a program does beside training."""
        what = self.chance.randrange(8)
        parameter = self.chance.randrange(NUM)
        if what == 0:
            self.again(self.state.flush)
            self.again(lambda: read_all(self.state, self.plain))
        elif what == 1:
            self.again(self.state.flush)
            values = random_values(self.count, self.plain.specs[parameter].numel)
            self.again(lambda: self.state.write_values(parameter, 0, values))
            self.plain.write(parameter, 0, values)
        elif what == 2:
            self._pass([parameter], trains=True)
            self.state.clear_gradients()
            self.plain.gradients.clear()
        elif what in (3, 4):
            self.again(self.state.flush)
            self.points.append(self.again(lambda: Point(self.state, self.plain)))
            self.counts.snapshots += 1
        elif what == 5 and self.points:
            self.chance.choice(self.points).restore(self.state, self.plain)
            self.counts.restored += 1
        elif what == 6 and self.points:
            point = self.points.pop(self.chance.randrange(len(self.points)))
            self.again(lambda: point.check(self.state))
            point.drop(self.state)
