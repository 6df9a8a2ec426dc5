"""`open`: a checkpoint as a mapping from names to tensors that are read when they are indexed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn

import numpy as np
import torch

from aio.errors import check_flag
from checkpoint.directory.destination import PathLike, checkpoint_path
from checkpoint.directory.relocation import StripeDirs, relocation
from checkpoint.format import elements
from checkpoint.format.names import closest
from checkpoint.format.slices import Shape
from checkpoint.format.tree import DataNode, data_nodes
from checkpoint.loading.opened import OpenCheckpoint, open_current
from checkpoint.plan.indexing import Index, indexed_box
from checkpoint.tensors.assembly import TensorView, array_dtype, array_over, view_of
from checkpoint.tensors.sources import integer_view


def open_lazily(
    path: PathLike, *, verify: bool = True, stripe_dirs: StripeDirs | None = None
) -> LazyCheckpoint:
    """Opens a checkpoint without reading any of its tensors: `open(path)["model.h.0.weight"][:8]`.

    It stands for the save that was there when it was opened, also when another one takes its place:
    data files that are gone then are read where they are open, as the 64 are that were used last;
    to read of others is a FileNotFoundError.
    `verify=False` skips the checksums of data; `stripe_dirs` is as in `load`.

    Raises what `load` raises for a missing, incomplete or corrupt checkpoint.
    """
    check_flag("verify", verify)
    return LazyCheckpoint(
        open_current(checkpoint_path(path), relocation(stripe_dirs), verify=verify)
    )


class _Unread:
    """Nothing like a tensor to torch: what is, modules take for a buffer without a look at it."""

    __slots__ = ()

    instead_of_itself: ClassVar[str]
    """What gives the values."""

    def refused(self, what: str) -> TypeError:
        """The error of `what`, which is done with values."""
        return TypeError(f"{what} of {self!r}, which is not read yet; {self.instead_of_itself}")


def _refusing(what: str) -> Callable[..., NoReturn]:
    def refuse(self: _Unread, *_: object, **__: object) -> NoReturn:
        raise self.refused(f"`{what}`")

    return refuse


class _Named(type):
    """Of a class that says what to do where an error names the class of what was given, as that of
    `load_state_dict` does.
    """

    def __repr__(cls) -> str:
        return f"{super().__repr__()}, which is not read yet ({vars(cls)['instead_of_itself']})"


class _UnreadTensor(_Unread):
    """Has neither the operators nor the other attributes that tensors and arrays have. It is equal
    to itself alone, and compared with nothing that may be values.
    """

    __slots__ = ()

    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self._is(other, "==")

    def __ne__(self, other: object) -> bool:
        return not self._is(other, "!=")

    def _is(self, other: object, what: str) -> bool:
        if other is not None and not isinstance(other, _Unread):
            raise self.refused(f"`{what}`")
        return self is other

    if not TYPE_CHECKING:  # where a program is checked, it has none of these
        __add__ = __radd__ = _refusing("+")
        __sub__ = __rsub__ = __neg__ = _refusing("-")
        __mul__ = __rmul__ = _refusing("*")
        __truediv__ = __rtruediv__ = _refusing("/")
        __floordiv__ = __rfloordiv__ = _refusing("//")
        __mod__ = __rmod__ = _refusing("%")
        __pow__ = __rpow__ = _refusing("**")
        __matmul__ = __rmatmul__ = _refusing("@")
        __and__ = __rand__ = _refusing("&")
        __or__ = __ror__ = _refusing("|")
        __xor__ = __rxor__ = _refusing("^")
        __invert__ = _refusing("~")
        __abs__ = _refusing("abs")
        __lt__, __le__ = _refusing("<"), _refusing("<=")
        __gt__, __ge__ = _refusing(">"), _refusing(">=")
        __int__, __float__, __complex__ = map(_refusing, ("int", "float", "complex"))
        __bool__, __index__ = _refusing("bool"), _refusing("use as an index")
        __bytes__ = _refusing("bytes")
        __round__, __divmod__, __rdivmod__ = map(_refusing, ("round", "divmod", "divmod"))
        __lshift__ = __rlshift__ = _refusing("<<")
        __rshift__ = __rrshift__ = _refusing(">>")

        def __len__(self) -> NoReturn:
            """With a length torch would take what indexes a tensor for a tuple of indices."""
            raise TypeError(f"{self.refused('`len`')}; its rows are `shape[0]`")

        def __array_ufunc__(self, function: object, *_: object, **__: object) -> NoReturn:
            raise self.refused(f"numpy's {getattr(function, '__name__', function)}")

        def __array_function__(self, function: object, *_: object) -> NoReturn:
            raise self.refused(f"numpy's {getattr(function, '__name__', function)}")

        __setitem__ = _refusing("a change")

        def __getattr__(self, name: str) -> NoReturn:
            if not hasattr(torch.Tensor, name) and not hasattr(np.ndarray, name):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(
                f"{name!r} of {self!r}, which is not read yet; {self.instead_of_itself}"
            )


class LazyCheckpoint(_Unread, Mapping[str, "LazyTensor"]):
    """The tensors and arrays of one save, by the names that `list_tensors` gives, in its order.

    Closed by `close`, at the end of a `with`, or when it is forgotten. It may be used from several
    threads at once, but not in a forked child, and is not pickled: open it there again.
    """

    instead_of_itself: ClassVar[str] = (
        "index it by a name, and what that gives by `[...]`; checkpoint.load reads all of it"
    )

    def __init__(self, opened: OpenCheckpoint) -> None:
        self._opened: OpenCheckpoint | None = opened
        self._path = opened.path
        try:
            self._nodes = data_nodes(opened.manifest.tree)
        except BaseException:
            opened.close()
            raise

    def __getitem__(self, name: str) -> LazyTensor:
        """Raises KeyError with similar names, CorruptCheckpointError for what is none to read."""
        if name not in self._nodes:
            similar = closest(name, self._nodes) if isinstance(name, str) else []
            hint = f"; there is {', '.join(map(repr, similar))}" if similar else ""
            raise KeyError(f"{name!r} is no tensor of {self._path}{hint}")
        path, node = self._nodes[name]
        return LazyTensor(name, self, node, view_of(self.opened.manifest, path, node))

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __contains__(self, name: object) -> bool:
        return name in self._nodes

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)

    def __repr__(self) -> str:
        closed = ", closed" if self._opened is None else ""
        return f"<checkpoint {str(self._path)!r}, {len(self)} tensors{closed}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            f"{self!r} is open in this process and is not pickled; hand its path on, and open it "
            "there"
        )

    @property
    def opened(self) -> OpenCheckpoint:
        """What reads. Raises ValueError if it was closed."""
        if self._opened is None:
            raise ValueError(f"{self!r} cannot be read from; open it again")
        return self._opened

    def close(self) -> None:
        """Closes the files; tensors that were read stay. Idempotent."""
        opened, self._opened = self._opened, None
        if opened is not None:
            opened.close()

    def __enter__(self) -> LazyCheckpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True, repr=False, eq=False)
class LazyTensor(_UnreadTensor, metaclass=_Named):
    """One tensor or array of a checkpoint: its shape and dtype at once, its values by indexing.

    Integers, slices and `...` give a new tensor on the CPU, without gradients, or a new array for
    what was saved as one. Read are the grains that the index touches (pages of 4096 bytes, or more
    where there is very much), or checksum blocks of 16 MiB where a checkpoint has none, each
    verified before anybody sees a byte of it; in memory are, beside the result, the last of them
    (64 MiB). With a step it is the whole range that the steps lead through.

    `numpy.asarray` reads all of it. Otherwise it is no tensor, and no array: `len`, `bool`,
    operators, `==` and functions of numpy are refused by a TypeError that says so; `shape[0]` is
    what `len` would give.
    """

    instead_of_itself: ClassVar[str] = "index it: `[...]` gives all of it, in memory"

    name: str
    _checkpoint: LazyCheckpoint
    _node: DataNode
    _view: TensorView

    @property
    def shape(self) -> Shape:
        """Sizes of its dimensions."""
        return self._view.shape[: len(self._view.shape) - len(self._carried)]

    @property
    def dtype(self) -> torch.dtype | np.dtype[Any]:
        """torch's for a tensor, numpy's for an array."""
        array = array_dtype(self._node)
        return self._view.dtype if array is None else array

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all its elements."""
        return int(np.prod(self._view.shape, dtype=object)) * self._view.dtype.itemsize

    @property
    def _carried(self) -> Shape:
        """Trailing sizes of what is stored that are one element of an array."""
        array = array_dtype(self._node)
        return () if array is None else elements.of_numpy(array)[1]

    def __array__(
        self, dtype: np.dtype[Any] | None = None, copy: bool | None = None
    ) -> np.ndarray[Any, Any]:
        """All of it, in memory. Raises what indexing does, and TypeError for a dtype of torch that
        numpy lacks, before anything is read.
        """
        if copy is False:
            raise ValueError(f"{self!r} is not read yet, and cannot be had without a copy")
        if isinstance(self.dtype, torch.dtype):
            try:
                torch.empty(0, dtype=self.dtype, device="cpu").numpy()
            except TypeError as error:
                what = f"numpy has no {self.dtype}, which {self!r} is of; convert `[...]` of it"
                raise TypeError(f"{what}, by `.float()` for one") from error
        return np.asarray(self[...], dtype=dtype)

    def __iter__(self) -> Iterator[Any]:
        """Rows, each read as it comes. Raises TypeError without dimensions."""
        if not self.shape:
            raise TypeError(f"{self!r} has no dimension to go along; its value is at [()]")
        return (self[row] for row in range(self.shape[0]))

    def __repr__(self) -> str:
        return f"<{self.name!r}, {self.dtype} of shape {self.shape}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise self.refused("a pickle or a copy")

    def __getitem__(self, index: Index) -> Any:
        """The values at `index`.

        Raises IndexError for an integer out of range and for too many of them, TypeError for what
        is neither integer nor slice nor `...`, ValueError for a step below one and for a closed
        checkpoint, RuntimeError under FakeTensorMode and in the handler of a signal that came in
        the midst of another read of this checkpoint, CorruptCheckpointError naming file, tensor and
        extent, FileNotFoundError for data that went with their save, AioError.
        """
        box = indexed_box(self.shape, index, repr(self.name))
        start = box.start + (0,) * len(self._carried)
        opened, shape = self._checkpoint.opened, box.shape + self._carried
        values = _read(opened, self.name, self._view, start, shape)
        if "array" in self._node:
            # With integers alone numpy gives a number, but for the dots.
            array = array_over(self._node, values)[(*box.picks, ...)]
            return array.copy() if box.skips else array
        tensor = values[box.picks]
        return _copied(tensor) if box.skips else tensor


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """As integers: torch clones no tensor of int4, for one."""
    copy = torch.empty_like(tensor)
    integer_view(copy).copy_(integer_view(tensor))
    return copy


def _read(
    opened: OpenCheckpoint, name: str, view: TensorView, start: Shape, shape: Shape
) -> torch.Tensor:
    """A box of a leaf, in memory of its own."""
    values = torch.empty(shape, dtype=view.dtype, device="cpu")
    if type(values) is not torch.Tensor:
        raise RuntimeError(
            f"{name!r} was indexed under a mode in which new tensors are of {type(values).__name__}"
            ", without memory for values (FakeTensorMode?); index it outside of the mode"
        )
    if values.numel():
        opened.read_leaf(view, start, values)
    return values
