"""Whether an operation changed a tensor, also where it does not count it, as collectives do; and
copies of weights that programs get in the place of views, outside of forward passes.

What is written into a copy reaches no weight. It shares the version of its parameter, so what torch
counts is noticed. What torch does not count (collectives, NumPy, another tensor that was given its
data) is found in the bytes when the last reference to the copy goes, and counted then: in host
memory; on other devices nothing tells when that is. So it is with memory that a program was lent
and has kept a part of (an array of NumPy) when it is the program's no more.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from checkpoint.format.checksum import crc32c
from infinity.parameters.offloaded.modes import own_modes, unseen
from infinity.parameters.offloaded.placeholders import as_they_are


def version_probe_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that has the version counter of ``tensor``."""
    version_probe = tensor.detach()
    # Setting the data keeps the counter, which detach() shares.
    version_probe.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return version_probe


class Changes:
    """Those that ``func``, which is about to run, makes in ``tensor``."""

    def __init__(
        self,
        func: Any,
        tensor: torch.Tensor,
        counts: bool | None = None,
        updates: Callable[[], int] = lambda: 0,
    ) -> None:
        """``counts``: whether it counts its changes, if that is known. ``updates`` tells how often
        ``tensor`` has been given other values by others, on other threads maybe.
        """
        self._tensor, self._version = tensor, tensor._version
        self._updates, self._updates_before = updates, updates()
        counts = _counts_changes(func) if counts is None else counts
        self._before = None if counts else unseen(_copied)(tensor)

    @property
    def is_counted(self) -> bool:
        """Whether the version of the tensor tells of them."""
        return self._before is None

    @unseen
    def are_there(self) -> bool:
        """False where others have changed it meanwhile: what ``func`` did cannot be told then."""
        if self._updates() != self._updates_before:
            return False
        return self._tensor._version != self._version or self.are_in_bytes()

    @unseen
    def are_in_bytes(self) -> bool:
        """Those of a function that does not count them."""
        return self._before is not None and not _same_bits(self._before, self._tensor.detach())

    @unseen
    def undo(self) -> None:
        """Give the tensor the values that it had, which are there for ``func`` that counts none."""
        if self._before is not None:
            kept = torch.autograd.grad_mode._unsafe_preserve_version_counter(self._tensor)
            with torch.no_grad(), kept:
                self._tensor.detach().copy_(self._before)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone()


_UNCOUNTED = (
    *("_fused_", "_amp_foreach_", "apply_", "map_", "map2_", "rrelu_with_noise"),
    *("batch_norm", "_batch_norm", "native_batch_norm", "_native_batch_norm"),
    "fused_moving_avg_obs_fake_quant",
)
"""What torch's own functions begin with that write without counting it: fused optimizers, and what
keeps averages.
"""


def _counts_changes(func: Any) -> bool:
    """Whether it is torch's own, which counts its changes in place in the version of a tensor.

    Operators that others register, custom ones and collectives, need not, nor do a few of torch.
    """
    if isinstance(func, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        space, _, name = str(func).partition(".")
        return space in ("aten", "prim", "prims") and not name.startswith(_UNCOUNTED)
    module = str(getattr(func, "__module__", None) or "torch")
    own = module.split(".")[0] in ("torch", "builtins", "_operator")
    is_counting = not getattr(func, "__name__", "").startswith(_UNCOUNTED)
    return own and is_counting and not module.startswith(("torch.distributed", "torch.cuda."))


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(_bits(one), _bits(other))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def wait_for(func: Any, result: Any) -> None:
    """Let what a collective has begun end, so that its changes can be seen."""
    if _is_distributed(func) and hasattr(result, "wait"):
        result.wait()


def writes_later(func: Any) -> bool:
    """Whether ``func`` is a collective whose writes cannot be waited for: a receive, which other
    sends may have to precede, and one that is put off until a block of many ends.
    """
    if not _is_distributed(func):
        return False
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    puts_off = bool(getattr(world, "pg_coalesce_state", None))
    return puts_off or getattr(func, "__name__", "") == "irecv"


def _is_distributed(func: Any) -> bool:
    return str(getattr(func, "__module__", "")).startswith("torch.distributed")


def weight_changes(func: Any, parameter: Any) -> Changes:
    """``Changes`` in an offloaded parameter, whose weights are in place."""
    owner, index = parameter.offload_owner, parameter.offload_index
    return Changes(func, parameter, updates=lambda: owner.updates_counted(index))


class ChangeOwner(Protocol):
    """Who is told of changes in what is no weight any more."""

    def changes_told(self, index: int) -> int:
        """How often a change of the parameter, or of a copy of it, was told as an error."""

    def changed_copy(self, index: int, told: int) -> None:
        """Something was written into a copy of the parameter, made when that many were told."""


class CopyOwner(ChangeOwner, Protocol):
    """Who is told of changes in copies."""

    def updates_counted(self, index: int) -> int:
        """How often a step or load gave the parameter other values."""

    def version_beside_updates(self, index: int, tensor: torch.Tensor) -> int:
        """The version of ``tensor``, which is that of the parameter, less those updates."""


@own_modes
def copy_of(
    view: torch.Tensor, parameter: torch.Tensor, index: int, owner: CopyOwner
) -> torch.Tensor:
    """A copy of ``view``, which lies in the weights of ``parameter``, with the version of that."""
    with as_they_are():  # for the version alone
        copy = parameter.detach()
    if view.is_cpu and view.numel():
        copy.data = _watched(view, index, owner)
    else:
        copy.data = _copied(view)
    return copy


def _watched(view: torch.Tensor, index: int, owner: CopyOwner) -> torch.Tensor:
    memory = np.empty(view.numel() * view.dtype.itemsize, dtype=np.uint8)
    shown = memory.view()
    like = torch.empty_like(view, device="meta")
    flat = torch.frombuffer(shown, dtype=torch.uint8).view(view.dtype)
    copy = flat.as_strided(like.size(), like.stride())
    copy.copy_(view)
    told = owner.changes_told(index)
    finalizer = weakref.finalize(
        shown, _tell_changes, memory, crc32c(memory), weakref.ref(owner), index, told
    )
    finalizer.atexit = False
    return copy


class LentMemory:
    """Memory of values that the program is lent. What is written into it after it was given back,
    by whoever still has a part of it, reaches no weight either.
    """

    def __init__(self, memory: Any, shown: weakref.ref[Any]) -> None:
        self._memory, self._shown = memory, shown
        self._left: int | None = None

    @staticmethod
    def of(
        parts: Iterable[torch.Tensor], numel: int
    ) -> Iterator[tuple[torch.Tensor, LentMemory | None]]:
        """Each of ``parts``, all of its storage and of ``numel`` elements together, as a tensor to
        lend, and its memory; None where nothing tells when that is gone. They lie one behind the
        other in one storage: who uses them as one later moves none away from views of it.
        """
        whole, stop = torch.empty(0), 0
        memory: Any = None
        for values in parts:
            start, stop = stop, stop + values.numel()
            if start == 0:
                whole = values.view(-1) if stop == numel else values.new_empty(numel)
                if whole.is_cpu and numel:
                    memory = whole.view(torch.uint8).numpy()
                    shown = memory.view()
                    whole = torch.frombuffer(shown, dtype=torch.uint8).view(values.dtype)
            part = whole[start:stop].view(values.shape)
            if stop - start != numel:
                part.copy_(values)
            if memory is None or not values.numel():
                yield part, None
            else:
                size = part.dtype.itemsize
                yield part, LentMemory(memory[start * size : stop * size], weakref.ref(shown))

    def has(self, address: int) -> bool:
        """Whether values at ``address`` lie here."""
        first: int = self._memory.ctypes.data
        return first <= address < first + len(self._memory)

    def leave(self) -> None:
        """The values go elsewhere: what is written here from now on reaches them no more."""
        self._left = crc32c(self._memory)

    def forget(self) -> None:
        """What is written here is the program's own."""
        self._left = None

    def is_written_late(self) -> bool:
        """Whether something was written since it was left."""
        return self._left is not None and crc32c(self._memory) != self._left

    def given_back(self, index: int, owner: ChangeOwner) -> weakref.finalize[..., Any] | None:
        """``owner`` is told of changes when the last who has a part of it has let go, or, before
        that, by what is returned; None if nobody has any.
        """
        shown = self._shown()
        if shown is None:
            return None
        told, before = owner.changes_told(index), crc32c(self._memory)
        finalizer = weakref.finalize(
            shown, _tell_changes, self._memory, before, weakref.ref(owner), index, told
        )
        finalizer.atexit = False
        return finalizer


class LentMemories:
    """Where the values of what is lent lie, by parameter, and where they lay before they were put
    together. A program may give a parameter other data; what it has of before is its own then.
    """

    def __init__(self) -> None:
        self._of: dict[int, tuple[LentMemory, ...]] = {}
        self._moved_to: dict[int, int] = {}

    def lies(self, index: int, memory: LentMemory | None) -> None:
        """The values lie in ``memory`` from now on, if that is watched."""
        if memory is not None:
            self._of[index] = (*self._of.get(index, ()), memory)

    def moves(self, index: int, memory: LentMemory | None, come: int, go: int) -> None:
        """The same of values that were put at the address ``go``, and came from ``come``. Where
        that is the program's own memory it may get the other for it, to keep and to change.
        """
        before = self._of.get(index, ())
        is_own = self._moved_to.get(index, come) != come
        for one in before:
            if one.has(come):
                one.leave()
            elif is_own:
                one.forget()
        self._moved_to[index] = go
        if any(one.has(come) for one in before):
            self.lies(index, memory)

    def is_written_late(self, index: int, address: int) -> bool:
        """Whether something was written where the values, now at ``address``, lay before."""
        is_there = self._moved_to.get(index) == address
        return is_there and any(one.is_written_late() for one in self._of.get(index, ()))

    def pop(self, indices: Sequence[int]) -> list[tuple[int, LentMemory]]:
        """Each with its parameter, of those that are lent no longer."""
        found = [(index, memory) for index in indices for memory in self._of.pop(index, ())]
        for index in indices:
            self._moved_to.pop(index, None)
        return found


def _tell_changes(memory: Any, before: int, found: Any, index: int, told: int) -> None:
    owner = found()
    if owner is not None and crc32c(memory) != before:
        owner.changed_copy(index, told)
