"""Loading into a tree that is there: which leaf of it takes which leaf of the checkpoint.

Leaves belong together by their keys; where keys differ (`{"a": {"b": t}}` and `{"a.b": t}`) by
their names. Nothing is written before everything fits.
"""

from __future__ import annotations

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from checkpoint.format import elements
from checkpoint.format.names import Path, kind_of, natural_name, render
from checkpoint.format.records import Manifest
from checkpoint.format.slices import may_overlap_itself
from checkpoint.format.tree import EncodedTree, Leaf, encode_tree, has_state_dict
from checkpoint.loading.reading import TensorRead
from checkpoint.loading.saved_leaves import SavedLeaves
from checkpoint.outside import carrying, outside
from checkpoint.plan.selection import Selection
from checkpoint.tensors.assembly import Assembler, TensorView, array_dtype, comes_as, view_of
from checkpoint.tensors.changes import count_changes
from checkpoint.tensors.parts import Part, PartsTarget, part_of_view, targets_of
from checkpoint.tensors.sources import (
    ByteSink,
    PartialSink,
    can_resolve,
    integer_view,
    local_tensor,
    memory_fault,
    plain_memory,
)
from checkpoint.tensors.targets import SinkTarget, Target, TensorTarget

Finish = Callable[[], None]


@dataclass(slots=True)
class IntoPlan:
    """What to read into the live tree, and what remains to do when that has been read.

    `written` are the live tensors, whose changes are counted before the first byte and after the
    last one: whoever looks in between has seen a change, too.
    """

    reads: list[TensorRead]
    copies: list[Finish]
    replace: Callable[[], Any]
    written: list[torch.Tensor] = field(default_factory=list)

    def finish(self) -> Any:
        """Copies what could not be read in place, replaces plain values, gives the tree."""
        for copy in self.copies:
            copy()
        count_changes(self.written)
        return self.replace()


_CONTAINERS = (dict, OrderedDict, list, tuple)
_IN_MEMORY = (torch.Tensor, np.ndarray)
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Are no sinks. There may be a million, and to ask for the members of a protocol is slow."""


def is_target(value: object) -> bool:
    """Whether a leaf of a live tree takes tensor data."""
    if type(value) in _PLAIN:
        return False
    if isinstance(value, _IN_MEMORY):
        return True
    with outside():  # asking whether it has an attribute may call code of its own
        return isinstance(value, ByteSink) and not isinstance(value, type)


def count_whole_targets(tree: Any) -> int:
    """How many leaves of a live tree take all of a tensor."""
    if type(tree) in _CONTAINERS:
        return sum(count_whole_targets(item) for _, item in _items(tree))
    if isinstance(tree, _IN_MEMORY):
        return 1  # to ask a nested tensor for the attributes of a protocol is an error
    with outside():
        return int(is_target(tree) and not isinstance(tree, PartialSink))


def plan_into(
    manifest: Manifest, into: Any, selection: Selection, dtype: torch.dtype | None = None
) -> IntoPlan:
    """Matches a live tree with a checkpoint, whose floating-point tensors come in `dtype`.

    Raises ValueError naming the leaf that the checkpoint lacks or that has another dtype or shape,
    TypeError for a live tree that holds what no checkpoint holds.
    """
    plan = check_into(manifest, into, selection, dtype)
    count_changes(plan.written)
    return plan


def check_into(
    manifest: Manifest, into: Any, selection: Selection, dtype: torch.dtype | None = None
) -> IntoPlan:
    """As ``plan_into``, and nothing of the live tree counts as changed yet."""
    saved = SavedLeaves(manifest)
    live = encode_tree(into, is_target, _refusal)
    assembler = Assembler(manifest, None, dtype=dtype)
    plan = IntoPlan([], [], lambda: _replace((), into, saved, selection))
    parts: dict[int, list[Part]] = {}
    absent = 0
    for leaf, name, place in _wanted_leaves(live, saved, selection):
        if not selection.is_strict and saved.lacks(place):
            absent += 1
            continue
        path, node = saved.data(place, name)
        view = view_of(manifest, path, node)
        target = _target(place, leaf.value, view, array_dtype(node), dtype)
        plan.written.extend(_tensors_of(leaf.value, target))
        if view.is_whole:
            plan.reads.append(TensorRead(view.tensor, target))
        elif not _is_cast(target) and (
            part := part_of_view(manifest.tensors[view.tensor], view, target)
        ):
            parts.setdefault(view.tensor, []).append(part)
        else:
            # Its bytes lie apart in another tensor's: read that one whole, then copy.
            plan.copies.append(_copy(assembler.build(path, node), target))
    plan.reads.extend(
        TensorRead(index, PartsTarget(manifest.tensors[index], own)) for index, own in parts.items()
    )
    plan.reads.extend(
        TensorRead(index, target)
        for index, target in targets_of(manifest, assembler.tensors, {}).items()
    )
    if selection.is_strict:
        saved.check_empty(_ends((), into), selection.wants)
    num_values = _check_values((), into, saved, selection)
    if plan.reads or num_values or saved.is_empty:
        return plan
    if absent:
        raise ValueError(
            f"none of the {absent} tensors of into is in the checkpoint, which "
            f"{saved.some_names()}; strict=False allows for some that are not, not for all"
        )
    if selection.is_everything:
        raise ValueError(
            f"into has no leaf that is in the checkpoint, which {saved.some_names()}; leave it out "
            "to load new ones"
        )
    return plan


def names_lacking(manifest: Manifest, into: Any, selection: Selection) -> set[str]:
    """Names of leaves of a live tree, of those asked for, that take data which is not saved. Not
    all have to be.
    """
    saved = SavedLeaves(manifest)
    live = encode_tree(into, is_target, _refusal)
    return {name for _, name, place in _wanted_leaves(live, saved, selection) if saved.lacks(place)}


def values_lacking(manifest: Manifest, into: Any, selection: Selection) -> set[str]:
    """Names of plain values of a live tree, of those asked for and replaced in it, that are not
    saved.
    """
    saved = SavedLeaves(manifest)
    names = {natural_name(path) for path in _values_in((), into) if saved.lacks(path)}
    return set(filter(selection.wants, names))


def _wanted_leaves(
    live: EncodedTree, saved: SavedLeaves, selection: Selection
) -> Iterator[tuple[Leaf, str, Path]]:
    """The leaves of a live tree that are asked for, each with the first of its places that is; if
    not all have to be saved, with the first of these that is.
    """
    found: dict[int, tuple[Leaf, str, Path]] = {}
    for name, (place, leaf) in zip(live.by_name, live.places, strict=True):
        if not selection.wants(name):
            continue
        known = found.setdefault(id(leaf), (leaf, name, place))
        if not selection.is_strict and saved.lacks(known[2]) and not saved.lacks(place):
            found[id(leaf)] = leaf, name, place
    yield from found.values()


def _refusal(path: Path, value: object) -> str:
    what = f"cannot load: {render(path, 'into')} is a {kind_of(value)}; "
    if has_state_dict(value):
        return what + (
            "give what its state_dict() returns, and hand what load returns to its "
            "load_state_dict()"
        )
    return what + "give plain containers of tensors, arrays and byte sinks, or leave out into="


def _tensors_of(value: Any, target: Target) -> Iterator[torch.Tensor]:
    """A live tensor, and the local one behind it where that is another."""
    if isinstance(value, torch.Tensor):
        yield value
    if isinstance(target, TensorTarget) and target.tensor is not value:
        yield target.tensor


def _items(tree: Any) -> list[tuple[object, Any]]:
    return list(tree.items() if isinstance(tree, dict) else enumerate(tree))


def _values_in(path: Path, tree: Any, is_held: bool = False) -> Iterator[Path]:
    """Places of plain values that are replaced where they are: what is in tuples alone is not."""
    if type(tree) in _CONTAINERS:
        is_held = is_held or type(tree) is not tuple
        for key, item in _items(tree):
            yield from _values_in((*path, key), item, is_held)
    elif is_held and not is_target(tree):
        yield path


def _ends(path: Path, tree: Any) -> Iterator[tuple[Path, bool]]:
    """Places of leaves and of what is empty, and which of the two it is: whether it is empty."""
    if type(tree) not in _CONTAINERS:
        yield path, False
    elif path and not tree:
        yield path, True
    for key, item in _items(tree) if type(tree) in _CONTAINERS else ():
        yield from _ends((*path, key), item)


def _check_values(path: Path, into: Any, saved: SavedLeaves, selection: Selection) -> int:
    """How many plain values of the live tree are to be replaced. Raises ValueError for one that the
    checkpoint lacks.
    """
    if type(into) in _CONTAINERS:
        return sum(
            _check_values((*path, key), item, saved, selection) for key, item in _items(into)
        )
    if is_target(into) or not selection.wants(natural_name(path)):
        return 0
    if not selection.is_strict and saved.lacks(path):
        return 0
    saved.value(path)
    return 1


def _replace(path: Path, into: Any, saved: SavedLeaves, selection: Selection) -> Any:
    """Puts saved plain values where the live tree has old ones; tuples are made anew if need be."""
    kind = type(into)
    if kind in _CONTAINERS:
        changed = [
            (key, item, _replace((*path, key), item, saved, selection))
            for key, item in _items(into)
        ]
        if kind is tuple:
            same = all(old is new for _, old, new in changed)
            return into if same else tuple(new for _, _, new in changed)
        for key, old, new in changed:
            if old is not new:
                into[key] = new
        return into
    if is_target(into) or not selection.wants(natural_name(path)):
        return into
    if not selection.is_strict and saved.lacks(path):
        return into
    return saved.value(path)


def _is_cast(target: Target) -> bool:
    """Whether the bytes that come are not those that a target has in the end."""
    return isinstance(target, TensorTarget) and target.saved != target.tensor.dtype


def _target(
    path: Path,
    value: Any,
    view: TensorView,
    saved: np.dtype[Any] | None,
    cast: torch.dtype | None,
) -> Target:
    """The target that a live leaf is. `saved` is the dtype of an array, None for a tensor; `cast`
    the one in which floating-point numbers of tensors come.

    Raises ValueError if it does not fit what was saved.
    """
    is_tensor = saved is None and cast is None and isinstance(value, torch.Tensor)
    if is_tensor and plain_memory(value) and (value.dtype, value.shape) == (view.dtype, view.shape):
        return TensorTarget(value, view.dtype, value.data_ptr())
    where = render(path, "into")
    _check_carried(where, value, saved)
    try:
        value = local_tensor(value)
    except TypeError as error:
        raise ValueError(f"{where} is {error}") from error
    if isinstance(value, np.ndarray):
        value = _array_as_tensor(where, value)
    if isinstance(value, torch.Tensor) and value.is_nested:
        raise ValueError(f"{where} is a nested tensor; give tensors that each have one shape")
    with outside():
        dtype, shape = value.dtype, tuple(value.shape)
    comes = view.dtype
    if cast is not None and saved is None and view.dtype.is_floating_point:
        comes = comes_as(f"what is saved for {where}", view.dtype, cast)
    if dtype != comes or shape != view.shape:
        converted = "" if comes == view.dtype else f", which comes as {comes}"
        raise ValueError(
            f"{where} is {dtype} of shape {shape}, the checkpoint holds {view.dtype} of shape "
            f"{view.shape}{converted}"
        )
    if not isinstance(value, torch.Tensor):
        if comes != view.dtype:
            raise ValueError(f"{where} is a byte sink, which takes {view.dtype} as it was saved")
        _check_ranges(where, value, shape)
        return SinkTarget.of(value, shape, dtype.itemsize)
    is_strided = value.layout == torch.strided and not value._is_zerotensor()
    if value.is_meta or not is_strided or value.is_quantized:
        raise ValueError(f"{where} has no plain memory to load into; give a strided tensor")
    fault = memory_fault(value)
    if fault is not None:
        raise ValueError(f"{where} is a tensor {fault}")
    if not can_resolve(value):
        raise ValueError(f"{where} is a negated tensor of {dtype}, which torch cannot write to")
    if may_overlap_itself(shape, value.stride()):
        raise ValueError(
            f"{where} is a tensor whose elements share memory with each other, as expanded ones do"
        )
    return TensorTarget.of(value, view.dtype)


def _check_ranges(where: str, sink: Any, shape: tuple[int, ...]) -> None:
    """Raises ValueError for ranges of a `PartialSink` that are none of its tensor."""
    with outside():
        if not isinstance(sink, PartialSink):
            return
        given = sink.ranges
    numel = math.prod(shape)
    try:
        len(given)  # of an iterator nothing would be left for the load
        ranges = [(operator.index(first), operator.index(length)) for first, length in given]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{where} has ranges={given!r}, which are not pairs (first, length) of elements"
        ) from error
    for first, length in ranges:
        if first < 0 or length < 0 or first + length > numel:
            raise ValueError(
                f"{where} has the range {(first, length)}, which is not within its {numel} elements"
            )


def _check_carried(where: str, value: Any, saved: np.dtype[Any] | None) -> None:
    """Where torch lacks a dtype of numpy's, bytes are stored, and what takes them must be of the
    very dtype: bytes of another one are as many and mean something else.
    """
    live = value.dtype if isinstance(value, np.ndarray) else None
    if any(_is_carried(dtype) for dtype in (live, saved)) and live != saved:
        raise ValueError(
            f"{where} is {_kind(live)}, the checkpoint holds {_kind(saved)}; such an array is "
            "loaded into one of the same dtype only"
        )


def _is_carried(dtype: np.dtype[Any] | None) -> bool:
    return dtype is not None and bool(elements.of_numpy(dtype)[1])


def _kind(dtype: np.dtype[Any] | None) -> str:
    return "no array" if dtype is None else f"an array of {dtype!r}"


def _array_as_tensor(where: str, array: np.ndarray[Any, Any]) -> torch.Tensor:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        raise ValueError(f"{where} is an array that is read-only or runs backwards; give a copy")
    _, extra = elements.of_numpy(array.dtype)
    return torch.from_numpy(array[..., None].view(np.uint8) if extra else array)


def _copy(loaded: torch.Tensor, target: Target) -> Finish:
    @carrying
    def copy() -> None:
        if isinstance(target, TensorTarget):
            live = target.tensor
            with torch.no_grad():
                # A negated tensor has no integer view; what is copied to it must be of its dtype.
                values = loaded if live.is_neg() else integer_view(loaded)
                integer_view(live).copy_(values)
            return
        values = integer_view(loaded.detach())
        # A row of one element may have any stride, and is no row of bytes then.
        row = torch.empty(values.numel(), dtype=values.dtype, device="cpu")
        flat = row.copy_(values.reshape(-1)).view(torch.uint8).numpy()
        shape = tuple(loaded.shape)
        place = target.place((0,) * len(shape), shape)
        if flat.size and place.deliver is not None:
            place.deliver(0, flat.data)

    return copy
