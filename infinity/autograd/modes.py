"""What a program may have set for its own tensors is not for those of the library: inference mode,
gradients, a default device. The default dtype holds in all threads, so it cannot be set aside;
every tensor of the library is made with a dtype of its own instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def own_modes() -> Iterator[None]:
    """Inside, new tensors are ordinary ones, without history, in host memory unless a device is
    given. As a decorator: inside the function.
    """
    # Leaving inference mode turns gradients on, so they are turned off within.
    with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
        yield
