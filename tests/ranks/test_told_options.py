"""What ranks compare of options: no two that differ are taken for the same, none that are the same
for different, and whatever a program has there is told.
"""

from __future__ import annotations

import functools
import threading
import types
from collections import OrderedDict, UserList, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from infinity.ranks.options import told

LONG = 2000


def values(*, middle: float = 0.0) -> torch.Tensor:
    """More than the text of a tensor shows; they differ where it shows none."""
    long = torch.arange(float(LONG))
    long[LONG // 2] = middle
    return long


@dataclass
class Setting:
    """An option of several values."""

    values: object
    own: object = field(default=None, repr=False)


@dataclass
class Named(Setting):
    """One with a text of its own."""

    def __repr__(self) -> str:
        return "named"


def quantized(middle: float) -> torch.Tensor:
    return torch.quantize_per_tensor(values(middle=middle), 1.0, 0, torch.qint8)


DIFFERENT: dict[str, Callable[[float], object]] = {
    "tensor": lambda middle: values(middle=middle),
    "bfloat16": lambda middle: values(middle=middle).bfloat16(),
    "view": lambda middle: values(middle=middle).view(40, 50).t(),
    "size": lambda middle: torch.zeros(0, int(middle)),
    "sparse": lambda middle: values(middle=middle).to_sparse(),
    "csr": lambda middle: values(middle=middle).view(40, 50).to_sparse_csr(),
    "csc": lambda middle: values(middle=middle).view(40, 50).to_sparse_csc(),
    "quantized": quantized,
    "nested": lambda middle: torch.nested.nested_tensor([values(middle=middle)]),
    "array": lambda middle: values(middle=middle).numpy(),
    "objects": lambda middle: np.array([values(middle=middle), None], dtype=object),
    "partial": lambda middle: functools.partial(print, values(middle=middle)),
    "dataclass": lambda middle: Setting(values(middle=middle)),
    "namespace": lambda middle: types.SimpleNamespace(x=values(middle=middle)),
    "deque": lambda middle: deque([values(middle=middle)]),
    "list": lambda middle: UserList([values(middle=middle)]),
    "view of a dictionary": lambda middle: {1: values(middle=middle)}.values(),
    "bytes": lambda middle: f"a at 0x{int(middle)}".encode(),
}


@pytest.mark.filterwarnings("ignore")  # what torch says of layouts and dtypes
@pytest.mark.parametrize("kind", DIFFERENT)
def test_what_differs_is_told_apart_and_what_is_the_same_is_not(kind: str) -> None:
    make = DIFFERENT[kind]
    assert told(make(1)) == told(make(1))
    assert told(make(1)) != told(make(2))
    assert told(make(1)) == told(make(1)) == told([make(1)])[1:-1]


def test_a_large_option_is_told_in_few_words() -> None:
    assert len(told({"mask": torch.zeros(1 << 20), "noise": np.zeros(1 << 20)})) < 200
    assert told(torch.tensor(0.5)) == "tensor(0.5, dtype=torch.float32)"


def test_addresses_and_the_order_of_sets_are_not_compared() -> None:
    assert told(np.array([object()])) == told(np.array([object()]))
    assert told(Setting(object(), 1)) == told(Setting(object(), 2))
    assert told(Named(1)) == told(Named(2)) == "named"
    assert told([threading.Lock(), {"a", "b"}]) == told([threading.Lock(), {"b", "a"}])
    assert told(np.random.default_rng(1)) == "Generator(PCG64)"  # its address has capitals


def test_dictionaries_that_are_equal_are_told_alike() -> None:
    assert told({"a": 1, "b": {1, 2}}) == told({"b": {2, 1}, "a": 1}) != told({"a": 1, "b": {1}})
    assert told(OrderedDict(a=1, b=2)) != told(OrderedDict(b=2, a=1))


@pytest.mark.parametrize("dtype", ["uint1", "int4", "bits8", "uint16", "float8_e4m3fn"])
def test_tensors_of_rare_dtypes_are_told(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever others there are: torch before 2.8 has not all of them."""
    monkeypatch.delattr(torch, "float4_e2m1fn_x2", raising=False)
    of = getattr(torch, dtype)
    one, other = (torch.full((3,), value, dtype=torch.uint8) for value in (1, 2))
    if of.itemsize == 2:
        one, other = one.repeat(2), other.repeat(2)
    assert told(one.view(of)) == told(one.clone().view(of)) != told(other.view(of))
    assert told(torch.tensor(0.5)) == "tensor(0.5, dtype=torch.float32)"


def test_containers_in_themselves_are_told() -> None:
    cyclic: list[Any] = [1]
    cyclic.append({"self": cyclic})
    assert told(cyclic) == "[1, {'self': ...}]"
    twice = [1]
    assert told([twice, twice]) == "[[1], [1]]"
