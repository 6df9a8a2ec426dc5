"""The sum of squares: its order is fixed, so that pieces, threads and processors do not matter."""

import math
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swap.kernels import BLOCK, block_squares, sum_of_squares
from swap.processors import available_isas, set_isa

LANES = 32
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fastest_isa_again() -> Iterator[None]:
    yield
    set_isa(None)


def _values(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)


def _in_the_stated_order(values: torch.Tensor, carry: float) -> float:
    """The contract in slow motion: lanes of a block, halves of the lanes, blocks."""
    total = carry
    for block in values.double().square().split(BLOCK):
        padded = np.zeros(-(-block.numel() // LANES) * LANES)
        padded[: block.numel()] = block.numpy()
        lanes = np.zeros(LANES)
        for row in padded.reshape(-1, LANES):
            lanes += row
        while lanes.size > 1:
            lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
        total += float(lanes[0])
    return total


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 31, 33, 4095, 4096, 4097, 200_001])
def test_sum_is_added_up_in_the_stated_order(name: str, dtype: torch.dtype, n: int) -> None:
    set_isa(name)
    values = _values(n, dtype)
    for threads in (1, 2, 7):
        assert sum_of_squares(values, 0.125, threads=threads) == _in_the_stated_order(values, 0.125)


@given(st.lists(st.integers(0, 9), max_size=6), st.integers(0, 5000), st.sampled_from(DTYPES))
def test_sum_folded_over_pieces_equals_the_sum_of_the_whole(
    blocks: list[int], tail: int, dtype: torch.dtype
) -> None:
    bounds = [0]
    for piece in [*(count * BLOCK for count in blocks), tail]:
        bounds.append(bounds[-1] + piece)
    values = _values(bounds[-1], dtype)
    carry = 0.0
    for begin, end in pairwise(bounds):
        carry = sum_of_squares(values[begin:end], carry)
    assert carry == sum_of_squares(values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sum_is_close_to_the_exact_one(dtype: torch.dtype) -> None:
    values = _values(100_000, dtype)
    exact = math.fsum(value * value for value in values.double().tolist())
    assert sum_of_squares(values) == pytest.approx(exact, rel=1e-13)


def test_sum_of_the_largest_floats_stays_finite() -> None:
    largest = torch.finfo(torch.float32).max
    assert sum_of_squares(torch.full((8192,), largest)) == pytest.approx(8192 * largest**2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("at", [0, 4095, 4096, 9999])
def test_sum_over_a_nan_or_an_infinity_shows_it(dtype: torch.dtype, at: int) -> None:
    values = _values(10_000, dtype)
    values[at] = torch.inf
    assert sum_of_squares(values) == math.inf
    values[at] = torch.nan
    assert math.isnan(sum_of_squares(values))


def test_sum_at_an_odd_address_equals_the_one_at_an_even_one() -> None:
    values = _values(20_000, torch.bfloat16)
    moved = torch.empty(20_003, dtype=torch.bfloat16)[3:]
    moved.copy_(values)
    assert sum_of_squares(moved) == sum_of_squares(values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("numel", [0, 1, BLOCK, 3 * BLOCK + 17])
def test_block_squares_added_up_in_order_are_the_sum_of_squares(
    dtype: torch.dtype, numel: int
) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(3)).to(dtype)
    total = 0.0
    for block_sum in block_squares(values, threads=2).tolist():
        total += block_sum
    assert total == sum_of_squares(values)
