"""States to measure with: as large as asked for, filled, and known by their checksums."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint.bench.conditions.workload import (
    CheckError,
    State,
    TensorSpec,
    Workload,
    byte_view,
    equal_workload,
    gpt_workload,
)

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.float8_e4m3fn)
MIXED = Workload(
    "mixed",
    (
        *(TensorSpec(f"t.{dtype}", dtype, (7, 9)) for dtype in DTYPES),
        TensorSpec("scalar", torch.float64, ()),
    ),
)


@settings(deadline=None)
@given(nbytes=st.integers(4, 1 << 33))
def test_gpt_workload_has_the_bytes_asked_for(nbytes: int) -> None:
    workload = gpt_workload(nbytes)
    assert workload.nbytes == nbytes // 4 * 4
    assert all(spec.nbytes > 0 for spec in workload.tensors)
    assert len({spec.name for spec in workload.tensors}) == len(workload.tensors)


def test_gpt_workload_is_made_of_layers_mostly() -> None:
    workload = gpt_workload(2 << 30)
    rest = workload.tensors[-1]
    assert rest.name == "embedding.weight"
    assert rest.nbytes < workload.nbytes * 0.05
    assert len(workload.tensors) == 12 * 6 + 1


@settings(deadline=None)
@given(nbytes=st.integers(8, 1 << 16), tensor_words=st.integers(1, 1 << 10))
def test_equal_workload_has_as_many_tensors_as_fit(nbytes: int, tensor_words: int) -> None:
    workload = equal_workload(nbytes, tensor_words * 4)
    assert {spec.nbytes for spec in workload.tensors} == {tensor_words * 4}
    assert len(workload.tensors) == max(nbytes // (tensor_words * 4), 1)


def test_state_filled_is_checked_and_filled_again_the_same() -> None:
    state = State(MIXED)
    before = {name: tensor.clone() for name, tensor in state.tensors.items()}
    state.check(state.tensors)
    state.clear()
    assert all(not byte_view(tensor).any() for tensor in state.tensors.values())
    with pytest.raises(CheckError, match=r"tensor 't\.torch\.float32' came back with CRC-32C"):
        state.check(state.tensors)
    state.fill()
    state.check(before)


def test_state_holds_bits_that_do_not_repeat() -> None:
    state = State(equal_workload(1 << 16, 1 << 15))
    first, second = (byte_view(tensor) for tensor in state.tensors.values())
    assert (first != second).mean() > 0.9


def test_state_checked_against_a_flipped_bit_names_the_tensor() -> None:
    state = State(MIXED)
    copies = {name: tensor.clone() for name, tensor in state.tensors.items()}
    byte_view(copies["scalar"])[3] ^= 16
    with pytest.raises(CheckError, match="tensor 'scalar'"):
        state.check(copies)


def test_state_checked_against_a_missing_tensor_names_it() -> None:
    state = State(MIXED)
    rest = {name: tensor for name, tensor in state.tensors.items() if name != "scalar"}
    with pytest.raises(CheckError, match="tensor 'scalar' did not come back"):
        state.check(rest)
