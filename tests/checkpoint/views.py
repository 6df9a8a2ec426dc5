"""Random views of random memory: leaves that overlap, lie odd, repeat and negate themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from checkpoint.format.elements import BY_TORCH
from checkpoint.format.slices import contiguous_strides, span_elements
from tests.checkpoint.trees import DTYPES, keys, plain

# Of 16 bits torch negates NaNs to this one or that, as it comes.
NEGATED = {torch.float32, torch.float64, torch.int32, torch.int8}
CONJUGATED = {torch.complex64, torch.complex128}
ZEROS = {torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool}
"""Of these, some tensors are zeros without memory."""


@st.composite
def _geometries(draw: st.DrawFn, room: int) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, shape and strides, in elements, of a view that fits into `room` elements."""
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=4)))
    how = draw(st.sampled_from(["rows", "turned", "any", "any"]))
    if how == "any":
        strides = tuple(draw(st.integers(0, 7)) for _ in shape)
    else:
        order = list(range(len(shape)))
        if how == "turned":
            order = draw(st.permutations(order))
        dense = contiguous_strides([shape[axis] for axis in order])
        strides = tuple(dense[order.index(axis)] for axis in range(len(shape)))
    while span_elements(shape, strides) > room:
        shape, strides = shape[1:], strides[1:]
        if not shape and not room:
            shape, strides = (0,), (1,)
    return draw(st.integers(0, room - span_elements(shape, strides))), shape, strides


@st.composite
def views(draw: st.DrawFn, memory: Sequence[torch.Tensor]) -> torch.Tensor:
    """A tensor over one of the given pieces of memory, of any dtype."""
    raw = draw(st.sampled_from(memory))
    dtype = draw(st.sampled_from(DTYPES))
    offset, shape, strides = draw(_geometries(len(raw) // dtype.itemsize))
    if dtype in ZEROS and draw(st.integers(0, 7)) == 0:
        return torch._efficientzerotensor(shape, dtype=dtype)
    tensor = torch.empty(0, dtype=dtype).set_(raw.untyped_storage(), offset, shape, strides)
    if dtype in CONJUGATED and draw(st.booleans()):
        tensor = tensor.conj()
        if draw(st.booleans()):
            tensor = tensor.imag
    elif dtype in NEGATED and draw(st.integers(0, 3)) == 0:
        tensor = torch._neg_view(tensor)
    can_learn = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    match draw(st.integers(0, 7)):
        case 0:
            return torch.nn.Parameter(tensor, requires_grad=can_learn and draw(st.booleans()))
        case 1 if can_learn:
            return tensor.requires_grad_()
    return tensor


_NUMPY = ("?", "u1", "<i2", ">i4", "<f2", ">f8", "<c8", ">c16", "<M8[3s]", "S3", "U1", "V5", "V0")
_RECORDS = (
    np.dtype([("a", "<f4"), ("b", ">i2", (2, 2))]),
    np.dtype({"names": ["x", "y"], "formats": ["u1", "<f4"], "offsets": [1, 4], "itemsize": 9}),
    np.dtype([(("title", "name"), "<i4"), ("in", [("er", "S2")])]),
)


@st.composite
def arrays(draw: st.DrawFn, memory: Sequence[torch.Tensor]) -> np.ndarray[Any, Any]:
    """A numpy array over the same memory, its strides of either sign."""
    raw = draw(st.sampled_from(memory)).numpy()
    dtype = draw(st.one_of(st.sampled_from(_NUMPY).map(np.dtype), st.sampled_from(_RECORDS)))
    if dtype.kind == "U":
        return np.full(draw(st.lists(st.integers(0, 3), max_size=3)), "x", dtype).T
    room = len(raw) // dtype.itemsize if dtype.itemsize else 20
    offset, shape, strides = draw(_geometries(room))
    steps = [stride * dtype.itemsize for stride in strides]
    array = np.ndarray(shape, dtype, raw, offset * dtype.itemsize, steps)
    backwards = bool(shape) and draw(st.booleans())
    return array[::-1] if backwards else array


REFUSED: tuple[Callable[[], Any], ...] = (
    lambda: torch.empty(3, device="meta"),
    lambda: torch.eye(2).to_sparse(),
    lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
    lambda: torch.zeros((1,) * 65),
    lambda: torch._neg_view(torch.zeros(2, dtype=torch.uint16)),
    lambda: np.zeros(2, object),
    object,
    lambda: {1.5: lambda: None},
)


class Drawn:
    """A state, and whether all of it can be saved. torch cannot print elements of every dtype."""

    def __init__(self, state: Any, is_fine: bool) -> None:
        self.state = state
        self.is_fine = is_fine

    def __repr__(self) -> str:
        return f"Drawn({_described(self.state)}, {self.is_fine})"


def _described(tree: Any) -> str:
    if isinstance(tree, torch.Tensor) and tree.layout == torch.strided and not tree.is_nested:
        flags = f"conj={tree.is_conj()}, neg={tree.is_neg()}, id={id(tree)}"
        return f"{type(tree).__name__}({tree.dtype}, {_place(tree)}, {flags})"
    if isinstance(tree, np.ndarray):
        return f"array({tree.dtype}, {tree.shape}, {tree.strides}, id={id(tree)})"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{key!r}: {_described(item)}' for key, item in tree.items())}}}"
    if type(tree) in (list, tuple):
        return f"[{', '.join(map(_described, tree))}]"
    return repr(tree)


def _place(tensor: torch.Tensor) -> str:
    storage = 0 if tensor.is_meta or tensor._is_zerotensor() else tensor.untyped_storage().nbytes()
    offset, shape, strides = tensor.storage_offset(), tuple(tensor.shape), tensor.stride()
    return f"storage={storage}, offset={offset}, shape={shape}, strides={strides}"


@st.composite
def states_of_views(draw: st.DrawFn) -> Drawn:
    """Trees of views over a few pieces of memory, some of them at several places."""
    generator = np.random.default_rng(draw(st.integers(0, 99)))
    sizes = draw(st.lists(st.sampled_from([0, 1, 7, 64, 200, 1000]), min_size=1, max_size=3))
    memory = [torch.from_numpy(generator.integers(0, 256, size, np.uint8)) for size in sizes]
    some = draw(st.lists(st.one_of(views(memory), views(memory), arrays(memory)), max_size=8))
    leaf: st.SearchStrategy[Any] = st.one_of(st.sampled_from(some), plain) if some else plain
    bad = draw(st.sampled_from(REFUSED)) if draw(st.integers(0, 9)) == 0 else None
    containers = (st.lists(leaf, max_size=6), st.dictionaries(keys, leaf, max_size=6))
    state = {"all": some, "more": draw(st.one_of(*containers))}
    if bad is not None:
        state["bad"] = [1, bad()]
    return Drawn(state, bad is None)


def values(tensor: torch.Tensor) -> bytes:
    """The row-major bytes of a tensor's values."""
    if tensor._is_zerotensor():
        return bytes(tensor.numel() * tensor.dtype.itemsize)
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.numel() == 0:
        return b""
    if not tensor.is_complex():
        integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        tensor = tensor.view(integer[BY_TORCH[tensor.dtype].itemsize])
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)
    return flat.copy_(tensor.reshape(-1)).view(torch.uint8).numpy().tobytes()
