"""Saved tensors of autograd: weights are remembered by name and fetched again, everything else is
kept, or taken by ``activations``.

Between forward and backward, autograd keeps what operations saved. A saved tensor that lies in a
parameter's weights is packed as (parameter, generation, size, stride, offset) and unpacked by
fetching the weights, so a graph holds no weights. A cast of weights is packed as theirs and cast
again. A nested ``saved_tensors_hooks`` (activation
checkpointing has one) hides these from us; autograd then keeps the buffer itself, which costs
memory and changes nothing else.

Of nested hooks only the innermost is called. So those of one block serve all blocks of the process:
a saved tensor that is no weight belongs to the block whose model computes on this thread, the
innermost if several do. Outside of all forward passes (a loss) nobody can tell: it is offered to
the block whose forward pass has last saved something here, and then to the others, from the
outermost on, so that it stays in memory only where no block takes it. Hooks that a program entered
around ours are called by ours, with all but weights.

The hooks are those of one thread. A forward pass on another one has them for as long as it lasts,
unless others are at work there already. Blocks may end in any order, and each takes its own off.

Plain PyTorch refuses a backward pass through something that was changed in place since it was
saved. So do we: the generation of a parameter counts its updates, and the version of other tensors
is compared.
"""

from __future__ import annotations

import os
import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from infinity.activations.hook_stack import Hooks, top
from infinity.activations.offloading import Activations
from infinity.activations.storage import SavedActivation
from infinity.activations.views import View, bytes_of, is_whole
from infinity.autograd.phases import Phases
from infinity.autograd.returned import copy_where_returned
from infinity.parameters.homes import Homes
from infinity.parameters.offloaded.becoming import is_ours
from infinity.parameters.offloaded.modes import outside_inference, unseen
from infinity.parameters.offloaded.parameter import OffloadedParameter
from infinity.parameters.offloaded.placeholders import refusal_past_tiles
from infinity.parameters.records import Record
from infinity.ranks.gathered_weights import Weights
from infinity.tiling.weight import TiledWeight
from infinity.tiling.wholes import VersionsOf, is_program_s
from swap.interruptions.forks import check_process
from swap.memory.uses import storage_at

_SAMPLE = 16
"""Elements that are compared before all are."""

_in_use: list[SavedTensors] = []
"""Those of all models that are offloaded now, the outermost block first."""
_here = threading.local()
"""``last``: of whose forward pass something was last saved on this thread, weakly."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedWeight:
    """A view of a parameter's weights, as they were at a generation and a version."""

    owner: SavedTensors
    index: int
    generation: int
    version: int
    view: View
    cast: torch.dtype | None = None
    """The dtype that the weights were cast to, if it is not they that were saved."""


@dataclass(frozen=True, slots=True, eq=False)
class _SavedTensor:
    """What is no weight, as one of the blocks, the ``owner``, took it, or as it is left to
    autograd.
    """

    owner: SavedTensors | None
    tensor: torch.Tensor | SavedActivation
    version: int = 0
    piece: VersionsOf | None = None
    """Of the tiles that it lies in."""


@dataclass(frozen=True, slots=True, eq=False)
class _Handed:
    """What hooks of the program made of a saved tensor; of a tensor that is kept as any other."""

    unpack: Callable[[Any], torch.Tensor]
    made: Any


class Residency(Protocol):
    """What is known of forward passes."""

    at_home: Homes
    """Weights that are computed with where they are kept."""

    @property
    def held(self) -> list[int]:
        """Parameters whose weights are in place now."""

    def innermost(self) -> int:
        """The number, higher for what began later, of the last forward that runs on this thread; -1
        if none does.
        """


class SavedTensors:
    """Those of one block, to be entered for as long as the model is offloaded."""

    def __init__(
        self,
        records: list[Record],
        weights: Weights,
        phases: Phases,
        activations: Activations,
        residency: Residency,
    ) -> None:
        self._process, self._residency = os.getpid(), residency
        self._activations = activations
        self._records = records
        self._weights = weights
        self._phases = phases
        self.generations = [0] * len(records)
        self._homes = _home_ranges(records, weights)
        self._joined = threading.local()
        self._here = threading.local()  # not an ident: a later thread may have the same

    def __enter__(self) -> SavedTensors:
        hooks = self._here.hooks = _Hooks()
        _in_use.append(self)
        hooks.put_on()
        return self

    def __exit__(self, *error: object) -> None:
        """Idempotent."""
        if self in _in_use:
            _in_use.remove(self)
        hooks = getattr(self._here, "hooks", None)
        if hooks is not None:  # else they stay with their thread, if that is alive
            hooks.take_off()

    def join_thread(self) -> None:
        """A forward pass begins on this thread."""
        if top() is None:
            self._joined.hooks = _Hooks()
            self._joined.hooks.put_on()

    def leave_thread(self) -> None:
        """It ended."""
        hooks = self._joined.__dict__.get("hooks")
        if hooks is not None:
            hooks.take_off()
            self._joined.__dict__.pop("hooks", None)

    def innermost(self) -> int:
        """That of forwards of the model."""
        return self._residency.innermost()

    def save(self, tensor: torch.Tensor) -> SavedActivation | None:
        """Take what is no weight; None leaves it to autograd."""
        return self._activations.save(tensor)

    def restore(self, saved: SavedActivation) -> torch.Tensor:
        """What ``save`` took."""
        with outside_inference():  # it has the counter of versions of what was saved
            return self._activations.restore(saved)

    def backward_works(self) -> None:
        """A backward pass asks for what was left to autograd, or taken."""
        self._phases.backward_works()

    def find(self, tensor: torch.Tensor) -> SavedWeight | None:
        """How to fetch ``tensor`` again, if it lies in the weights of a parameter."""
        found = self._locate(tensor)
        if found is not None:
            saved = self._saved(found[0], View.of(tensor, found[1]))
            leaf = _leaf_of(tensor)
            if leaf is not None and self._weights.at_home(found[0]) is None:
                # The graph keeps it, and no hook sees that: in the arena it would keep the room.
                leaf.data = leaf.detach().clone()
            return saved
        if not isinstance(tensor, OffloadedParameter) and is_whole(tensor):  # else another block's
            for index in self._residency.held:
                if self._is_cast(tensor, self._records[index]):
                    return self._saved(index, View.of(tensor, 0), tensor.dtype)
        return None

    def _saved(self, index: int, view: View, cast: torch.dtype | None = None) -> SavedWeight:
        version = self._records[index].parameter._version
        return SavedWeight(self, index, self.generations[index], version, view, cast)

    def _is_cast(self, tensor: torch.Tensor, record: Record) -> bool:
        """Whether ``tensor`` has the bits of the weights of ``record`` in another dtype, so that it
        can be made again: what autocast, or ``weight.to(x.dtype)`` in a module, leaves to autograd.
        """
        if (
            record.numel != tensor.numel()
            or record.spec.always_on_host
            or record.spec.dtype == tensor.dtype
            or not record.spec.dtype.is_floating_point
        ):
            return False
        weight = record.parameter.detach().view(-1)
        cast = tensor.detach().as_strided((tensor.numel(),), (1,))
        return all(  # a few elements first: most tensors of that size are something else
            torch.equal(
                weight[:count].to(cast.dtype).view(torch.uint8), cast[:count].view(torch.uint8)
            )
            for count in (_SAMPLE, tensor.numel())
        )

    def fetch(self, packed: SavedWeight) -> torch.Tensor:
        """Fetch what ``find`` found. Raises ``RuntimeError`` if it is not the same any more."""
        name = self._records[packed.index].name
        check_process(self._process, f"the offloaded {name}")
        if self not in _in_use:
            raise RuntimeError(
                f"this backward pass needs {name}, which is not offloaded any more; call backward "
                "inside the `with` block that its forward pass was in"
            )
        if packed.generation != self.generations[packed.index]:
            raise RuntimeError(
                f"{name} was updated by an optimizer step after the forward pass that this "
                "backward pass belongs to; call backward before step"
            )
        if packed.version != self._records[packed.index].parameter._version:
            raise RuntimeError(
                f"{name}, which is needed for the gradient, was changed in place after the forward "
                "pass that this backward pass belongs to"
            )
        self._phases.backward_works()
        weight = self._weights.borrow(packed.index)
        return packed.view.over(weight if packed.cast is None else weight.to(packed.cast))

    def _locate(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """(parameter, first byte of its weights) if ``tensor`` lies in the weights of one."""
        if tensor.layout != torch.strided or not tensor.numel():
            return None
        storage = tensor.untyped_storage()
        index = self._weights.owner(storage._cdata)
        if index is None:
            index = self._residency.at_home.parameter_in(storage._cdata)
        if index is not None:
            return index, 0
        homes = self._homes.get(storage._cdata)
        if homes is None:
            return None
        start, stop = bytes_of(tensor)
        position = bisect_right(homes, start, key=lambda home: home[0]) - 1
        if position < 0:
            return None
        first, end, index = homes[position]
        return (index, first) if stop <= end else None


class _Hooks(Hooks):
    """Those of all blocks, wherever they were put on."""

    def pack(self, tensor: torch.Tensor) -> Any:
        packed = _pack_weight(tensor)
        if packed is not None:
            return packed
        if self.outer is None:
            return _pack(tensor)
        pack, unpack = self.outer
        made = pack(tensor)
        return _Handed(unpack, _pack(made) if isinstance(made, torch.Tensor) else made)

    def unpack(self, packed: Any) -> torch.Tensor:
        if not isinstance(packed, _Handed):
            return _unpack(packed)
        made = packed.made
        return packed.unpack(_unpack(made) if isinstance(made, _SavedTensor) else made)


@unseen
def _pack_weight(tensor: torch.Tensor) -> SavedWeight | None:
    if isinstance(tensor, TiledWeight) and not all(map(is_program_s, tensor.tiles)):
        raise RuntimeError(refusal_past_tiles(tensor._cut_name))
    for block in _likeliest():
        weight = block.find(tensor)
        if weight is not None:
            return weight
    return None


@unseen
def _pack(tensor: torch.Tensor) -> _SavedTensor:
    blocks, piece = _likeliest(), VersionsOf.now(tensor)
    if len(blocks) > 1 and blocks[0].innermost() >= 0:
        _here.last = weakref.ref(blocks[0])
        blocks = blocks[:1]
    for block in blocks if piece is None else ():
        taken = block.save(tensor)
        if taken is not None:
            return _SavedTensor(block, taken)
    version = 0 if tensor.is_inference() else tensor._version
    # A leaf comes as the parameter itself, whose data may be swapped under it.
    kept = tensor.detach() if tensor.requires_grad else tensor
    return _SavedTensor(blocks[0] if blocks else None, kept, version, piece)


def _likeliest() -> list[SavedTensors]:
    """All blocks, first that to which what is saved now belongs, as far as is known."""
    blocks = [*_in_use]
    if len(blocks) > 1:
        first = max(blocks, key=lambda block: block.innermost())
        if first.innermost() < 0:
            last = getattr(_here, "last", lambda: None)()
            first = last if last in blocks else blocks[0]
        blocks.sort(key=lambda block: block is not first)
    return blocks


@unseen
def _unpack(packed: SavedWeight | _SavedTensor) -> torch.Tensor:
    tensor = packed.owner.fetch(packed) if isinstance(packed, SavedWeight) else _unpacked(packed)
    copy_where_returned(tensor)
    return tensor


def _unpacked(saved: _SavedTensor) -> torch.Tensor:
    if saved.owner is not None:
        saved.owner.backward_works()
        if isinstance(saved.tensor, SavedActivation):
            return saved.owner.restore(saved.tensor)
    assert isinstance(saved.tensor, torch.Tensor)
    tensor = saved.tensor
    is_changed = not tensor.is_inference() and tensor._version != saved.version
    if saved.piece is not None and not saved.piece.are_same:
        raise RuntimeError(
            "a weight in tiles that is needed for the gradient was changed in place after the "
            "forward pass that this backward pass belongs to"
        )
    if is_changed:
        raise RuntimeError(
            f"a {tensor.dtype} tensor of shape {tuple(tensor.shape)} that is needed for the "
            f"gradient was modified in place: it is at version {tensor._version}, version "
            f"{saved.version} was saved"
        )
    return tensor


def _leaf_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a program made of weights to have a gradient of its own, such as
    ``nn.Parameter(weight.T)``, if ``tensor`` is that or a view of it.
    """
    leaf = tensor if tensor._base is None else tensor._base
    is_leaf = leaf.requires_grad and leaf.is_leaf and not is_ours(leaf)
    return leaf if is_leaf else None


def _home_ranges(records: list[Record], weights: Weights) -> dict[int, list[tuple[int, int, int]]]:
    """For each storage that weights at home lie in, as backward passes get them: sorted (first
    byte, end, parameter).
    """
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    for record in records:
        weight = weights.at_home(record.index)
        if weight is not None and weight.numel():
            ranges.setdefault(storage_at(weight), []).append((*bytes_of(weight), record.index))
    for homes in ranges.values():
        homes.sort()
    return ranges
