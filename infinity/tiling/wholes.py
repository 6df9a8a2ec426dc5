"""Tiles put together: their memory while that is the program's to change, or else copies.

What is written into a copy reaches no tile: it counts as a change of one, which is told as an error
before the model is used again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from infinity.parameters.offloaded.changes import (
    Changes,
    LentMemory,
    copy_of,
    version_probe_of,
    wait_for,
    writes_later,
)
from infinity.parameters.offloaded.modes import outside_inference, own_modes, without_history
from infinity.parameters.offloaded.parameter import SHOWS_MEMORY
from infinity.parameters.offloaded.placeholders import as_they_are, storage_of
from infinity.tiling.tile import Tile


class _Joined(torch.autograd.Function):
    """``joined_of`` the arguments, with history."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*parts: torch.Tensor) -> torch.Tensor:
        joined = joined_of(parts)
        # A view, which autograd refuses to have changed in place, as it does with a leaf.
        return joined if _first_absent(parts) is not None else joined[:]

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[torch.Tensor], output: Any) -> None:
        ctx.sizes = [len(part) for part in inputs]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.split(ctx.sizes)


def with_history(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``joined_of(parts)``, which gradients flow through to them."""
    return _join(*parts)


_join: Callable[..., torch.Tensor] = _Joined.apply


def joined_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows that ``parts`` have, without history: where they are if they are the program's to
    change now, or a copy that shares the version of one that is not.
    """
    absent = _first_absent(parts)
    if absent is None:
        # No view to autograd, which refuses what has history in views that were made without.
        return _in_one_piece(parts).detach()
    return _counted_as(absent, parts)


@without_history
def _counted_as(absent: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    with outside_inference():
        whole = torch.cat([part.clone() for part in parts])
        with torch._C.DisableTorchFunctionSubclass(), as_they_are():
            counted: torch.Tensor = absent.detach()
            counted.data = whole
    return counted


def on_wholes(func: Any, args: Any, kwargs: Any, found: Mapping[int, Any]) -> Any:
    """``func`` of the wholes of the weights ``found``, by ``id``, among its arguments; what it
    changed of them is brought to the tiles. Raises ``RuntimeError`` for changes of copies that
    torch does not count.
    """
    counting = {key: _first_absent(weight.tiles) for key, weight in found.items()}
    wholes = {key: weight.cut_whole() for key, weight in found.items()}
    parts = {whole.untyped_storage()._cdata: found[key].tiles for key, whole in wholes.items()}
    if func in SHOWS_MEMORY:
        wholes = {key: watched(whole, parts) for key, whole in wholes.items()}
    absent = [weight for weight in found.values() if not all(map(is_program_s, weight.tiles))]
    if absent and (func is torch.Tensor.share_memory_ or writes_later(func)):
        _refuse_change(func, absent[0])
    changes = {id(weight): Changes(func, wholes[id(weight)]) for weight in absent}
    versions = {key: _version_of(whole, counting[key]) for key, whole in wholes.items()}

    def put(value: Any) -> Any:
        return wholes[id(value)] if id(value) in found else value

    result = func(*tree_map(put, args), **tree_map(put, kwargs))
    wait_for(func, result)
    for key, change in changes.items():
        if change.are_in_bytes():
            _refuse_change(func, found[key])
    for key, whole in wholes.items():
        if _version_of(whole, counting[key]) != versions[key]:
            found[key].cut_bring_back(whole)
    by_whole = {id(whole): found[key] for key, whole in wholes.items()}

    def seen(value: Any) -> Any:
        return by_whole[id(value)] if id(value) in by_whole else watched(value, parts)

    return tree_map(seen, result)


def _version_of(whole: torch.Tensor, absent: Any) -> int:
    """Of a whole with the version of ``absent``, if that is one: less the updates, which other
    threads may make meanwhile, and which are none of the whole.
    """
    if absent is None:
        return whole._version
    version: int = absent.offload_owner.version_beside_updates(absent.offload_index, whole)
    return version


def _refuse_change(func: Any, weight: Any) -> NoReturn:
    raise RuntimeError(
        f"{getattr(func, '__name__', func)} of {weight._cut_name}, which is in tiles while the "
        "model is offloaded, would reach a copy of it; do this inside `with "
        "offloaded.gathered([parameter], modify=True):`"
    )


def kept_whole_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``joined_of(parts)`` for a program to keep, whatever it does with it."""
    whole = joined_of(parts)
    kept: torch.Tensor = watched(whole, {whole.untyped_storage()._cdata: parts})
    return kept


def watched(leaf: Any, wholes: Mapping[int, Sequence[Any]]) -> Any:
    """``leaf``, or a copy if it is a tensor without history that lies in a copy of tiles, which are
    in ``wholes`` by the storage of that: also changes that torch does not count are noticed in it.
    """
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        return leaf
    if leaf.requires_grad and torch.is_grad_enabled():
        return leaf
    with torch._C.DisableTorchFunctionSubclass():
        storage = storage_of(leaf)
    absent = _first_absent(wholes.get(storage, ()))
    if absent is None:
        return leaf
    return copy_of(leaf, absent, absent.offload_index, absent.offload_owner)


def _first_absent(parts: Sequence[Any]) -> Any:
    return next((part for part in parts if not is_program_s(part)), None)


def is_program_s(tile: Any) -> bool:
    """Whether it holds values of its own now, which are the program's to change."""
    if not getattr(tile, "is_offloaded", False):
        return True
    gathered: bool = tile.offload_owner.is_gathered(tile.offload_index)
    return gathered


def check_own_data(tiles: Sequence[Tile], name: str) -> None:
    """Raises ``RuntimeError`` where what stands for the tiles is assigned to the data of them, and
    was taken before these were the program's: it has no values from then.
    """
    if all(is_program_s(tile.parameter) for tile in tiles):
        raise RuntimeError(
            f"the data of {name}, which is in tiles, was taken outside of gathered() and has the "
            "values of the weight as they are now, not as they were then; keep "
            "`weight.detach().clone()`, or take it inside"
        )


@torch.no_grad()
def replace_data(
    tiles: Sequence[tuple[Tile, slice]],
    name: str,
    weight: torch.Tensor,
    data: torch.Tensor,
    *,
    is_view: bool,
) -> None:
    """Let the tiles, which ``weight`` or what it is a view of stands for, be these rows of
    ``data``, as torch has it: what has the memory of before keeps the values of before.

    Raises ``RuntimeError`` where it cannot be.
    """
    parts = [tile.parameter for tile, _ in tiles]
    if not all(map(is_program_s, parts)) or data.shape != weight.shape:
        raise RuntimeError(
            f"the data of {name}, which is in tiles, can be replaced by what is of its shape "
            "alone, inside `with offloaded.gathered([parameter], modify=True):`"
        )
    is_plain = type(data) in (torch.Tensor, nn.Parameter) and data.layout == torch.strided
    first = parts[0]
    if is_view:
        weight.copy_(data)
        return
    if not is_plain or data.dtype != first.dtype or data.device != first.device:
        data = first.detach().new_empty(data.shape).copy_(data)
    with outside_inference():  # what a mode without versions made counts no changes later
        data = data.clone() if data.is_inference() else data
    for tile, rows in tiles:
        tile.parameter.data = data[rows]


def put_rows(tiles: Sequence[tuple[Tile, slice]], whole: torch.Tensor) -> None:
    """Let the tiles have these rows of ``whole``, unless they are them."""
    parts = [(tile.parameter, whole[rows]) for tile, rows in tiles]
    if all(
        part.data_ptr() == rows.data_ptr() and part.stride() == rows.stride()
        for part, rows in parts
    ):
        return
    if any(rows.data_ptr() == part.data_ptr() for part, rows in parts):
        whole = whole.clone()  # it lies in their memory, in another order, as after ``t_``
    for tile, rows in tiles:
        tile.parameter.copy_(whole[rows])


_pieces: dict[int, tuple[StorageWeakRef, list[torch.Tensor]]] = {}
"""What has the versions of tiles that lie in one storage, by that."""


@dataclass(frozen=True, slots=True, eq=False)
class VersionsOf:
    """Versions of a tensor and of the tiles that lie in the same memory, where what changes one
    changes the whole, as without tiles.
    """

    tiles: Sequence[torch.Tensor]
    versions: Sequence[int]

    @staticmethod
    def now(tensor: torch.Tensor) -> VersionsOf | None:
        """None where no tiles lie in that memory."""
        if not _pieces or tensor.layout != torch.strided:
            return None
        piece = _pieces.get(storage_of(tensor))
        if piece is None or piece[0].expired():
            return None
        return VersionsOf(piece[1], [tile._version for tile in piece[1]])

    @staticmethod
    def of_tile(weight: torch.Tensor) -> VersionsOf:
        """Those of a tile, and of others that lie in one memory with it."""
        return VersionsOf.now(weight) or VersionsOf([weight], [weight._version])

    @property
    def are_same(self) -> bool:
        """Whether nothing has changed since."""
        return [tile._version for tile in self.tiles] == self.versions


def note_piece(parts: Sequence[torch.Tensor]) -> None:
    """These, which are tiles of one weight if they are several, lie in one storage from now on."""
    if len(parts) < 2:
        return
    for storage, (seen, _) in [*_pieces.items()]:
        if seen.expired():
            _pieces.pop(storage, None)
    where = StorageWeakRef(parts[0].untyped_storage())
    with torch._C.DisableTorchFunctionSubclass(), as_they_are():
        _pieces[storage_of(parts[0])] = where, [version_probe_of(part) for part in parts]


@own_modes
def _in_one_piece(parts: Sequence[Any]) -> torch.Tensor:
    """The whole, in one piece of memory, which the tiles are parts of from now on."""
    shape = torch.Size([sum(len(part) for part in parts), *parts[0].shape[1:]])
    if not lie_as_cut(parts):
        lent = LentMemory.of((part.detach() for part in parts), shape.numel())
        for part, (rows, memory) in zip(parts, lent, strict=True):
            come, part.data = part.data_ptr(), rows
            if getattr(part, "is_offloaded", False):
                lies = part.offload_owner.loans.memory
                lies.moves(part.offload_index, memory, come, part.data_ptr())
    note_piece(parts)
    first: torch.Tensor = parts[0].detach()
    return first.as_strided(shape, first.stride(), first.storage_offset())


def lie_as_cut(tiles: Sequence[torch.Tensor]) -> bool:
    """Whether they are rows of one tensor still, the next behind the last."""
    kind = _memory_of(tiles[0])
    at = tiles[0].storage_offset()
    for tile in tiles:
        if _memory_of(tile) != kind or tile.storage_offset() != at:
            return False
        at += tile.shape[0] * tile.stride(0)
    return True


def _memory_of(tile: torch.Tensor) -> tuple[object, ...]:
    """Where and how its elements lie, but for where they begin."""
    where = tile.untyped_storage()._cdata
    return where, tile.stride(), tile.dtype, tile.is_neg(), tile.is_conj()
