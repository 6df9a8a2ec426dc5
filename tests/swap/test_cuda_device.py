"""What a CUDA device asks of torch, where torch is a stand-in that notes it: each call names the
device, whatever the current one of the thread is.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from aio import Slab
from swap.device.cuda import CudaDevice
from swap.device.interface import Stream

DEVICE = torch.device("cuda", 1)


class FakeStream:
    """Of a device; ``awaited`` are the events that it waits for."""

    def __init__(self, device: torch.device, number: int = 0) -> None:
        self.device = torch.device(device)
        self.cuda_stream = number or id(self)
        self.awaited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.awaited.append(event)


class FakeEvent:
    """Not done until it is waited for."""

    def __init__(self, *, blocking: bool = False) -> None:
        assert blocking, "a thread that waits must not spin"
        self.stream: FakeStream | None = None
        self.is_done = False

    def record(self, stream: FakeStream) -> None:
        self.stream = stream

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        self.is_done = True


class FakeCuda:
    """What stands for ``torch.cuda``."""

    def __init__(self) -> None:
        self.default: dict[torch.device, FakeStream] = {}
        self.current = threading.local()
        self.device_inside: torch.device | None = None
        self.recorded: list[FakeEvent] = []
        self.registered: list[tuple[int, torch.device | None]] = []
        self.unregistered: list[tuple[int, list[bool]]] = []
        """With whether each event before was waited for."""
        self.code = 0

    def cudart(self) -> SimpleNamespace:
        def register(address: int, nbytes: int, flags: int) -> int:
            self.registered.append((address, self.device_inside))
            return self.code

        def unregister(address: int) -> int:
            self.unregistered.append((address, [event.is_done for event in self.recorded]))
            return 0

        return SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)

    def current_stream(self, device: torch.device) -> FakeStream:
        assert device == DEVICE, "the device is named"
        found: FakeStream | None = getattr(self.current, "stream", None)
        return found or self.default.setdefault(device, FakeStream(device, 7))

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before = getattr(self.current, "stream", None)
        self.current.stream = stream
        yield
        self.current.stream = before

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        self.device_inside = device
        yield
        self.device_inside = None

    def event(self, *, blocking: bool = False) -> FakeEvent:
        self.recorded.append(FakeEvent(blocking=blocking))
        return self.recorded[-1]


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    for name in ("current_stream", "stream", "device", "cudart"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    return fake


def elsewhere(work: Callable[[], Any]) -> Any:
    """On another thread, whose current stream is the default one."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_device_without_an_index_is_refused(cuda: FakeCuda) -> None:
    with pytest.raises(ValueError, match="cuda:0"):
        CudaDevice(torch.device("cuda"))


def test_own_streams_are_of_the_device_and_differ(cuda: FakeCuda) -> None:
    device = CudaDevice(DEVICE)
    events: list[Any] = [elsewhere(partial(device.record, stream)) for stream in Stream]
    streams = [event.events[0].stream for event in events]
    assert len({id(stream) for stream in streams}) == len(Stream)
    assert all(stream.device == DEVICE for stream in streams)


def test_copies_run_on_their_stream(cuda: FakeCuda) -> None:
    device, on = CudaDevice(DEVICE), []

    class Target(torch.Tensor):
        def copy_(self, source: torch.Tensor, non_blocking: bool = False) -> Any:
            on.append((cuda.current.stream, non_blocking))
            return super().copy_(source)

    target = torch.zeros(3).as_subclass(Target)
    device.copy(Stream.DOWN, target, torch.ones(3))
    ((stream, is_asynchronous),) = on
    event: Any = device.record(Stream.DOWN)
    assert stream is event.events[0].stream
    assert is_asynchronous
    assert target.tolist() == [1.0, 1.0, 1.0]


def test_thread_that_computes_nothing_records_on_streams_that_compute(cuda: FakeCuda) -> None:
    device, own = CudaDevice(DEVICE), FakeStream(DEVICE)
    with cuda.stream(own):
        device.uses(Stream.COMPUTE, torch.ones(2))
    event: Any = elsewhere(lambda: device.record(Stream.COMPUTE))
    assert own in [one.stream for one in event.events]
    device.wait_for(Stream.UP, event)
    up: Any = device.record(Stream.UP)
    assert up.events[0].stream.awaited == event.events


def test_event_is_done_when_all_of_it_is(cuda: FakeCuda) -> None:
    device = CudaDevice(DEVICE)
    with cuda.stream(FakeStream(DEVICE)):
        device.uses(Stream.COMPUTE, torch.ones(2))
    event: Any = device.record(Stream.COMPUTE)
    assert len(event.events) == 2
    event.events[0].synchronize()
    assert not event.done()
    event.wait()
    assert event.done()


def test_memory_is_registered_for_the_device_and_let_go_of_when_copies_are_over(
    cuda: FakeCuda,
) -> None:
    device, slab = CudaDevice(DEVICE), Slab(4096)
    undo = device.register(slab)
    assert cuda.registered == [(slab.address, DEVICE)]
    undo()
    assert cuda.unregistered == [(slab.address, [True] * 4)]
    assert len({event.stream for event in cuda.recorded}) == 4


def test_memory_that_cannot_be_registered_is_an_error_with_the_remedy(cuda: FakeCuda) -> None:
    cuda.code = 2
    with pytest.raises(RuntimeError, match=r"4096 bytes .*error 2.*less host_memory"):
        CudaDevice(DEVICE).register(Slab(4096))


def test_device_that_is_full_has_no_memory(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    device = CudaDevice(DEVICE)
    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(MemoryError, match="cuda:1 has no 64 bytes"):
        device.memory(64)
