"""What a compute device with memory of its own has to do: copies, events, and memory.

Everything that decides about order (arenas, inboxes, stages, saved tensors) is written over these
primitives, which decide nothing. ``CudaDevice`` carries them out; a device that is simulated on the
CPU, in ``tests/support/simulated_device``, checks that the order that was asked for is enough.

Each stream does what it is given in order; nothing is ordered between two of them, or between one
and the host, but by events. So there are four rules for who uses these primitives:

- A stream that reads what another has written, or writes what another has read, waits for an event
  that was recorded on that one in between (``wait_for``). A range of device memory that is used
  anew was used by others: ``DeviceMemory`` sees to these.
- The host reads what was copied to it, and reuses what was copied from it, after an event that was
  recorded behind the copy is done.
- Both ends of a copy stay where they are until then, unless they are in a ``memory`` of the device,
  whose ranges are ordered on streams when they are reused.
- Host memory that is copied from or to is in a slab that is registered.

All methods may be called on any thread, whatever the current device of that is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from aio import Slab


class Stream(enum.Enum):
    """A queue of work of the device."""

    COMPUTE = "compute"
    """What the program computes on: the current stream of the thread that asks, and on a thread
    that computes nothing all those on which weights are computed with."""
    UP = "up"
    """Copies from host memory."""
    DOWN = "down"
    """Copies to host memory."""
    BACK = "back"
    """Copies to host memory that do not wait for what is computed."""
    UPDATE = "update"
    """Operations of ours, beside those of the program."""


class Event(Protocol):
    """A moment in a stream: all that was given to it before."""

    def done(self) -> bool:
        """Whether the stream is past it."""

    def wait(self) -> None:
        """Block this thread until it is, without spinning."""


class ComputeDevice(Protocol):
    """The primitives. What they are given is flat and contiguous."""

    torch_device: torch.device
    """With its index, where devices of the kind have one."""

    def record(self, stream: Stream) -> Event:
        """The moment at which all is done that was given to ``stream`` so far."""

    def wait_for(self, stream: Stream, event: Event) -> None:
        """What ``stream`` is given from now on comes after ``event``. Blocks no thread."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start copying between host and device, or within the device; one dtype, one size."""

    def uses(self, stream: Stream, tensor: torch.Tensor, *, writes: bool = False) -> None:
        """What ``stream`` is given from now on accesses ``tensor``, until the last view of it is
        gone; what comes next also ``writes``. Orders nothing: ``wait_for`` comes first.
        """

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Operations of torch inside run on ``stream`` of this device."""

    def memory(self, nbytes: int) -> Any:
        """A block of device memory, which is free again with the last reference to it.

        Raises ``MemoryError`` where the device has no such block left.
        """

    def tensor(
        self, memory: Any, offset: int, numel: int, dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        """A flat tensor over a range of ``memory``, ``offset`` in bytes, with a storage of its own,
        which keeps ``owner`` alive until the last view of it is gone.
        """

    def register(self, slab: Slab) -> Callable[[], None]:
        """Let copies from and to ``slab`` be asynchronous. What is returned undoes that, once all
        copies that were started have ended; it is due before the slab is closed.

        Raises ``RuntimeError`` with the cause.
        """
