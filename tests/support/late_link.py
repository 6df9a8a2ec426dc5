"""A link to a device whose copies happen as late as a stream allows: when one is waited for."""

import threading
from collections import deque
from collections.abc import Callable

import torch


class LateEvent:
    """A copy on one of the link's streams."""

    def __init__(self, copy: Callable[[], object]) -> None:
        self._copy: Callable[[], object] | None = copy

    @property
    def is_done(self) -> bool:
        return self._copy is None

    def carry_out(self) -> None:
        """Copy, and let go of both memories."""
        assert self._copy is not None
        self._copy()
        self._copy = None


class LateLink:
    """See ``swap.cache.device_arena.Link``. Both directions are queues in order, as CUDA streams.

    Memory that no copy has filled is full of garbage.
    """

    def __init__(self) -> None:
        self._up: deque[LateEvent] = deque()
        self._down: deque[LateEvent] = deque()
        # Who waits for a copy that another thread is at waits for that thread.
        self._lock = threading.RLock()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel * dtype.itemsize,), 0xA5, dtype=torch.uint8).view(dtype)

    def upload(self, target: torch.Tensor, source: torch.Tensor) -> LateEvent:
        self._up.append(LateEvent(lambda: target.copy_(source)))
        return self._up[-1]

    def download(self, target: torch.Tensor, source: torch.Tensor) -> LateEvent:
        # What compute does to the source later does not reach the copy.
        computed = source.clone()
        self._down.append(LateEvent(lambda: target.copy_(computed)))
        return self._down[-1]

    def before_compute(self, event: LateEvent | None, tensor: torch.Tensor) -> None:
        if event is not None:
            self.wait(event)

    def done(self, event: LateEvent) -> bool:
        return event.is_done

    def wait(self, event: LateEvent) -> None:
        with self._lock:
            for stream in (self._up, self._down):
                while event in stream:
                    stream.popleft().carry_out()
