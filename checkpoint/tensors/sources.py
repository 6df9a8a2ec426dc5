"""Where the bytes of a save come from: tensors, arrays, and objects that read themselves.

Every source gives the bytes of a row-major tensor, whatever its strides and device. One whose bytes
lie so in host memory says where, and is read without Python. Objects of users take turns.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from checkpoint.format import elements
from checkpoint.format.elements import ElementType
from checkpoint.format.records import MAX_DIMENSIONS
from checkpoint.format.slices import Shape, range_boxes, span_elements
from checkpoint.tensors.held import Held, HeldArray, HeldSource, HeldStorage
from checkpoint.tensors.turns import in_turn


@runtime_checkable
class ByteSource(Protocol):
    """A tensor that is not in memory: it is saved by reading it piece by piece.

    `read(start, out)` fills `out` with bytes [start, start + len(out)) of the row-major tensor.
    Pieces are whole elements, asked for in any order and on any thread, one at a time of one
    object. Where `read` may run on several threads at once, `thread_safe = True` on the object lets
    it, which stripes and background saves gain by. Two objects may always be read at once: what
    they share (a file and its position) is theirs to lock.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def read(self, start: int, out: memoryview) -> None: ...


@runtime_checkable
class ByteSink(Protocol):
    """A tensor that is not in memory: it is loaded by writing it piece by piece.

    `write(start, data)` takes bytes [start, start + len(data)) of the row-major tensor; `data` is
    valid until the call returns. Pieces are whole elements and come in any order and on any thread,
    one at a time of one object unless it has `thread_safe = True`, as for a `ByteSource`. Each byte
    comes once, but again, and last as it is to stay, where another save or (`Manager.load`) damage
    made the load begin anew.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]

    def write(self, start: int, data: memoryview) -> None: ...


@runtime_checkable
class PartialSource(ByteSource, Protocol):
    """A tensor of which this rank has `ranges` alone: (first, length) in elements of its row-major
    order. Other ranks have the rest. Only bytes in the ranges are asked for.
    """

    ranges: tuple[tuple[int, int], ...]


@runtime_checkable
class PartialSink(ByteSink, Protocol):
    """A tensor of which `ranges` alone are to be loaded, (first, length) in elements of its
    row-major order. Bytes beyond them may be given, too, and are to be ignored.
    """

    ranges: tuple[tuple[int, int], ...]


class Source(NamedTuple):
    """One tensor to save: its type and where its row-major bytes are.

    They lie at `address` in host memory, or else `read` fills a buffer with them, from a byte
    offset on and for a length that are multiples of the item size. `owner` is what was given to be
    saved, `held` its memory, which has to be there before and after each read (None: nobody else
    has it). `ranges` are those of a `PartialSource`. `aliases` are other tensors over that memory,
    by which it may be changed without its being counted on `owner`: a DTensor, of which `owner` is
    the local one, and tensors that are saved as views of this.
    """

    element: ElementType
    shape: Shape
    address: int | None
    read: Callable[[int, memoryview], None] | None
    owner: object
    ranges: tuple[tuple[int, int], ...] | None = None
    held: Held | None = None
    aliases: tuple[torch.Tensor, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.element.itemsize


_TENSOR_TYPES = frozenset({torch.Tensor, torch.nn.Parameter})
_in_func = torch._C._functorch.is_functorch_wrapped_tensor


def is_data_leaf(value: object) -> bool:
    """Whether a value of a state tree is saved as tensor data."""
    if type(value) in _TENSOR_TYPES:
        return True
    return isinstance(value, torch.Tensor | np.ndarray) or _is_byte_source(value)


def _is_byte_source(value: object) -> bool:
    if isinstance(value, HeldSource):  # with many of them the question below takes milliseconds
        return True
    return isinstance(value, ByteSource) and not isinstance(value, type)


def local_tensor(value: Any) -> Any:
    """The tensor of this process behind a DTensor over one rank; anything else as it is.

    Raises TypeError for a DTensor over several.
    """
    if type(value) in _TENSOR_TYPES:
        return value
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)  # amid an import
    if kind is None or not isinstance(value, kind):
        return value
    if value.device_mesh.size() > 1:
        raise TypeError(
            f"a DTensor over {value.device_mesh.size()} ranks; use torch.distributed.checkpoint "
            "with checkpoint.dcp.StorageWriter and StorageReader"
        )
    return value.to_local()


def source_of(value: Any) -> Source:
    """The source of a data leaf. Raises TypeError, without a path, for what cannot be saved."""
    if isinstance(value, torch.Tensor):
        plain = _plain_source(value)
        if plain is not None:
            return plain
        source = tensor_source(value)
    elif isinstance(value, np.ndarray):
        source = array_source(value)
    else:
        source = _reading_source(value)
    if len(source.shape) > MAX_DIMENSIONS:
        raise TypeError(
            f"{len(source.shape)} dimensions, more than the {MAX_DIMENSIONS} that a checkpoint "
            "takes (numpy types that torch lacks need one for themselves); reshape it"
        )
    return source


def _plain_source(tensor: torch.Tensor) -> Source | None:
    """What `tensor_source` gives of a tensor as most are, in fewer steps; None of any other."""
    held = plain_memory(tensor)
    if held is None or tensor.dim() > MAX_DIMENSIONS:
        return None
    element = elements.BY_TORCH[tensor.dtype]
    return Source(element, tuple(tensor.shape), tensor.data_ptr(), None, tensor, None, held)


def plain_memory(tensor: torch.Tensor) -> HeldStorage | None:
    """The memory of a tensor as most are, whose values lie in a row in host memory that is there
    for all of them; None of any other, and of an empty one.
    """
    if type(tensor) not in _TENSOR_TYPES or tensor.dtype not in elements.BY_TORCH:
        return None
    if not tensor.is_cpu or tensor.is_nested or tensor.layout is not torch.strided:
        return None
    if not tensor.is_contiguous() or not is_plain(tensor):
        return None
    held, address = HeldStorage.of(tensor), tensor.data_ptr()
    is_there = address and address + tensor.nbytes <= held.address + held.nbytes
    return held if is_there else None


def tensor_source(tensor: torch.Tensor) -> Source:
    """Source of a strided tensor on any device."""
    _check_tensor(tensor)
    element, shape = elements.BY_TORCH[tensor.dtype], tuple(tensor.shape)
    held = None if tensor._is_zerotensor() else HeldStorage.of(tensor)
    if tensor.is_cpu and tensor.is_contiguous() and is_plain(tensor):
        return Source(element, shape, tensor.data_ptr(), None, tensor, None, held)
    reader = TensorReader(tensor.detach(), shape)
    return Source(element, shape, None, reader, tensor, None, held)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether the bytes of a strided tensor are its values: it is no negated or conjugated view, no
    ZeroTensor, all zeros without memory, which autograd hands out, and none that torch.func wraps.
    """
    return not (tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor() or _in_func(tensor))


def _check_tensor(tensor: torch.Tensor) -> None:
    """Raises TypeError for a tensor that is not plain memory somewhere."""
    kind = type(tensor)
    if kind not in _TENSOR_TYPES:
        raise TypeError(
            f"{kind.__module__}.{kind.__qualname__} is a tensor type it does not know; save a "
            "plain tensor of its values: tensor.detach().clone(), or where that is one of its type "
            "tensor.detach().as_subclass(torch.Tensor); full_tensor() of a DTensor"
        )
    if tensor.is_nested:
        raise TypeError("a nested tensor; save the list of tensors that its unbind() gives")
    if tensor.layout != torch.strided:
        raise TypeError(f"a tensor of layout {tensor.layout}; convert it with .to_dense()")
    if tensor.is_quantized:
        raise TypeError("a quantized tensor; save its .int_repr() and its scale instead")
    if tensor.dtype not in elements.BY_TORCH:
        raise TypeError(f"a tensor of {tensor.dtype} without a scale; save a view as integers")
    if tensor.is_meta:
        raise TypeError("a tensor on the meta device has no data to save")
    fault = memory_fault(tensor)
    if fault is not None:
        raise TypeError(f"a tensor {fault}")
    if not can_resolve(tensor):
        raise TypeError(
            f"a negated or conjugated tensor of {tensor.dtype}, whose values torch cannot compute"
        )


def memory_fault(tensor: torch.Tensor) -> str | None:
    """What is wrong with the memory of a strided tensor: none is there, or less than it needs."""
    if _in_func(tensor):
        return "of a transform of torch.func, without memory of its own; do it outside of that"
    if tensor._is_zerotensor():
        return None
    is_row = tensor.is_contiguous()  # as most are
    span = tensor.numel() if is_row else span_elements(tensor.shape, tensor.stride())
    needed = (int(tensor.storage_offset()) + span) * tensor.element_size()
    there = tensor.untyped_storage().nbytes() if tensor.data_ptr() else 0
    fault = f"that reaches to byte {needed} of a storage of {there}; its memory has been freed"
    return fault if span and needed > there else None


def can_resolve(tensor: torch.Tensor) -> bool:
    """Whether torch can compute the values of a tensor, if it is conjugated or negated."""
    if not tensor.is_neg() and not tensor.is_conj():
        return True
    values = torch.zeros(1, dtype=tensor.dtype, device="cpu")
    probe = values.conj() if tensor.is_conj() else values
    probe = torch._neg_view(probe) if tensor.is_neg() else probe
    try:
        values.clone().copy_(probe)
    except (RuntimeError, TypeError):
        return False
    return True


class TensorReader:
    """Reads ranges of a tensor of any strides and device by copying boxes of it; those behind its
    first `first_byte` bytes.
    """

    __slots__ = ("_first_byte", "_shape", "tensor")

    def __init__(self, tensor: torch.Tensor, shape: Shape, first_byte: int = 0) -> None:
        self.tensor = tensor
        self._shape = shape
        self._first_byte = first_byte

    def __call__(self, start: int, out: memoryview) -> None:
        for target, values in self.boxes(start, out):
            target.copy_(values)

    def boxes(self, start: int, out: memoryview) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What to copy there, as parts of `out` and of the tensor."""
        tensor = integer_view(self.tensor)
        start += self._first_byte
        assert start % tensor.element_size() == 0, "pieces begin with an element"
        flat = torch.frombuffer(out, dtype=tensor.dtype)
        first = start // tensor.element_size()
        done = 0
        for slices, shape in range_boxes(self._shape, first, first + flat.numel()):
            count = math.prod(shape)
            yield flat[done : done + count].view(shape), tensor[slices]
            done += count

    def behind(self, first_byte: int) -> TensorReader:
        """The reader of what lies behind so many bytes of this."""
        return TensorReader(self.tensor, self._shape, self._first_byte + first_byte)


def integer_view(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor under a dtype that every device can copy; conjugation is left to the copy."""
    if tensor.is_complex() or tensor.is_neg():
        return tensor
    return tensor.view(_INTEGERS[tensor.element_size()])


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def array_source(array: np.ndarray[Any, Any]) -> Source:
    """Source of a numpy array; a dtype that torch lacks travels as bytes in one more dimension."""
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError("a masked array; save its .data and its .mask as two arrays")
    if type(array) is not np.ndarray:
        raise TypeError(f"{type(array).__name__}, a kind of array; convert it with numpy.asarray")
    element, extra = elements.of_numpy(array.dtype)
    shape = tuple(array.shape) + extra
    held = HeldArray(array)
    if array.flags.c_contiguous:
        return Source(element, shape, array.ctypes.data, None, array, None, held)
    if array.dtype.fields is not None:
        # numpy copies the fields of a record and leaves what lies between them as it was.
        array = array.view(np.dtype((np.void, array.dtype.itemsize)))
    return Source(element, shape, None, _ArrayReader(array), array, None, held)


class _ArrayReader:
    __slots__ = ("_array",)

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        self._array = array

    def __call__(self, start: int, out: memoryview) -> None:
        array = self._array
        itemsize = array.dtype.itemsize
        raw = np.frombuffer(out, np.uint8)
        done = 0
        first, into = divmod(start, itemsize)
        last, beyond = divmod(start + len(raw), itemsize)
        if into or beyond:
            self._read_ragged(start, raw)
            return
        for slices, shape in range_boxes(tuple(array.shape), first, last):
            nbytes = math.prod(shape) * itemsize
            target = raw[done : done + nbytes].view(array.dtype).reshape(shape)
            target[...] = array[slices]
            done += nbytes

    def _read_ragged(self, start: int, raw: np.ndarray[Any, Any]) -> None:
        """Item sizes that are no power of two (a 12-byte string) do not end where blocks do."""
        itemsize = self._array.dtype.itemsize
        first = start // itemsize
        last = -(-(start + len(raw)) // itemsize)
        whole = bytearray((last - first) * itemsize)
        self(first * itemsize, memoryview(whole))
        skip = start - first * itemsize
        raw[:] = np.frombuffer(whole, np.uint8)[skip : skip + len(raw)]


def _reading_source(source: ByteSource) -> Source:
    if source.dtype not in elements.BY_TORCH:
        raise TypeError(
            f"a byte source of dtype {source.dtype!r}, which is not a plain torch dtype"
        )
    try:
        shape = tuple(operator.index(size) for size in source.shape)
    except TypeError as error:
        raise TypeError(f"a byte source of shape {source.shape!r}") from error
    if any(size < 0 for size in shape):
        raise TypeError(f"a byte source of shape {shape}")
    if isinstance(source, HeldSource) and (address := source.address) is not None:
        element = elements.BY_TORCH[source.dtype]
        return Source(element, shape, address, None, source, None, source)
    ranges = _ranges_of(source) if isinstance(source, PartialSource) else None
    read = in_turn(source, source.read)
    return Source(elements.BY_TORCH[source.dtype], shape, None, read, source, ranges)


def _ranges_of(source: PartialSource) -> tuple[tuple[int, int], ...]:
    try:
        return tuple(
            (operator.index(first), operator.index(length)) for first, length in source.ranges
        )
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"a byte source with ranges={source.ranges!r}, which are not pairs (first, length)"
        ) from error


def part_of(source: Source, first_byte: int, shape: Shape) -> Source:
    """The source of a box of another that is one gapless range of it, from `first_byte` on."""
    address, read = source.address, source.read
    if address is not None:
        address += first_byte
    else:
        assert read is not None
        if isinstance(read, TensorReader):
            read = read.behind(first_byte)
        else:
            read = _Shifted(read, first_byte)
    return Source(source.element, shape, address, read, source.owner, None, source.held)


@dataclass(frozen=True, slots=True)
class _Shifted:
    read: Callable[[int, memoryview], None]
    first_byte: int

    def __call__(self, start: int, out: memoryview) -> None:
        self.read(self.first_byte + start, out)
