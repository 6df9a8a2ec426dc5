"""What a program may have set for its own tensors is not for those of the library: inference mode,
gradients, a default device, modes that see or change operations. The default dtype holds in all
threads, so it cannot be set aside; every tensor of the library is made with a dtype of its own
instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_C: Any = torch._C


@contextmanager
def unseen() -> Iterator[None]:
    """Inside, no ``TorchDispatchMode`` and ``TorchFunctionMode`` of the program sees operations:
    those that count or replay what it computes (selective checkpointing) would take ours for its
    own. As a decorator: inside the function.
    """
    if not _C._len_torch_dispatch_stack() and not _C._len_torch_function_stack():
        yield
        return
    # Not torch's own context for it, which imports what traces graphs.
    function, dispatch = _function_modes(), _dispatch_modes()
    try:
        try:
            while _C._len_torch_function_stack():
                _C._pop_torch_function_stack()
            while _C._len_torch_dispatch_stack():
                _C._pop_torch_dispatch_stack(None)
            yield
        finally:
            _put_back(function, dispatch)
    finally:  # once more, where an interrupt kept it from that
        _put_back(function, dispatch)


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


@contextmanager
def own_modes() -> Iterator[None]:
    """Inside, new tensors are ordinary ones, without history, in host memory unless a device is
    given, and ``unseen``. As a decorator: inside the function.
    """
    # Leaving inference mode turns gradients on, so they are turned off within.
    with unseen(), torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield
