"""A tile: some rows of a parameter, as a parameter of a module of its own, so that hooks on modules
have one tile at a time in memory; and tiles put together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map

from infinity.parameters.offloaded.assigned import assigned
from infinity.parameters.offloaded.changes import (
    Changes,
    LentMemory,
    copy_of,
    wait_for,
    writes_later,
)
from infinity.parameters.offloaded.gradient import GradientOwner, OffloadedGradient
from infinity.parameters.offloaded.histories import ChangeCount
from infinity.parameters.offloaded.modes import outside_inference, own_modes, without_history
from infinity.parameters.offloaded.parameter import SHOWS_MEMORY
from infinity.parameters.offloaded.placeholders import as_they_are, storage_of

RowRange = tuple[int, int]
"""First row, and the row after the last."""

CHILD = "tiles"
"""What a module calls the ``TileList`` of its parameters."""


class Tile(nn.Module):
    """Rows [``start``, ``stop``) of the parameter ``name`` of the module that it belongs to."""

    def __init__(self, name: str, parameter: nn.Parameter, rows: RowRange) -> None:
        super().__init__()
        self.name = name
        self.start, self.stop = rows
        self.register_parameter(name, parameter)

    def forward(self, function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """``function`` of the weights, which are in memory for as long as it runs, and ``args``."""
        return function(getattr(self, self.name), *args)

    @property
    def parameter(self) -> nn.Parameter:
        """Itself; its weights need not be in memory."""
        found = dict.get(self._parameters, self.name)
        assert found is not None
        return found

    def extra_repr(self) -> str:
        return f"{self.name}[{self.start}:{self.stop}]"


class GradientOfTiles:
    """Keeps the gradient of a parameter whose tiles have the rows of it: the owner of an
    ``OffloadedGradient``, of which there is one, 0.
    """

    def __init__(self, tiles: Sequence[Tile], name: str) -> None:
        self._tiles = tiles
        self._name = name

    def is_there(self) -> bool:
        """Whether all tiles have gradients, and these are offloaded."""
        parts = [tile.parameter.grad for tile in self._tiles]
        return all(isinstance(part, OffloadedGradient) for part in parts)

    def gradient_age(self, _: int) -> int:
        return sum(owner.gradient_age(index) for owner, index in self._owners())

    def gradient_counts(self, _: int) -> list[ChangeCount]:
        return [count for owner, index in self._owners() for count in owner.gradient_counts(index)]

    @own_modes
    def gradient_values(self, _: int, age: int) -> torch.Tensor:
        self._check(age)
        return torch.cat(
            [
                owner.gradient_values(index, owner.gradient_age(index))
                for owner, index in self._owners()
            ]
        )

    def keep_gradient(self, _: int, values: torch.Tensor) -> None:
        for (owner, index), rows in zip(self._owners(), self._rows_of(values), strict=True):
            owner.keep_gradient(index, rows)

    def overwrite_gradient(self, _: int, age: int, values: torch.Tensor) -> None:
        self._check(age)
        for (owner, index), rows in zip(self._owners(), self._rows_of(values), strict=True):
            owner.overwrite_gradient(index, owner.gradient_age(index), rows)

    def assign(self, whole: torch.Tensor, gradient: Any) -> None:
        """Replace it by what a program assigns to ``whole``, which stands for the parameter; or,
        with None, clear it.
        """
        if gradient is not None:
            gradient = assigned(self._name, whole, gradient)
            is_dense = gradient.layout == torch.strided  # others cannot be cut
            gradient = gradient if is_dense else gradient.to_dense()
        for tile, rows in zip(self._tiles, self._rows(), strict=True):
            tile.parameter.grad = None if gradient is None else gradient[rows]

    def name_of(self, _: int) -> str:
        return self._name

    def _check(self, age: int) -> None:
        if age != self.gradient_age(0):
            raise RuntimeError(
                f"the gradient of {self._name} has been cleared or replaced since it was taken; "
                "read the parameter's grad again"
            )

    def _owners(self) -> list[tuple[GradientOwner, int]]:
        offloaded: list[Any] = [tile.parameter for tile in self._tiles]
        return [(part.offload_owner, part.offload_index) for part in offloaded]

    def _rows_of(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Copies: a store that keeps rows must not keep the whole."""
        return [values[rows].clone() for rows in self._rows()]

    def _rows(self) -> list[slice]:
        first = self._tiles[0].start
        return [slice(tile.start - first, tile.stop - first) for tile in self._tiles]


class TileList(nn.ModuleList):
    """The tiles of one parameter or several, as a child of the module that had them.

    What computes with a tile keeps no weights for the backward pass, so that a block which is
    checkpointed never has all of them in memory.
    """

    has_fleeting_weights = True

    def __init__(self, tiles: Iterable[Tile] = ()) -> None:
        super().__init__(tiles)

    def of(self, name: str) -> list[Tile]:
        """Those of the parameter ``name``, in the order of their rows."""
        return [tile for tile in self if isinstance(tile, Tile) and tile.name == name]

    @property
    def names(self) -> list[str]:
        """The parameters that there are tiles of."""
        return list(dict.fromkeys(tile.name for tile in self if isinstance(tile, Tile)))


def refused_as_whole(whole: Any, shape: torch.Size, key: str, errors: list[str]) -> bool:
    """Whether what is loaded as ``key`` cannot be cut; ``errors`` get what torch says of it then,
    which is an error also where loading is not strict.
    """
    if not isinstance(whole, torch.Tensor):
        errors.append(
            f'While copying the parameter named "{key}", expected torch.Tensor or Tensor-like '
            f"object from checkpoint but received {type(whole)}"
        )
    elif whole.shape != shape:
        errors.append(
            f"size mismatch for {key}: copying a param with shape {whole.shape} from checkpoint, "
            f"the shape in current model is {shape}."
        )
    else:
        return False
    return True


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


# Wholes: the memory of the tiles while that is the program's to change, or else copies. What is
# written into a copy reaches no tile: it counts as a change of one, which is told as an error
# before the model is used again.


class _Joined(torch.autograd.Function):
    """``joined_of`` the arguments, with history."""

    generate_vmap_rule = True

    @staticmethod
    def forward(*parts: torch.Tensor) -> torch.Tensor:
        return joined_of(parts)

    @staticmethod
    def setup_context(ctx: Any, inputs: Sequence[torch.Tensor], output: Any) -> None:
        ctx.sizes = [len(part) for part in inputs]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient.split(ctx.sizes)


def with_history(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``joined_of(parts)``, which gradients flow through to them."""
    joined: torch.Tensor = _Joined.apply(*parts)  # type: ignore[no-untyped-call]
    return joined


def joined_of(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The rows that ``parts`` have, without history: where they are if they are the program's to
    change now, or a copy that shares the version of one that is not.
    """
    absent = _first_absent(parts)
    if absent is None:
        return _in_one_piece(parts)
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
    wholes = {key: weight.whole() for key, weight in found.items()}
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
            found[key].bring_back(whole)
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
        f"{getattr(func, '__name__', func)} of {weight._name}, which is in tiles while the model "
        "is offloaded, would reach a copy of it; do this inside `with "
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
    first: torch.Tensor = parts[0].detach()
    return first.as_strided(shape, first.stride(), first.storage_offset())
