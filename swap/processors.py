"""What kernels run on: an instruction set, and threads that take parts of the caller's work."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING

import torch

from swap._native import ffi, lib

if TYPE_CHECKING:
    from cffi import FFI


class _Thread(threading.local):
    is_background = False
    most: int | None = None


_thread = _Thread()


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
    the process has CPUs.

    Any other thread shares them with the OpenMP threads that torch keeps awake for it.
    """
    _thread.is_background, _thread.most = True, most
    lib.swap_use_pool()


def num_threads(threads: int | None) -> int:
    """``threads`` if it is given, or else as many as the calling thread may use for a kernel.

    Raises ValueError for less than 1.
    """
    if threads is None:
        if not _thread.is_background:
            return torch.get_num_threads()
        return _thread.most or len(os.sched_getaffinity(0))
    if threads < 1:
        raise ValueError(f"threads={threads} must be 1 or more; the calling thread counts")
    return threads


def _text(name: FFI.CData) -> str:
    text = ffi.string(name)
    assert isinstance(text, bytes)
    return text.decode()
