"""Copies between host memory and devices, beside what the program computes there.

A save reads tensors that the program may still be computing, on a stream of its own choice; a load
writes to tensors that it may still be reading. The threads that do it have neither that stream nor
the time to wait for all that is queued. So a `Copier` is made where the program calls, and knows
what has to come before its copies. What it does not take (tensors in host memory, byte sources) is
read and written as it lies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from checkpoint.tensors.sources import Source, TensorReader

Buffer = npt.NDArray[np.uint8]


class Transfers(Protocol):
    """Some copies that are waited for together. For one thread."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begins to copy. One of them lies on a device; the other one in memory that is registered,
        and is left alone until `wait` has returned.
        """

    def wait(self) -> None:
        """Until all of them are done. Raises what failed on the device."""


class Copier(Protocol):
    """Of one save or load. Thread-safe."""

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether it lies on a device that this copies from and to."""

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        """What the caller has given the devices of these tensors so far, and nothing that it gives
        them later, comes before the copies. To be called before the caller goes on.
        """

    def finish_caller(self) -> None:
        """Waits for all that the caller has given devices: others read there, too."""

    def as_caller(self) -> AbstractContextManager[None]:
        """Within it this thread gives devices its work in one order with the caller, who waits."""

    def register(self, buffers: Sequence[Buffer]) -> None:
        """Makes devices know memory, by whole pages, which is kept and known to them until
        `close`.
        """

    def transfers(self) -> Transfers:
        """A new set of copies."""

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copies something small, in the same order, from or to any memory of the host."""

    def close(self) -> None:
        """Waits for all copies, and lets go of memory. Idempotent."""


class NoDevices:
    """Of a process that has computed on none."""

    def takes(self, tensor: torch.Tensor) -> bool:
        return False

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        assert not list(tensors)

    def finish_caller(self) -> None:
        pass

    def as_caller(self) -> AbstractContextManager[None]:
        return nullcontext()

    def register(self, buffers: Sequence[Buffer]) -> None:
        raise AssertionError("there is no device to know the memory")

    def transfers(self) -> Transfers:
        raise AssertionError("there is no device to copy from or to")

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def close(self) -> None:
        pass


NO_DEVICES = NoDevices()


def is_copied(source: Source, copier: Copier) -> bool:
    """Whether `copier` brings the bytes of a source."""
    return isinstance(source.read, TensorReader) and copier.takes(source.read.tensor)


def begin_reading(copier: Copier, sources: Iterable[Source]) -> None:
    """Orders all reads of these sources behind what the caller has computed so far."""
    if copier is NO_DEVICES:
        return
    read = [source for source in sources if source.read is not None]
    copied = [source.read.tensor for source in read if isinstance(source.read, TensorReader)]
    copier.begin(tensor for tensor in copied if copier.takes(tensor))
    if not all(is_copied(source, copier) for source in read):
        copier.finish_caller()
