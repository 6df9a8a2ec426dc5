"""The halves of a master: what is nearest, what comes back, what stays NaN."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swap.kernels import merge_master, split_master
from swap.processors import available_isas, set_isa

EVERY_HI = torch.arange(1 << 16, dtype=torch.int64)
EDGES = (0x0000, 0x0001, 0x3FFF, 0x4000, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xBFFF, 0xFFFE, 0xFFFF)


@pytest.fixture(params=available_isas())
def each_isa(request: pytest.FixtureRequest) -> Iterator[str]:
    set_isa(request.param)
    yield request.param
    set_isa(None)


def _masters(bits: torch.Tensor) -> torch.Tensor:
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _split(master: torch.Tensor, threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    hi = torch.empty(master.numel(), dtype=torch.bfloat16)
    lo = torch.empty(master.numel(), dtype=torch.int16)
    split_master(master, hi, lo, threads=threads)
    return hi, lo


def _merged(hi: torch.Tensor, lo: torch.Tensor, threads: int = 1) -> torch.Tensor:
    out = torch.empty(hi.numel(), dtype=torch.float32)
    merge_master(hi, lo, out, threads=threads)
    return out


def _assert_split_holds(master: torch.Tensor) -> None:
    hi, lo = _split(master)
    back = _merged(hi, lo)
    bits, nan = master.view(torch.int32), master.isnan()
    assert torch.equal(back.view(torch.int32)[~nan], bits[~nan])
    assert torch.equal(back.isnan(), nan)
    assert torch.equal(hi.isnan(), nan)
    assert torch.equal(back.signbit()[nan], master.signbit()[nan])
    # Nearest, ties away from zero: a magnitude whose low half is 0x8000 or more goes up.
    nearest = ((bits.to(torch.int64) & 0xFFFFFFFF) + 0x8000) >> 16 & 0xFFFF
    assert torch.equal(hi.view(torch.int16).to(torch.int64)[~nan] & 0xFFFF, nearest[~nan])


@pytest.mark.parametrize("low", EDGES)
def test_split_of_every_high_pattern_comes_back_and_is_nearest(each_isa: str, low: int) -> None:
    _assert_split_holds(_masters((EVERY_HI << 16) + low))


def test_split_of_random_patterns_comes_back_and_is_nearest(each_isa: str) -> None:
    generator = torch.Generator().manual_seed(1)
    _assert_split_holds(_masters(torch.randint(0, 1 << 32, (1 << 20,), generator=generator)))


@given(st.lists(st.floats(width=32), max_size=70))
def test_split_of_any_floats_comes_back_and_is_nearest(values: list[float]) -> None:
    _assert_split_holds(torch.tensor(values, dtype=torch.float32))


def test_split_of_quiet_nans_keeps_their_bits() -> None:
    master = _masters(torch.tensor([0x7FC00000, 0xFFC00000, 0x7FC01234, 0xFFE0FFFF]))
    assert torch.equal(_merged(*_split(master)).view(torch.int32), master.view(torch.int32))


def test_split_of_nans_that_would_round_away_stays_nan() -> None:
    master = _masters(torch.tensor([0x7F800001, 0xFF807FFF, 0x7FFFFFFF, 0xFFFF8000]))
    hi, lo = _split(master)
    assert (hi.view(torch.int16).to(torch.int64) & 0xFFFF).tolist() == [
        0x7FC0,
        0xFFC0,
        0x7FC0,
        0xFFC0,
    ]
    assert lo.tolist() == [0, 0, 0, 0]


def test_split_of_the_largest_floats_gives_infinite_weights_and_finite_masters() -> None:
    master = torch.tensor([np.finfo(np.float32).max, np.finfo(np.float32).min])
    hi, lo = _split(master)
    assert hi.isinf().all()
    assert torch.equal(_merged(hi, lo), master)


@pytest.mark.parametrize("n", [0, 1, 15, 17, 4095, 4097, 100_003])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_halves_of_any_length_on_any_threads_come_back(n: int, threads: int) -> None:
    master = torch.randn(n, generator=torch.Generator().manual_seed(n))
    hi, lo = _split(master, threads)
    alone_hi, alone_lo = _split(master)
    assert torch.equal(hi, alone_hi)
    assert torch.equal(lo, alone_lo)
    assert torch.equal(_merged(hi, lo, threads), master)


@pytest.mark.parametrize("offset", [1, 3])
def test_split_and_merge_at_odd_addresses_touch_their_elements_only(offset: int) -> None:
    master = torch.randn(1000)
    hi = torch.full((1010,), 7.0, dtype=torch.bfloat16)
    lo = torch.full((1010,), 7, dtype=torch.int16)
    out = torch.full((1010,), 7.0)
    inner = slice(offset, offset + 990)
    split_master(master[5:995], hi[inner], lo[inner])
    merge_master(hi[inner], lo[inner], out[inner])
    assert torch.equal(out[inner], master[5:995])
    for around in (hi, lo, out):
        assert (around[:offset] == 7).all()
        assert (around[offset + 990 :] == 7).all()
