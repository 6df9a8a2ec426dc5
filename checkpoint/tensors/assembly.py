"""Turns the nodes of a tree into tensors and arrays: memory first, bytes later.

An `Assembler` allocates what nodes describe and notes which stored tensors have to be read into
what; it reads nothing itself. Leaves that shared memory when they were saved share it again, and a
leaf that was one object at several places is one object again, or, if it was a view of another
leaf, several over the same memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from checkpoint.errors import CorruptCheckpointError
from checkpoint.format import elements
from checkpoint.format.names import Path, render
from checkpoint.format.records import MAX_DIMENSIONS, Manifest, TensorRecord
from checkpoint.format.scalars import decode_dtype
from checkpoint.format.slices import Shape, contiguous_strides, is_contiguous, span_elements
from checkpoint.format.tree import DataNode
from checkpoint.tensors.arenas import Arenas

MIN_MAPPED_BYTES = 1 << 20
"""From here on memory is mapped page by page, so that the device can read into it directly."""

_CPU = torch.device("cpu")
_MAX_SIZE = (1 << 63) - 1
_FLAGS = {"requires_grad", "parameter", "device"}
_VIEW_KEYS = {"view", "dtype", "shape", "strides"}


class TensorView(NamedTuple):
    """What a node stands for: stored tensor number `tensor`, or a view `offset` bytes into it.

    `strides` are in elements; None for row-major. `is_whole` if it is all of the stored tensor as
    it was saved.
    """

    tensor: int
    offset: int
    dtype: torch.dtype
    shape: Shape
    strides: Shape | None
    is_whole: bool

    @property
    def is_row_major(self) -> bool:
        """Whether its bytes lie in a row, from `offset` of the stored tensor on."""
        whole = self.is_whole or self.strides is None
        return whole or is_contiguous(self.shape, self.strides or ())

    @property
    def reach_bytes(self) -> int:
        """From its first byte to its last one, both included."""
        strides = contiguous_strides(self.shape) if self.strides is None else self.strides
        return span_elements(self.shape, strides) * self.dtype.itemsize


def view_of(manifest: Manifest, path: Path, node: DataNode) -> TensorView:
    """Checks everything that a tensor's node says. Raises CorruptCheckpointError."""
    if len(node) == 1 and "tensor" in node:  # as most are
        return _whole(node["tensor"], _record(manifest, path, node["tensor"]))
    if "array" in node:
        return _checked_array(manifest, path, node)
    if "view" in node:
        _check_keys(path, node, _VIEW_KEYS, _VIEW_KEYS | _FLAGS)
        view = _checked_view(manifest, path, node)
    else:
        _check_keys(path, node, {"tensor"}, {"tensor"} | _FLAGS)
        view = _whole(node["tensor"], _record(manifest, path, node["tensor"]))
    _check_flags(path, node, view.dtype)
    return view


def array_dtype(node: DataNode) -> np.dtype[Any] | None:
    """The dtype of an array, of a node that `view_of` has checked; None of a tensor."""
    return decode_dtype(node["dtype"]) if "array" in node else None


def _whole(index: int, record: TensorRecord) -> TensorView:
    return TensorView(index, 0, record.element.torch, record.shape, record.strides, True)


def _checked_array(manifest: Manifest, path: Path, node: DataNode) -> TensorView:
    _check_keys(path, node, {"array", "dtype"}, {"array", "dtype"})
    record = _record(manifest, path, node["array"])
    try:
        dtype = decode_dtype(node["dtype"])
    except ValueError as error:
        raise _corrupt(path, str(error)) from error
    element, extra = elements.of_numpy(dtype)
    fits = record.dtype == element.name and record.shape[len(record.shape) - len(extra) :] == extra
    if not fits or record.strides is not None or record.storage is not None:
        raise _corrupt(path, f"an array of {dtype} over {record.dtype} of shape {record.shape}")
    return _whole(node["array"], record)


def _check_flags(path: Path, node: DataNode, dtype: torch.dtype) -> None:
    requires_grad = node.get("requires_grad", False)
    if type(requires_grad) is not bool or type(node.get("parameter", False)) is not bool:
        raise _corrupt(path, "a flag that is not true or false")
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise _corrupt(path, f"a gradient for {dtype}")
    device = node.get("device", "cpu")
    try:
        if not isinstance(device, str):
            raise TypeError("a device is a text")
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _corrupt(path, "not a device") from error


@lru_cache
def _usable(name: str) -> torch.device:
    """The device that a tensor was saved from. Raises ValueError if this machine has none such."""
    device = torch.device(name)
    try:
        torch.empty(0, device=device)  # raises what the device's module does
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"a tensor was saved from {device}, which is no device of this machine ({error}); give "
            "one as map_location="
        ) from error
    return device


def _checked_view(manifest: Manifest, path: Path, node: DataNode) -> TensorView:
    place = _sizes(path, node["view"])
    shape, strides = _sizes(path, node["shape"]), _sizes(path, node["strides"])
    element = elements.BY_NAME.get(node["dtype"]) if isinstance(node["dtype"], str) else None
    if len(place) != 2 or len(shape) != len(strides) or element is None:
        raise _corrupt(path, "not the description of a view")
    if math.prod(size for size in shape if size) > _MAX_SIZE:
        raise _corrupt(path, "a view of more than 2^63 elements")
    index, offset = place
    record = _record(manifest, path, index)
    reach = span_elements(shape, strides) * element.itemsize
    same = record.dtype == element.name and record.shape == shape
    if record.strides is None:
        fits = offset + reach <= record.nbytes
        same = same and strides == contiguous_strides(shape)
    else:
        # What lies between the elements of a strided tensor was not saved.
        fits = same = same and offset == 0 and strides == record.strides
    start = offset + (record.storage[1] if record.storage else 0)
    if not fits or start % element.itemsize:
        raise _corrupt(path, f"a view beyond tensor {record.name[:200]!r}")
    return TensorView(index, offset, element.torch, shape, strides, same and offset == 0)


def _record(manifest: Manifest, path: Path, index: Any) -> TensorRecord:
    if type(index) is not int or not 0 <= index < len(manifest.tensors):
        raise _corrupt(path, "no such tensor in the manifest")
    return manifest.tensors[index]


def _sizes(path: Path, value: Any) -> Shape:
    if not isinstance(value, list) or len(value) > MAX_DIMENSIONS:
        raise _corrupt(path, "not a list of sizes")
    if not all(type(item) is int and 0 <= item <= _MAX_SIZE for item in value):
        raise _corrupt(path, "not a list of sizes")
    return tuple(value)


def _check_keys(path: Path, node: DataNode, needed: set[str], allowed: set[str]) -> None:
    if not needed <= node.keys() <= allowed:
        raise _corrupt(path, "not a node that this version knows")


def _corrupt(path: Path, what: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{render(path)}: {what}")


class Assembler:
    """Builds the leaves of one checkpoint on `device` (None: where each was saved from).

    `tensors` are the stored tensors asked for so far, by their index: what has to be read. Of those
    in `windows` bytes [first, last) alone are asked for, as a flat tensor of bytes. With `dtype`
    tensors of floating-point numbers come in that one, which windows are not made for.
    """

    def __init__(
        self,
        manifest: Manifest,
        device: torch.device | None,
        windows: Mapping[int, tuple[int, int]] | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        assert not (windows and dtype)
        self.tensors: dict[int, torch.Tensor] = {}
        self._windows = windows or {}
        self._manifest = manifest
        self._device = device
        self._dtype = dtype
        self._seen_as: dict[tuple[str, int], tuple[torch.dtype, bool]] = {}
        self._leaves: dict[tuple[str, int], Any] = {}
        self._storages: dict[int, torch.UntypedStorage] = {}
        self._arenas = Arenas()

    def make_all(self) -> None:
        """Makes memory for every stored tensor of the usual kind, small and row-major in a storage
        of its own, that is known to come as it was saved, before it is asked for.
        """
        device = self._device
        if device is None or self._dtype is not None:
            return
        models: dict[tuple[str, Shape], torch.Tensor | None] = {}
        for index, record in enumerate(self._manifest.tensors):
            if record.strides is not None or record.storage is not None:
                continue
            kind = record.dtype, record.shape
            if kind not in models:
                is_mapped = record.nbytes >= MIN_MAPPED_BYTES and device == _CPU
                models[kind] = None if is_mapped else self._stored(index, device)
            elif (model := models[kind]) is not None:
                self.tensors[index] = torch.empty_like(model)  # in half the time of `empty`

    def build(self, path: Path, node: DataNode) -> Any:
        """The leaf of a node, its content yet to be read. Raises CorruptCheckpointError."""
        if len(node) == 1 and "tensor" in node:  # as most are
            index = node["tensor"]
            made = self.tensors.get(index) if type(index) is int else None
            if made is not None and self._dtype is None:
                return made
            record = _record(self._manifest, path, index)
            self._note_dtype(path, index, record.element.torch, is_tensor=True)
            return self._stored(index, self._device_of(node))
        view = view_of(self._manifest, path, node)
        self._note_dtype(path, view.tensor, view.dtype, is_tensor="array" not in node)
        if "view" in node:
            return _flagged(node, self._view(view, self._device_of(node)))
        kind = "array" if "array" in node else "tensor"
        leaf = self._leaves.get((kind, view.tensor))
        if leaf is None:
            if kind == "tensor":
                leaf = _flagged(node, self._stored(view.tensor, self._device_of(node)))
            else:
                if self._device not in (None, _CPU):
                    self.tensors.pop(view.tensor, None)  # numpy has host memory alone
                leaf = array_over(node, self._stored(view.tensor, _CPU))
            self._leaves[kind, view.tensor] = leaf
        return leaf

    def _note_dtype(self, path: Path, index: int, dtype: torch.dtype, *, is_tensor: bool) -> None:
        """Takes down as what a leaf sees the memory of a stored tensor.

        Raises ValueError naming a leaf that sees otherwise what is converted for another one.
        """
        if self._dtype is None:
            return
        is_converted = is_tensor and dtype.is_floating_point and dtype != self._dtype
        stored = self._manifest.tensors[index].element.torch
        first = self._seen_as.setdefault(self._memory_of(index), (dtype, is_converted))
        if is_converted and not converts(dtype, self._dtype):
            raise _not_converted(render(path), dtype, self._dtype)
        is_mixed = first != (dtype, is_converted) and (first[1] or is_converted)
        if is_mixed or (is_converted and dtype != stored):
            raise ValueError(
                f"{render(path)} is {dtype} over memory that it shares with {stored}, which cannot "
                f"both become {self._dtype}; load it without dtype=, and convert it then"
            )

    def _memory_of(self, index: int) -> tuple[str, int]:
        storage = self._manifest.tensors[index].storage
        return ("tensor", index) if storage is None else ("storage", storage[0])

    def _loaded_dtype(self, index: int) -> torch.dtype:
        """The dtype in which a stored tensor is in memory."""
        saved = self._manifest.tensors[index].element.torch
        if self._dtype is None or not self._seen_as[self._memory_of(index)][1]:
            return saved
        return self._dtype

    def _device_of(self, node: DataNode) -> torch.device:
        if "array" in node:
            return _CPU
        return self._device or _usable(node.get("device", "cpu"))

    def _view(self, view: TensorView, device: torch.device) -> torch.Tensor:
        base = self._stored(view.tensor, device)
        offset, dtype = view.offset, view.dtype
        if self._loaded_dtype(view.tensor) != self._manifest.tensors[view.tensor].element.torch:
            offset, dtype = offset // dtype.itemsize * base.element_size(), base.dtype
        offset += int(base.storage_offset()) * base.element_size()
        if view.tensor in self._windows:
            offset -= self._windows[view.tensor][0]
        strides = contiguous_strides(view.shape) if view.strides is None else view.strides
        return _typed(base.untyped_storage(), dtype, offset, view.shape, strides)

    def _stored(self, index: int, device: torch.device) -> torch.Tensor:
        tensor = self.tensors.get(index)
        if tensor is None:
            record, dtype = self._manifest.tensors[index], self._loaded_dtype(index)
            if index in self._windows:
                first, last = self._windows[index]
                record = TensorRecord(record.name, "uint8", (last - first,), ())
                dtype = torch.uint8
            tensor = self.tensors[index] = self._allocate(record, dtype, device)
        return tensor

    def _allocate(
        self, record: TensorRecord, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        if record.storage is None:
            nbytes = math.prod(record.shape) * dtype.itemsize
            if nbytes >= MIN_MAPPED_BYTES and device == _CPU:
                strides = record.strides or contiguous_strides(record.shape)
                return _typed(self._mapped(nbytes), dtype, 0, record.shape, strides)
            if record.strides is None:
                return torch.empty(record.shape, dtype=dtype, device=device)
            return torch.empty_strided(record.shape, record.strides, dtype=dtype, device=device)
        index, offset = record.storage
        saved_size, size = record.element.itemsize, dtype.itemsize
        if index not in self._storages:
            count = -(-self._manifest.storages[index] // saved_size)
            nbytes = self._manifest.storages[index] if size == saved_size else count * size
            self._storages[index] = self._storage(nbytes, device)
        offset = offset if size == saved_size else offset // saved_size * size
        strides = record.strides or contiguous_strides(record.shape)
        return _typed(self._storages[index], dtype, offset, record.shape, strides)

    def _mapped(self, nbytes: int) -> torch.UntypedStorage:
        """Zeroed pages, given back when the last tensor over them is gone."""
        return torch.from_numpy(self._arenas.allocate(nbytes)).untyped_storage()

    def _storage(self, nbytes: int, device: torch.device) -> torch.UntypedStorage:
        """Zeroed, for what lies between the tensors of a shared storage."""
        if device == _CPU and nbytes >= MIN_MAPPED_BYTES:
            return self._mapped(nbytes)
        return torch.zeros(nbytes, dtype=torch.uint8, device=device).untyped_storage()


@lru_cache
def converts(dtype: torch.dtype, to: torch.dtype) -> bool:
    """Whether torch converts numbers of one dtype to another."""
    try:
        torch.empty(1, dtype=to, device="cpu").copy_(torch.empty(1, dtype=dtype, device="cpu"))
    except (RuntimeError, NotImplementedError):
        return False
    return True


def comes_as(where: str, dtype: torch.dtype, to: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of another one come. Raises ValueError if torch has no way."""
    if not converts(dtype, to):
        raise _not_converted(where, dtype, to)
    return to


def _not_converted(where: str, dtype: torch.dtype, to: torch.dtype) -> ValueError:
    return ValueError(
        f"{where} is {dtype}, which torch does not convert to {to}; load it without dtype="
    )


def _typed(
    storage: torch.UntypedStorage, dtype: torch.dtype, offset: int, shape: Shape, strides: Shape
) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device=storage.device)
    return empty.set_(storage, offset // dtype.itemsize, shape, strides)


def _flagged(node: DataNode, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as a Parameter and with gradients, where it was saved so."""
    requires_grad = node.get("requires_grad", False)
    if node.get("parameter", False):
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_() if requires_grad else tensor


def array_over(node: DataNode, stored: torch.Tensor) -> np.ndarray[Any, Any]:
    """The numpy array of a node, over the memory of its stored tensor."""
    dtype = decode_dtype(node["dtype"])
    _, extra = elements.of_numpy(dtype)
    shape = tuple(stored.shape)[: stored.dim() - len(extra)]
    if stored.numel() == 0:
        return np.zeros(shape, dtype)
    return stored.numpy().reshape(-1).view(dtype).reshape(shape)
