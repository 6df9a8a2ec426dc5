"""A device for saves and loads that is simulated in host memory.

What the program gives it is done as late as is allowed: its kernels when a copy has to come after
them, copies when they are waited for. Copies from and to memory that the device does not know are
refused, and so is forgetting memory that is still copied.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from checkpoint.tensors.copiers import Buffer
from checkpoint.tensors.sources import Source, TensorReader, plain_memory, source_of
from checkpoint.tensors.targets import TensorTarget


class SimulatedDevice:
    """One stream of kernels, and the tensors that count as lying there."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._kernels: deque[Callable[[], object]] = deque()
        self._num_given = self._num_done = 0
        self._addresses: set[int] = set()
        self.registered: dict[int, int] = {}
        self.num_copies = 0
        self.num_left = 0
        """Copies that nobody had waited for when their copier was closed."""
        self.fails_at = -1
        """Of the copies, which one the device fails in."""

    def tensor(self, values: torch.Tensor) -> torch.Tensor:
        """The tensor, which lies on the device from now on, with all that share its memory."""
        self._addresses.add(values.untyped_storage().data_ptr())
        return values

    def has(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._addresses

    def launch(self, kernel: Callable[[], object]) -> None:
        """Give it to the stream of the program."""
        with self.lock:
            self._kernels.append(kernel)
            self._num_given += 1

    def set(self, tensor: torch.Tensor, value: float) -> None:
        """A kernel that sets all elements. torch counted the change when it was launched."""
        memory = tensor.detach().numpy()
        self.launch(lambda: memory.fill(value))

    def event(self) -> int:
        """After what was launched so far."""
        return self._num_given

    def run_until(self, event: int) -> None:
        with self.lock:
            while self._num_done < event:
                self._kernels.popleft()()
                self._num_done += 1

    def knows(self, tensor: torch.Tensor) -> bool:
        begin, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        ranges = list(self.registered.items())
        return any(low <= begin and begin + nbytes <= low + size for low, size in ranges)

    def copier(self) -> SimulatedCopier:
        """For a call of the program."""
        return SimulatedCopier(self)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Saves and loads find its tensors as they find those of any device: nobody may take what
        lies there for host memory.
        """
        target_of = TensorTarget.of

        def source(value: Any) -> Source:
            found = source_of(value)
            if not isinstance(value, torch.Tensor) or not self.has(value):
                return found
            reader = TensorReader(value.detach(), found.shape)
            return found._replace(address=None, read=reader)

        def target(tensor: torch.Tensor, saved: torch.dtype | None = None) -> TensorTarget:
            found = target_of(tensor, saved)
            return found._replace(address=None) if self.has(tensor) else found

        monkeypatch.setattr("checkpoint.plan.state_plan.source_of", source)
        monkeypatch.setattr("checkpoint.interop.export.source_of", source)
        monkeypatch.setattr("checkpoint.dcp.items.tensor_source", source)
        monkeypatch.setattr(TensorTarget, "of", target)
        monkeypatch.setattr(
            "checkpoint.loading.into.plain_memory",
            lambda tensor: None if self.has(tensor) else plain_memory(tensor),
        )
        for module in ("saving.api", "loading.api", "interop.export", "dcp.writer", "dcp.reader"):
            monkeypatch.setattr(
                f"checkpoint.{module}.copier_of_caller", lambda **_: SimulatedCopier(self)
            )


@dataclass(eq=False)
class _Copy:
    target: torch.Tensor
    source: torch.Tensor
    after: int
    """Kernels that come before it."""
    is_done: bool = False


class SimulatedCopier:
    """Copies in the order in which they were begun."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self._event: int | None = None
        self._copies: deque[_Copy] = deque()
        self._buffers: list[Buffer] = []

    def takes(self, tensor: torch.Tensor) -> bool:
        return self.device.has(tensor)

    def begin(self, tensors: Iterable[torch.Tensor]) -> None:
        if any(self.takes(tensor) for tensor in tensors):
            self._event = self.device.event()

    def finish_caller(self) -> None:
        self.device.run_until(self.device.event())

    def as_caller(self) -> AbstractContextManager[None]:
        return nullcontext()

    def register(self, buffers: Sequence[Buffer]) -> None:
        with self.device.lock:
            for buffer in buffers:
                assert buffer.ctypes.data not in self.device.registered
                self.device.registered[buffer.ctypes.data] = buffer.nbytes
            self._buffers += buffers

    def transfers(self) -> SimulatedTransfers:
        return SimulatedTransfers(self)

    def copy_now(self, target: torch.Tensor, source: torch.Tensor) -> None:
        copy = self.begun(target, source)
        self.run_to(copy)

    def begun(self, target: torch.Tensor, source: torch.Tensor) -> _Copy:
        with self.device.lock:
            self.device.num_copies += 1
            if self.device.num_copies == self.device.fails_at:
                raise RuntimeError("the device failed")
            is_up = self.takes(target)
            assert is_up or self._event is not None, "begun before it was ordered"
            event = self.device.event() if is_up or self._event is None else self._event
            self._copies.append(_Copy(target, source, event))
            return self._copies[-1]

    def run_to(self, last: _Copy) -> None:
        with self.device.lock:
            while not last.is_done:
                copy = self._copies.popleft()
                self.device.run_until(copy.after)
                copy.target.copy_(copy.source)
                copy.is_done = True

    def close(self) -> None:
        with self.device.lock:
            self.device.num_left += len(self._copies)
            if self._copies:
                self.run_to(self._copies[-1])
            for buffer in self._buffers:
                del self.device.registered[buffer.ctypes.data]
            self._buffers = []


@dataclass(eq=False)
class SimulatedTransfers:
    copier: SimulatedCopier
    _copies: list[_Copy] = field(default_factory=list)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        host = source if self.copier.takes(target) else target
        assert self.copier.device.knows(host), "the device does not know this memory"
        self._copies.append(self.copier.begun(target, source))

    def wait(self) -> None:
        for copy in self._copies[-1:]:
            self.copier.run_to(copy)
