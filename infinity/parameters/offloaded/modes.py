"""What a program may have set for its own tensors is not for those of the library: inference mode,
gradients, a default device, modes that see or change operations. The default dtype holds in all
threads, so it cannot be set aside; every tensor of the library is made with a dtype of its own
instead.

What sets them is no context in Python, whose ``__exit__`` an interrupt may keep from beginning: the
program's modes come back in a ``finally``, by calls that are C, or that are made twice.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import torch

_C: Any = torch._C
P = ParamSpec("P")
T = TypeVar("T")


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Within it, no ``TorchDispatchMode`` and ``TorchFunctionMode`` of the program sees operations:
    those that count or replay what it computes (selective checkpointing) would take ours for its
    own.
    """

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        if not _C._len_torch_dispatch_stack() and not _C._len_torch_function_stack():
            return function(*args, **kwargs)
        # Not torch's own context for it, which imports what traces graphs.
        function_modes, dispatch_modes = _function_modes(), _dispatch_modes()
        try:
            try:
                while _C._len_torch_function_stack():
                    _C._pop_torch_function_stack()
                while _C._len_torch_dispatch_stack():
                    _C._pop_torch_dispatch_stack(None)
                return function(*args, **kwargs)
            finally:
                _put_back(function_modes, dispatch_modes)
        finally:  # once more, where an interrupt kept it from that
            _put_back(function_modes, dispatch_modes)

    return within


def own_modes(function: Callable[P, T]) -> Callable[P, T]:
    """Within it, new tensors are ordinary ones, without history, in host memory unless a device is
    given (a default device is one of the modes of the program), and ``unseen``.
    """

    quiet = without_history(function)

    @unseen
    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        with outside_inference():  # which turns gradients on, so they are turned off within
            return quiet(*args, **kwargs)

    return within


def without_history(function: Callable[P, T], *, when: bool = True) -> Callable[P, T]:
    """Within it, operations have no history; or as before, with ``when`` False."""

    @wraps(function)
    def within(*args: P.args, **kwargs: P.kwargs) -> T:
        before = _C.is_grad_enabled()
        try:
            _C._set_grad_enabled(before and not when)
            return function(*args, **kwargs)
        finally:
            _C._set_grad_enabled(before)

    return within


outside_inference: Callable[[], AbstractContextManager[None]] = partial(_C._InferenceMode, False)
"""Inside, tensors count their versions and may have a history. It begins as it is made and sets
back what it found then, so no function in Python hands it on: whoever interrupts that would keep it
(by a traceback) until the program has set something else.
"""


def _function_modes() -> list[Any]:
    return [_C._get_function_stack_at(at) for at in range(_C._len_torch_function_stack())]


def _dispatch_modes() -> list[Any]:
    return [_C._get_dispatch_stack_at(at) for at in range(_C._len_torch_dispatch_stack())]


def _put_back(function: list[Any], dispatch: list[Any]) -> None:
    """Push what is missing. What is pushed is counted by torch itself, so an interrupt anywhere
    leaves a part that a further call completes.
    """
    while (count := _C._len_torch_function_stack()) < len(function):
        _C._push_on_torch_function_stack(function[count])
    # Those of torch itself (with a key) have a place of their own, behind the others.
    plain = [mode for mode in dispatch if _key(mode) is None]
    while (count := sum(_key(mode) is None for mode in _dispatch_modes())) < len(plain):
        _C._push_on_torch_dispatch_stack(plain[count])
    for mode in dispatch:
        if _key(mode) is not None and all(mode is not one for one in _dispatch_modes()):
            _C._push_on_torch_dispatch_stack(mode)


def _key(mode: Any) -> Any:
    return getattr(mode, "_mode_key", None)
