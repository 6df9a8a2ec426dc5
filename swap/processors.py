"""What kernels run on: an instruction set, and threads that take parts of the caller's work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from aio.process.cgroups import num_processors
from swap._native import ffi, lib

if TYPE_CHECKING:
    from cffi import FFI


class _Thread(threading.local):
    is_background = False
    most: int | None = None
    available: int | None = None
    """Processors of the process, as the thread found them at its first kernel."""


_thread = _Thread()
_sharing: dict[object, int] = {}
"""How many processes train on this machine, by what stands for everybody who said so."""


def available_isas() -> tuple[str, ...]:
    """Return the instruction sets that this machine has and kernels exist for, fastest first.

    They are among "avx512", "avx2", "neon" and "scalar", which is always there.
    """
    names: list[str] = []
    while (name := lib.swap_isa_name(len(names))) != ffi.NULL:
        names.append(_text(name))
    return tuple(names)


def isa() -> str:
    """Return the instruction set in use: the fastest unless ``set_isa`` chose another."""
    return _text(lib.swap_isa_name(lib.swap_isa()))


def set_isa(name: str | None) -> None:
    """Use the kernels for ``name``, one of ``available_isas()``, process-wide; None: the fastest.

    No result changes, only speed. Raises ValueError for a name that is not available.
    """
    names = available_isas()
    if name is not None and name not in names:
        raise ValueError(f"isa {name!r} is not available here; choose from {', '.join(names)}")
    lib.swap_set_isa(0 if name is None else names.index(name))


def stay_in_background(most: int | None = None) -> None:
    """The calling thread works beside those that compute: from now on it shares kernels with a pool
    of threads that sleep when there is nothing to do, ``most`` of them with itself, or as many as
    the process has processors for: by its affinity and the quotas of its control groups, and by how
    many share them (``share_with``).

    Any other thread shares them with the OpenMP threads that torch keeps awake for it.
    """
    _thread.is_background, _thread.most = True, most
    lib.swap_use_pool()


def share_with(num_processes: int) -> Callable[[], None]:
    """This process is one of ``num_processes``, itself among them, that train on this machine at
    once: in the background it takes its part of the processors alone, until the function that is
    returned is called.
    """
    said = object()
    _sharing[said] = num_processes

    def undo() -> None:
        _sharing.pop(said, None)

    return undo


def num_threads(threads: int | None) -> int:
    """``threads`` if it is given, or else as many as the calling thread may use for a kernel.

    Raises ValueError for less than 1.
    """
    if threads is None:
        if not _thread.is_background:
            return torch.get_num_threads()
        return _thread.most or _part_of_processors()
    if threads < 1:
        raise ValueError(f"threads={threads} must be 1 or more; the calling thread counts")
    return threads


def _part_of_processors() -> int:
    """Quotas are those of the thread's first kernel, as finding them out means reading files."""
    if _thread.available is None:
        _thread.available = num_processors()
    available = min(_thread.available, len(os.sched_getaffinity(0)))
    num_processes = max(list(_sharing.values()), default=1)
    return max(1, available // num_processes)


def _text(name: FFI.CData) -> str:
    text = ffi.string(name)
    assert isinstance(text, bytes)
    return text.decode()
