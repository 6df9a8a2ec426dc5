"""Copies: every byte arrives, none beside it changes, and sums on the way are the same."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swap.kernels import BLOCK, block_squares, copy_bytes, sum_of_squares
from swap.processors import available_isas, set_isa

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
LARGE = 3 * 64 * BLOCK
"""Bytes enough for several threads."""


@pytest.fixture(autouse=True)
def fastest_isa_again() -> Iterator[None]:
    yield
    set_isa(None)


def _bytes(n: int) -> torch.Tensor:
    return torch.randint(0, 256, (n,), generator=torch.Generator().manual_seed(n)).to(torch.uint8)


@given(
    st.sampled_from(available_isas()),
    st.integers(0, 70) | st.integers(0, 9000) | st.just(LARGE + 5),
    st.integers(0, 70),
    st.integers(0, 70),
    st.sampled_from([1, 2, 7]),
)
def test_copy_moves_every_byte_and_no_other(
    name: str, n: int, source_at: int, target_at: int, threads: int
) -> None:
    set_isa(name)
    source, target = _bytes(source_at + n), _bytes(target_at + n + 70)
    expected = target.clone()
    expected[target_at : target_at + n] = source[source_at:]
    copy_bytes(source[source_at:], target[target_at : target_at + n], threads=threads)
    assert torch.equal(target, expected)


@pytest.mark.parametrize("name", available_isas())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 31, 4095, 4097, 200_001])
def test_sums_with_a_copy_are_those_without_and_the_copy_is_one(
    name: str, dtype: torch.dtype, n: int
) -> None:
    set_isa(name)
    values = torch.randn(n, generator=torch.Generator().manual_seed(n)).to(dtype)
    for threads in (1, 3):
        copy = torch.full((n + 40,), 7.0, dtype=dtype)
        total = sum_of_squares(values, 0.5, copy=copy[3 : 3 + n], threads=threads)
        assert total == sum_of_squares(values, 0.5)
        assert torch.equal(copy[3 : 3 + n], values)
        assert bool((copy[:3] == 7.0).all())
        assert bool((copy[3 + n :] == 7.0).all())
        again = torch.empty(n, dtype=dtype)
        assert torch.equal(
            block_squares(values, copy=again, threads=threads), block_squares(values)
        )
        assert torch.equal(again, values)


def test_copy_of_another_kind_or_length_is_refused() -> None:
    values = torch.randn(10)
    with pytest.raises(TypeError, match=r"copy is torch\.bfloat16; pass torch\.float32"):
        sum_of_squares(values, copy=torch.empty(10, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"copy has shape \(9,\) where \(10,\) is due"):
        block_squares(values, copy=torch.empty(9))
    with pytest.raises(TypeError, match=r"source is torch\.float32; pass torch\.uint8"):
        copy_bytes(values, values)
    with pytest.raises(ValueError, match=r"target has shape \(3,\) where \(4,\) is due"):
        copy_bytes(_bytes(4), _bytes(3))
