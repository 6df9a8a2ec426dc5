"""Who refers to the memory of a tensor: what others hold is not free when one lets go of it."""

from __future__ import annotations

import gc
from functools import partial
from itertools import chain, compress, repeat, starmap
from typing import Any

import torch
from torch.utils.dlpack import from_dlpack


def other_uses(tensor: torch.Tensor) -> int:
    """How many refer to the storage of ``tensor`` beside it: other tensors over it, for the most
    part. What Python has of the storage itself is not counted.
    """
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - _USES_OF_ONE


def storage_at(tensor: torch.Tensor) -> int:
    """The ``_cdata`` of the storage that ``tensor`` lies in."""
    return int(tensor.untyped_storage()._cdata)


def root_of(tensor: torch.Tensor) -> int:
    """The ``_cdata`` of what ``tensor`` is a view of, or of itself."""
    base: Any = tensor if tensor._base is None else tensor._base
    return int(base._cdata)


def own_storage(flat: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The values of ``flat``, contiguous, where they are, in a storage that nothing else lies in,
    and which keeps that memory.
    """
    if not flat.numel():  # it would be in whatever storage it was made of
        return torch.empty(shape, dtype=flat.dtype, device=flat.device)
    own: Any = torch.empty(0, dtype=flat.dtype, device=flat.device)
    alias = from_dlpack(flat.view(torch.uint8))
    there: torch.Tensor = own.set_(alias.untyped_storage(), 0, shape)
    return there


_one = torch.empty(1, device="cpu")
_USES_OF_ONE: int = torch._C._storage_Use_Count(_one.untyped_storage()._cdata)
"""What torch counts for a storage that one tensor refers to, and Python as it asks."""


def known_tensors() -> list[torch.Tensor]:
    """Every tensor that Python's collector knows, of any class. Undoes a ``gc.freeze()``.

    A tuple that another thread is just making must not have a second reference when that goes on:
    CPython ends it with a ``SystemError``. So the list of all objects, the two iterators over it
    (what ``repeat`` gives) and the choice are one call into C, in which no other thread runs; and
    none of them is in that list itself, or it would stay until the collector came.
    """
    classes = {id(torch.Tensor): torch.Tensor}  # by id: a class may define its own hash
    for one in (found := [torch.Tensor]):
        new = {id(each): each for each in type.__subclasses__(one) if id(each) not in classes}
        classes |= new
        found += new.values()
    is_one = frozenset(classes).__contains__
    gc.unfreeze()  # what a program froze is in no list
    gc.collect(0)  # now, rather than in the midst of it, where finalizers let other threads run
    lists = chain.from_iterable(map(repeat, starmap(gc.get_objects, [()]), (2,)))
    ids = map(partial(map, id), map(partial(map, type), lists))
    return list(chain.from_iterable(map(compress, lists, map(partial(map, is_one), ids))))
