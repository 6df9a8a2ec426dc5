"""Whole steps over tiers: what has to come out the same, and what must never happen."""

import errno
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from aio import AioError
from swap.interruptions.mixture import MixedStateError, Scope
from swap.plan.layout import PIECE, pack
from swap.plan.placement import place
from swap.tiered import TieredState
from swap.tiers import Budget, BudgetError
from swap.update.stages import Step
from tests.support.late_engine import Faults
from tests.support.tiers import (
    RULE,
    Leftovers,
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

MIXED = (3 * PIECE + 5, 0, 1, 2, PIECE, PIECE - 1, 9 * PIECE, 100, 2 * PIECE + 1)
Make = Callable[..., tuple[TieredState, Plain]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Tiered states with all or, by ``state_on_nvme`` and so on, some of their bytes on NVMe."""
    with ExitStack() as stack:

        def make_state(
            sizes: Any = MIXED,
            *,
            dtype: torch.dtype = torch.float32,
            frozen: Any = (),
            always_on_host: Any = (),
            seed: int | None = 0,
            faults: Faults | None = None,
            num_directories: int = 1,
            overlap: bool = True,
            speculative: bool = False,
            **homes: Any,
        ) -> tuple[TieredState, Plain]:
            if seed is not None:
                stack.enter_context(late_engines(seed, faults))
            specs = specs_of(sizes, dtype, frozen=frozen, always_on_host=always_on_host)
            largest = max(spec.padded_numel for spec in specs) * dtype.itemsize
            homes.setdefault("arena_bytes", 2 * largest)
            folders = [tmp_path / f"ssd{number}" for number in range(num_directories)]
            for folder in folders:
                folder.mkdir(exist_ok=True)
            placement = placement_of(pack(specs, 2 * PIECE), **homes)
            state = TieredState(placement, RULE, folders, overlap=overlap)
            stack.callback(state.close)
            plain = Plain(specs)
            fill_both(state, plain)
            if speculative:
                trained = [spec.index for spec in specs if spec.trainable]
                state.speculation.expect_step = lambda: Step(
                    updates=plain.updates(trained), gradient_scale=1.0
                )
            return state, plain

        yield make_state


def train(state: TieredState, plain: Plain, steps: int = 3) -> None:
    """Forward, backward and step; weights are compared whenever they are used."""
    order = [spec.index for spec in plain.specs]
    seeds = itertools.count()
    for _ in range(steps):
        for parameter in (*order, *reversed(order)):
            weight = state.weights.acquire([parameter], "test")[0]
            assert same_bits(weight, plain.weight(parameter))
            state.weights.release("test")
            del weight
        trained = [index for index in order if plain.specs[index].trainable]
        for parameter in reversed(trained):
            add_to_both(state, plain, parameter, next(seeds))
        assert state.gradients.norm() == plain.norm()
        step_both(state, plain, trained)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("speculative", [True, False])
def test_training_on_nvme_is_bit_identical_to_training_in_memory(
    make: Make, dtype: torch.dtype, overlap: bool, speculative: bool
) -> None:
    state, plain = make(dtype=dtype, overlap=overlap, speculative=speculative, num_directories=2)
    train(state, plain, steps=4)
    assert_same(state, plain)


@pytest.mark.parametrize("always_on_host", [(), (2,), (1, 2, 3, 7)])
@pytest.mark.parametrize("frozen", [(), (0, 7), tuple(range(len(MIXED)))])
def test_frozen_empty_and_tiny_parameters_are_like_others(
    make: Make, always_on_host: tuple[int, ...], frozen: tuple[int, ...]
) -> None:
    state, plain = make(always_on_host=always_on_host, frozen=frozen)
    train(state, plain)
    assert_same(state, plain)


def test_parameters_without_gradient_keep_all_their_state(make: Make) -> None:
    state, plain = make()
    for step, subset in enumerate([(0, 3, 4), (6,), (3,), (1, 2, 5), (0, 1, 2, 3, 4, 5, 6, 7, 8)]):
        for parameter in subset:
            add_to_both(state, plain, parameter, seed=10 * step + parameter)
        step_both(state, plain, subset)
        assert_same(state, plain)
    assert plain.steps == [2, 2, 2, 3, 2, 2, 2, 1, 1]


def test_each_parameter_has_its_own_options(make: Make) -> None:
    state, plain = make()
    for parameter in (0, 4, 6):
        add_to_both(state, plain, parameter, seed=parameter)
    updates = plain.updates([0, 6], lr=0.5) | plain.updates([4], betas=(0.5, 0.5), decoupled=False)
    state.step(updates, 0.125)
    plain.step(updates, 0.125)
    assert_same(state, plain)


def test_step_without_gradients_changes_nothing(make: Make) -> None:
    state, plain = make()
    step_both(state, plain, [])
    assert_same(state, plain)


@pytest.mark.parametrize("always_on_host", [(), (0,)])
def test_options_that_cannot_be_are_refused_before_anything_is_changed(
    make: Make, always_on_host: tuple[int, ...]
) -> None:
    state, plain = make((100, PIECE, 3 * PIECE), always_on_host=always_on_host)
    for parameter in range(3):
        add_to_both(state, plain, parameter, seed=parameter)
    with pytest.raises(ValueError, match="lr"):
        state.step(plain.updates([0, 1, 2], lr=-1.0), 1.0)
    assert state.gradients.norm() == plain.norm()
    step_both(state, plain, [0, 1, 2])
    assert_same(state, plain)


@pytest.mark.timeout(60)
def test_update_that_raises_in_memory_leaves_nobody_waiting(make: Make) -> None:
    state, plain = make((100, 100, PIECE), always_on_host=(0, 1))
    for parameter in range(2):
        add_to_both(state, plain, parameter, seed=parameter)
    with (
        patch.object(RULE, "apply", side_effect=RuntimeError("broken rule")),
        pytest.raises(RuntimeError, match="broken rule"),
    ):
        state.step(plain.updates([0, 1]), 1.0)
    plain.gradients.clear()
    with pytest.raises(MixedStateError, match="broken rule"):
        state.weights.borrow(0)
    everything = frozenset(range(3))
    with state.mixture.changing("replacing all") as change:
        change.begin(Scope(values=everything, state=everything))
        state.discard_step()  # and what the rule has not changed is what it is replaced by
    assert same_bits(state.weights.borrow(0), plain.weight(0))
    add_to_both(state, plain, 1, seed=9)
    step_both(state, plain, [1])
    assert_same(state, plain)


@pytest.mark.timeout(60)
def test_update_that_raises_in_the_background_is_raised_and_never_waited_for(make: Make) -> None:
    """What is no I/O error may have left arrays half updated; that stays an error."""
    state, plain = make((PIECE, PIECE))
    add_to_both(state, plain, 0, seed=1)
    with patch.object(RULE, "apply", side_effect=RuntimeError("broken rule")):
        state.step(plain.updates([0]), 1.0)
        for call in (state.flush, lambda: state.step({}, 1.0), lambda: state.weights.borrow(0)):
            with pytest.raises(RuntimeError, match="broken rule"):
                call()


@pytest.mark.timeout(60)
def test_mistake_of_ours_while_cleaning_up_is_no_hang(make: Make) -> None:
    state, plain = make((PIECE, PIECE))
    add_to_both(state, plain, 0, seed=1)
    with (
        patch.object(RULE, "apply", side_effect=RuntimeError("broken rule")),
        patch.object(state.stages, "abandon", side_effect=AssertionError("broken twice")),
        patch("threading.excepthook"),
    ):
        state.step(plain.updates([0]), 1.0)
        with pytest.raises(RuntimeError, match="broken rule"):
            state.flush()
        with pytest.raises(RuntimeError, match="broken rule"):
            state.weights.borrow(0)


def test_several_threads_may_fetch_while_an_update_is_under_way(make: Make) -> None:
    state, plain = make((PIECE,) * 6, arena_bytes=7 * PIECE * 4, seed=None)
    failures: list[BaseException] = []

    def fetch(parameters: list[int]) -> None:
        try:
            for parameter in parameters:
                weight = state.weights.acquire([parameter], "test")[0]
                assert same_bits(weight, plain.weight(parameter))
                state.weights.release("test")
        except BaseException as failure:
            failures.append(failure)

    for round_ in range(10):
        for parameter in range(6):
            add_to_both(state, plain, parameter, seed=10 * round_ + parameter)
        step_both(state, plain, range(6))
        threads = [
            threading.Thread(target=fetch, args=([(first + k) % 6 for k in range(6)],))
            for first in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    assert_same(state, plain)


def test_whatever_the_budget_the_bits_are_the_same(tmp_path: Path) -> None:
    """Placements by the planner itself, from the least budget to everything in memory."""
    specs = specs_of([300_000, 3000, 140_000, 180_000, 200], torch.bfloat16, always_on_host=(1, 4))
    arena = 2 * max(spec.padded_numel for spec in specs) * 2
    with pytest.raises(BudgetError) as caught:
        place(specs, RULE, Budget(host_bytes=1), least_arena_bytes=arena)
    least = caught.value.least_host_bytes
    outcomes = []
    for budget in (least, least + 500_000, least + 1_500_000, least + 100_000_000):
        placement = place(specs, RULE, Budget(host_bytes=budget), least_arena_bytes=arena)
        state, plain = TieredState(placement, RULE, [tmp_path]), Plain(specs)
        fill_both(state, plain)
        train(state, plain)
        assert_same(state, plain)
        assert state.peak_host_bytes + placement.checkpoint_bytes <= budget
        state.close()
        outcomes.append(placement.nvme_bytes)
    assert outcomes == sorted(outcomes, reverse=True)
    assert outcomes[0] > outcomes[-1] == 0
    assert list(tmp_path.iterdir()) == []


def test_values_go_in_and_out_in_every_dtype(make: Make) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        state, _ = make((PIECE + 5,), dtype=dtype)
        for given in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
            values = random_values(1, PIECE + 5, given)
            state.fill(0, values.view(1, -1))
            out = torch.empty(PIECE + 5, dtype=given)
            state.read_all(0, out)
            kept = values.to(torch.float32).to(given)
            assert same_bits(out, kept)


def test_filling_shows_in_weights_that_were_in_use_before(make: Make) -> None:
    state, plain = make((PIECE, PIECE))
    assert same_bits(state.weights.borrow(0), plain.weight(0))
    fill_both(state, plain, seed=7)
    assert same_bits(state.weights.borrow(0), plain.weight(0))


def test_closing_in_mid_step_leaves_nothing(make: Make, tmp_path: Path) -> None:
    before = None
    for seed in (0, None):
        state, plain = make((PIECE,) * 8, seed=seed)
        for parameter in range(8):
            add_to_both(state, plain, parameter, seed=parameter)
        step_both(state, plain, range(8))
        state.close()
        state.close()
        after = Leftovers.of(tmp_path)
        assert before is None or after == before
        before = after
    assert list(tmp_path.glob("ssd*/*")) == []


@pytest.mark.parametrize("failing", ["allocate", "open", "slab", "thread"])
def test_construction_that_fails_leaves_nothing(tmp_path: Path, failing: str) -> None:
    specs = specs_of([PIECE] * 4)
    placement = placement_of(pack(specs, PIECE), arena_bytes=4 * PIECE * 4)
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    before = Leftovers.of(tmp_path)
    faults = Faults()
    with ExitStack() as stack:
        stack.enter_context(late_engines(0, faults))
        expected: type[BaseException] = AioError
        if failing == "allocate":
            faults.arm("allocate", errno.EIO, after=1)
        elif failing == "open":
            folders[1].rmdir()
            folders[1].touch()
            before = Leftovers.of(tmp_path)
            expected = NotADirectoryError
        elif failing == "slab":
            stack.enter_context(
                patch("swap.memory.slabs.Slab", side_effect=MemoryError("no memory"))
            )
            expected = MemoryError
        else:
            no_threads = RuntimeError("no threads")
            stack.enter_context(patch("swap.tiered.UpdatePipeline", side_effect=no_threads))
            expected = RuntimeError
        with pytest.raises(expected):
            TieredState(placement, RULE, folders)
    assert Leftovers.of(tmp_path) == before
