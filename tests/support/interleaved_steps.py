"""A few steps of training over tiers, whose threads a seed interleaves, beside a plain twin."""

from __future__ import annotations

import random
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from swap.cache.device_arena import HostLink
from swap.plan.layout import PIECE, pack
from swap.tiered import TieredState
from swap.update.stages import Step
from tests.support.interleaved import Interleaving
from tests.support.late_link import LateLink
from tests.support.tiers import (
    RULE,
    Plain,
    add_to_both,
    assert_same,
    fill_both,
    late_engines,
    placement_of,
    random_values,
    same_bits,
    specs_of,
    step_both,
)

NUM = 6
_MOST = 3 * PIECE


def run_seed(seed: int, folder: Path) -> int:
    """Raises AssertionError where a bit differs; gives how often a thread was held back."""
    chance = random.Random(seed)
    interleaving = Interleaving(seed)
    with ExitStack() as stack:
        stack.enter_context(late_engines(seed))
        stack.enter_context(interleaving.applied())
        state, plain = _both(chance, folder, seed)
        stack.callback(state.close)
        _Steps(state, plain, chance, seed).run()
        assert_same(state, plain)
    return interleaving.held


def _both(chance: random.Random, folder: Path, seed: int) -> tuple[TieredState, Plain]:
    dtype = chance.choice((torch.float32, torch.bfloat16, torch.float16))
    sizes = [chance.choice((1, PIECE, chance.randrange(1, _MOST))) for _ in range(NUM)]
    specs = specs_of(sizes, dtype)
    link: Any = chance.choice((None, None, HostLink, LateLink))
    room = chance.choice((1.0, 2.0, 10.0)) * max(s.padded_numel for s in specs) * dtype.itemsize
    arena_bytes = -(-int(room) // PIECE) * PIECE
    on_host = {number for number in range(2 * NUM) if chance.random() < 0.3}
    placement = placement_of(
        pack(specs, 2 * PIECE),
        state_on_nvme=lambda unit: unit not in on_host,
        gradient_on_nvme=lambda group: group + NUM not in on_host,
        arena_bytes=arena_bytes,
        num_slots=chance.choice((1, 2, 4)),
        inbox_bytes=0 if link is None else 2 * _MOST * 4 // PIECE * PIECE,
    )
    options = {} if link is None else {"link": link(), "device_bytes": arena_bytes}
    state = TieredState(placement, RULE, [folder], **options)
    plain = Plain(specs)
    fill_both(state, plain, seed)
    if chance.random() < 0.8:
        everything = range(NUM)
        state.speculation.expect_step = lambda: Step(
            updates=plain.updates(everything), gradient_scale=1.0
        )
    return state, plain


class _Steps:
    def __init__(self, state: TieredState, plain: Plain, chance: random.Random, seed: int) -> None:
        self.state, self.plain, self.chance = state, plain, chance
        self.count = 1000 * seed

    def run(self) -> None:
        for _ in range(self.chance.choice((2, 3, 4))):
            self._pass(range(NUM), trains=False)
            self._pass(reversed(range(NUM)), trains=True)
            if self.chance.random() < 0.2:  # more than the step that was expected
                self._pass([self.chance.randrange(NUM)], trains=True)
            scale = 0.5 if self.chance.random() < 0.2 else 1.0
            options = {"lr": 3e-3} if self.chance.random() < 0.2 else {}
            trained = sorted(self.plain.gradients)
            step_both(self.state, self.plain, trained, scale, **options)
            self._between()

    def _pass(self, parameters: Any, *, trains: bool) -> None:
        """Forward or backward: the weights of one layer after the other, and its gradient."""
        for parameter in parameters:
            holder = (self.count, parameter)
            (weight,) = self.state.weights.acquire([parameter], holder)
            assert same_bits(weight, self.plain.weight(parameter)), f"weight of p{parameter}"
            self.count += 1
            if trains:
                add_to_both(self.state, self.plain, parameter, self.count)
                assert same_bits(weight, self.plain.weight(parameter)), "a weight in use"
            del weight  # there may be room for no other
            self.state.weights.release(holder)

    def _between(self) -> None:
        """What a program does beside training: saves, loads, and zeroed gradients."""
        what = self.chance.randrange(5)
        parameter = self.chance.randrange(NUM)
        if what == 0:
            assert_same(self.state, self.plain)
        elif what == 1:
            self.state.flush()
            values = random_values(self.count, self.plain.specs[parameter].numel)
            self.state.write_values(parameter, 0, values)
            self.plain.write(parameter, 0, values)
        elif what == 2:
            self._pass([parameter], trains=True)
            self.state.clear_gradients()
            self.plain.gradients.clear()
