"""Random state trees, and equality that looks at types, bits and shared memory."""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from checkpoint.format.elements import BY_TORCH
from checkpoint.format.slices import contiguous_strides

DTYPES = sorted(BY_TORCH, key=str)
NUMPY_DTYPES = ("?", "<i2", "<u4", ">f4", "<f8", "<c16", "<M8[ms]", "<m8[D]", "S3", "<U2", "V5")
SHAPES = ((), (0,), (1,), (3,), (2, 3), (4, 0, 2), (2, 1, 3), (257,))


def _tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Any bits there are, NaNs among them."""
    generator = np.random.default_rng(seed)
    raw = generator.integers(0, 256, math.prod(shape) * dtype.itemsize, np.uint8)
    if dtype == torch.bool:
        raw &= 1
    empty = torch.empty(0, dtype=dtype)
    return empty.set_(torch.from_numpy(raw).untyped_storage(), 0, shape, contiguous_strides(shape))


def _restrided(tensor: torch.Tensor, how: str) -> torch.Tensor:
    if how == "transposed":
        return tensor.permute(tuple(reversed(range(tensor.dim()))))
    if how == "stepped" and tensor.dim():
        return tensor[::2]
    if how == "expanded":
        return tensor.expand(2, *tensor.shape)
    return tensor


HOW = ("plain", "transposed", "stepped", "expanded")
tensors = st.builds(
    lambda dtype, shape, seed, how: _restrided(_tensor(dtype, shape, seed), how),
    st.sampled_from(DTYPES),
    st.sampled_from(SHAPES),
    st.integers(0, 99),
    st.sampled_from(HOW),
)
parameters = st.builds(
    lambda shape, grad: torch.nn.Parameter(torch.ones(shape), requires_grad=grad),
    st.sampled_from(SHAPES),
    st.booleans(),
)


def _array(dtype: str, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    kind = np.dtype(dtype)
    raw = np.random.default_rng(seed).integers(0, 100, math.prod(shape) * kind.itemsize, np.uint8)
    if kind.kind == "b":
        raw &= 1
    if kind.kind == "U":
        return np.full(shape, "ab"[seed % 2 :], kind)
    return np.ndarray(shape, kind, raw.tobytes()).copy()


arrays = st.builds(
    _array, st.sampled_from(NUMPY_DTYPES), st.sampled_from(SHAPES), st.integers(0, 99)
)
numpy_scalars = arrays.filter(lambda array: array.size > 0).map(lambda array: array.flat[0])
plain = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.complex_numbers(allow_nan=True),
    st.binary(max_size=20),
    st.text(st.characters(), max_size=10),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    st.lists(st.integers(-5, 5), max_size=3).map(torch.Size),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
    numpy_scalars,
)
keys = st.one_of(
    st.text(st.characters(), max_size=5),
    st.sampled_from(["a", "b", "a.b", "__pad__0", "__metadata__", "1"]),
    st.integers(-3, 3),
    st.booleans(),
    st.none(),
    st.binary(max_size=3),
    st.tuples(st.integers(0, 2), st.text(max_size=2)),
)
leaves = st.one_of(plain, tensors, tensors, parameters, arrays)


def _containers(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        st.lists(children, max_size=4),
        st.lists(children, max_size=4).map(tuple),
        st.dictionaries(keys, children, max_size=4),
        st.dictionaries(keys, children, max_size=4).map(OrderedDict),
        st.sets(keys, max_size=4),
    )


states = st.recursive(leaves, _containers, max_leaves=12)


def assert_same(left: Any, right: Any, where: str = "state") -> None:
    """Equal types, values, bits; NaNs equal to themselves."""
    assert type(left) is type(right), f"{where}: {type(left)} and {type(right)}"
    if isinstance(left, torch.Tensor):
        _assert_same_tensor(left, right, where)
    elif isinstance(left, np.ndarray | np.generic):
        assert left.dtype == right.dtype, where
        assert left.shape == right.shape, where
        assert left.tobytes() == right.tobytes(), where
    elif isinstance(left, dict):
        assert list(map(repr, left)) == list(map(repr, right)), where
        for (key, one), other in zip(left.items(), right.values(), strict=True):
            assert_same(one, other, f"{where}[{key!r}]")
    elif type(left) in (list, tuple):
        assert len(left) == len(right), where
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif isinstance(left, set):
        assert sorted(map(repr, left)) == sorted(map(repr, right)), where
    else:
        assert repr(left) == repr(right), where


def _assert_same_tensor(left: torch.Tensor, right: torch.Tensor, where: str) -> None:
    assert left.dtype == right.dtype, where
    assert left.shape == right.shape, where
    assert left.requires_grad == right.requires_grad, where
    assert bits(left) == bits(right), where


def bits(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor."""
    tensor = tensor.detach()
    if tensor.numel() == 0:
        return b""
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).numpy(force=True).tobytes()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.view(integer[tensor.element_size()]).contiguous().numpy().tobytes()


def tensors_of(tree: Any) -> list[torch.Tensor]:
    """All tensors of a tree, in its order."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    items = tree.values() if isinstance(tree, dict) else tree
    if not isinstance(tree, dict | list | tuple):
        return []
    return list(itertools.chain.from_iterable(map(tensors_of, items)))
