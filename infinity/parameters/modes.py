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
    dispatch, function = torch.utils._python_dispatch, torch.overrides
    seeing: list[tuple[Any, Any]] = []
    try:
        while _C._len_torch_function_stack():
            seeing.append((function._push_mode, function._pop_mode()))
        while _C._len_torch_dispatch_stack():
            seeing.append((dispatch._push_mode, dispatch._pop_mode()))
        yield
    finally:
        while seeing:
            push, mode = seeing.pop()
            push(mode)


@contextmanager
def own_modes() -> Iterator[None]:
    """Inside, new tensors are ordinary ones, without history, in host memory unless a device is
    given, and ``unseen``. As a decorator: inside the function.
    """
    # Leaving inference mode turns gradients on, so they are turned off within.
    with unseen(), torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield
