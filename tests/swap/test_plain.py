"""Tensors whose memory is not their values: negative views, ZeroTensors, freed storages."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from swap.adam import AdamHyper
from swap.kernels import adam_step, block_squares, copy_values, sum_of_squares
from swap.masters import components_from
from swap.plain import check_memory, plain
from swap.plain import same_bits as plain_bits
from swap.storage.components import as_bytes
from tests.support.training import same_bits

HYPER = AdamHyper(lr=0.1, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.0, step=1)
N = 4096


def _negated() -> torch.Tensor:
    return torch.complex(torch.zeros(N), torch.arange(1.0, N + 1)).conj().imag.contiguous()


def _negative() -> torch.Tensor:
    return torch._neg_view(torch.arange(1.0, N + 1))


def _zero() -> torch.Tensor:
    return torch._efficientzerotensor(N)


def _later_zero() -> torch.Tensor:
    """Its address is not null."""
    return torch._efficientzerotensor(2 * N)[N:]


def _freed() -> torch.Tensor:
    tensor = torch.ones(N)
    tensor.untyped_storage().resize_(0)
    return tensor


UNREADABLE = (_negative, _zero, _later_zero, _freed)


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "sum": sum_of_squares,
    "blocks": block_squares,
    "copy": lambda tensor: sum_of_squares(torch.ones(N), copy=tensor),
    "bytes": as_bytes,
    "gradient": lambda tensor: _step(grad=tensor),
    "weight": lambda tensor: _step(weight=tensor),
    "moment": lambda tensor: _step(exp_avg_sq=tensor),
}


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
@pytest.mark.parametrize("make", UNREADABLE)
def test_bytes_that_are_no_values_are_refused_wherever_memory_is_read(
    make: Callable[[], torch.Tensor], read: Callable[[torch.Tensor], object]
) -> None:
    with pytest.raises(ValueError, match=r"clone\(\)|has been freed"):
        read(make())


def _step(**changed: torch.Tensor) -> None:
    names = ("weight", "exp_avg", "exp_avg_sq", "grad")
    tensors: dict[str, Any] = {name: torch.zeros(N) for name in names} | changed
    adam_step(rest=None, hyper=HYPER, **tensors)


def test_memory_that_ends_before_the_last_element_is_refused() -> None:
    tensor = torch.ones(N)
    tensor.untyped_storage().resize_(4 * N - 1)
    with pytest.raises(ValueError, match=f"reaches to byte {4 * N} of a storage of {4 * N - 1}"):
        sum_of_squares(tensor)


@pytest.mark.parametrize("make", [_negated, _negative, _zero, _later_zero])
def test_plain_has_the_values_in_memory(make: Callable[[], torch.Tensor]) -> None:
    values = plain(make())
    assert same_bits(values, torch.empty(N).copy_(make()))
    assert as_bytes(values).tobytes() == values.numpy().tobytes()
    assert plain(values) is values


@pytest.mark.parametrize("make", [_negative, _zero])
@pytest.mark.parametrize("names", [("weight",), ("weight", "lo"), ("weight", "master")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_components_are_made_of_the_values(
    make: Callable[[], torch.Tensor], names: tuple[str, ...], dtype: torch.dtype
) -> None:
    expected = components_from(torch.empty(N).copy_(make()), dtype, names)
    for name, component in components_from(make(), dtype, names).items():
        assert same_bits(component, expected[name]), name


def test_copied_values_are_the_values() -> None:
    target = torch.ones(N)
    copy_values(_negative(), target)
    assert same_bits(target, _negative().clone())
    copy_values(_zero(), target)
    assert not target.any()


@pytest.mark.parametrize("tensor", [torch.empty(3, device="meta"), torch.eye(3).to_sparse()])
def test_a_tensor_that_is_no_memory_is_refused_by_name(tensor: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"here is (of layout|on the meta device)"):
        check_memory("here", tensor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
def test_bits_of_one_element_with_any_stride(dtype: torch.dtype) -> None:
    column = torch.ones(1, 3, dtype=dtype)[:, 0]
    assert plain_bits(column, column.clone(memory_format=torch.contiguous_format))
    assert not plain_bits(column, -column)
