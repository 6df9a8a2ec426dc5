"""State at home on a device: the same bits for every split over the tiers, and all is ordered."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swap.device.interface import Stream
from swap.gradients.on_device import DeviceGradients
from swap.interruptions.mixture import MixedStateError
from swap.kernels import block_squares
from swap.plan.layout import PIECE, pack
from swap.tiered import TieredState
from swap.tiers import Tier
from tests.support.examples import examples
from tests.support.simulated_device import OrderError, SimulatedDevice, SimulatedEvent
from tests.support.tiers import (
    RULE,
    Plain,
    add_to_both,
    assert_same,
    fill_both,
    late_engines,
    placement_of,
    same_bits,
    specs_of,
    step_both,
)

SIZES = [PIECE + 5, 3, 2 * PIECE, 5 * PIECE + 1, PIECE]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@contextmanager
def _training(
    folder: Path, homes: list[Tier], dtype: torch.dtype, device: SimulatedDevice, **options: Any
) -> Iterator[tuple[TieredState, Plain]]:
    """A state with a home for each unit, and its twin."""
    specs = specs_of(SIZES, dtype, frozen=[2])
    layout = pack(specs, 2 * PIECE)
    placement = placement_of(
        layout,
        state_on_nvme=lambda unit: homes[unit % len(homes)] is Tier.NVME,
        gradient_on_nvme=lambda group: homes[group % len(homes)] is Tier.NVME,
        on_device=lambda unit: homes[unit % len(homes)] is Tier.DEVICE,
        arena_bytes=8 * PIECE * 4,
        inbox_bytes=8 * PIECE * 4,
        device_bytes=12 * PIECE * 4,
    )
    with late_engines(0):
        state = TieredState(placement, RULE, [folder], device=device, **options)
        try:
            plain = Plain(specs)
            fill_both(state, plain)
            yield state, plain
        finally:
            state.close()


def _train(state: TieredState, plain: Plain, steps: int, *, reads_norm: bool = True) -> None:
    trained = [spec.index for spec in plain.specs if spec.trainable]
    for step in range(steps):
        for parameter in range(len(plain.specs)):
            weight = state.weights.borrow(parameter)
            assert same_bits(weight, plain.weight(parameter))
        for times in range(1 + step % 2):
            for parameter in trained:
                add_to_both(state, plain, parameter, 100 * step + 10 * times + parameter)
        state.collect_gradients()
        if reads_norm:
            assert state.gradients.norm() == plain.norm()
            for parameter in trained:
                assert same_bits(state.gradients.read(parameter), plain.gradients[parameter])
                if state.gradients.is_on_device(parameter):
                    expected = block_squares(plain.gradients[parameter])
                    assert same_bits(state.gradients.block_squares(parameter), expected)
        step_both(state, plain, trained, 0.5)


@settings(max_examples=examples(40), deadline=None)
@given(
    homes=st.lists(st.sampled_from(list(Tier)), min_size=1, max_size=5),
    dtype=st.sampled_from(DTYPES),
    seed=st.one_of(st.none(), st.integers(0, 1 << 20)),
    overlap=st.booleans(),
)
def test_every_split_over_the_tiers_has_the_same_bits(
    homes: list[Tier],
    dtype: torch.dtype,
    seed: int | None,
    overlap: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder, device = tmp_path_factory.mktemp("nvme"), SimulatedDevice(seed)
    with _training(folder, homes, dtype, device, overlap=overlap) as (state, plain):
        _train(state, plain, 3)
        assert_same(state, plain)
    device.check()


class _Forgetful(SimulatedDevice):
    """One stream does not wait for another."""

    def __init__(self, waiting: Stream, awaited: Stream) -> None:
        super().__init__()
        self._pair = waiting, awaited

    def wait_for(self, stream: Stream, event: SimulatedEvent) -> None:
        if (stream, event.stream) != self._pair:
            super().wait_for(stream, event)


@pytest.mark.parametrize(
    ("waiting", "awaited"),
    [
        (Stream.UPDATE, Stream.COMPUTE),  # gradients, and weights that are computed with
        (Stream.COMPUTE, Stream.UPDATE),  # new weights
        (Stream.DOWN, Stream.UPDATE),  # values that are read
        (Stream.DOWN, Stream.COMPUTE),  # sums of squares
        (Stream.UP, Stream.COMPUTE),  # values that are written
    ],
    ids=str,
)
def test_order_that_is_not_asked_for_is_found(
    waiting: Stream, awaited: Stream, tmp_path: Path
) -> None:
    device = _Forgetful(waiting, awaited)

    def train() -> None:
        with _training(tmp_path, [Tier.DEVICE], torch.bfloat16, device) as (state, plain):
            _train(state, plain, 2, reads_norm=False)
            state.flush()
            state.weights.borrow(0)
            fill_both(state, plain, 1)
            _train(state, plain, 1)
            assert_same(state, plain)
        device.check()

    with pytest.raises((OrderError, MixedStateError)):  # the latter if a step was stopped by it
        train()
    assert device.errors


def test_gradient_that_another_thread_clears_as_its_norm_is_read_stays_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _training(tmp_path, [Tier.DEVICE], torch.float32, SimulatedDevice()) as (state, plain):
        _train(state, plain, 1)
        gradients = state.gradients
        for parameter in (0, 1, 3):
            add_to_both(state, plain, parameter, parameter)
        state.collect_gradients()
        sums = DeviceGradients.sums

        def beside(of_device: DeviceGradients) -> Any:
            found = sums(of_device)
            gradients.clear(3)
            return found

        monkeypatch.setattr(DeviceGradients, "sums", beside)
        assert gradients.norm() == plain.norm()
        assert gradients.present == {0, 1}
        del plain.gradients[3]
        assert gradients.norm() == plain.norm()
