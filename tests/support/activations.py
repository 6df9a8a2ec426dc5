"""Chains of operations that save large tensors, and what is needed to offload those."""

import errno
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from aio import Engine
from aio.backends import MemoryBackend
from infinity.activations.offloading import Activations
from infinity.activations.storage import SavedActivation
from infinity.activations.tiers import NvmeActivations
from swap.storage import opening

CPU = torch.device("cpu")
KIB = 1024
MIB = 1024 * KIB


class Hooks(torch.autograd.graph.saved_tensors_hooks):
    """The hooks of ``offload`` but for weights."""

    def __init__(self, activations: Activations) -> None:
        def pack(tensor: torch.Tensor) -> Any:
            return activations.save(tensor) or tensor

        def unpack(saved: Any) -> torch.Tensor:
            return activations.restore(saved) if isinstance(saved, SavedActivation) else saved

        super().__init__(pack, unpack)


Make = Callable[[int], NvmeActivations]


def fail_io(monkeypatch: pytest.MonkeyPatch, error: float) -> None:
    """Makes the engines of later stores fail with that probability a block."""
    backend = MemoryBackend(seed=3, error=error, errno=errno.EIO, short_transfer=0.1)
    monkeypatch.setattr(opening, "Engine", partial(Engine, backend))


def chain(x: torch.Tensor, length: int) -> torch.Tensor:
    """Every link saves its output."""
    for _ in range(length):
        x = torch.sigmoid(x)
    return x


def large(seed: int, nbytes: int = 512 * KIB) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(nbytes // 4, generator=generator).requires_grad_()


def gradient_of(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(function(x).sum(), x)
    return gradient


def wait_for_writes(activations: NvmeActivations) -> None:
    """Until the engine has let go of what nobody needs any more."""
    activations.counts()
    while activations._volume.leaving_bytes:
        activations._volume.wait_for_leaving()
