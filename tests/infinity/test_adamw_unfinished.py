"""A step of OffloadedAdamW that a device stopped, and what the program does before it is over."""

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity import OffloadedAdamW
from swap.device.interface import Stream
from tests.support.adamw_model import backward, make_model, same, train, values
from tests.support.memory import folder_in_memory
from tests.support.proof import by_turns
from tests.support.simulated_device.failing import Failing
from tests.support.simulated_device.injected import simulated

pytestmark = pytest.mark.usefixtures("one_thread")
tmp_path = folder_in_memory()
SMALL = 9_300_000
"""Bytes that leave most of the state on NVMe, beside a link."""


class Run:
    """A model after one step, and ``device`` that stopped the second."""

    def __init__(self, optimizer: OffloadedAdamW, model: nn.Module, device: Failing) -> None:
        self.optimizer, self.model, self.device = optimizer, model, device

    def stop(self, kind: str, stream: Stream, first: int, times: int) -> None:
        backward(self.model, 1)
        self.device.fail(kind, stream, first, times)
        with pytest.raises(RuntimeError, match="the device failed"):
            self.optimizer.step()
        self.device.fail("", Stream.UP, 0, 0)

    @property
    def parameter(self) -> nn.Parameter:
        """Of which a part was updated."""
        return next(self.model.parameters())


def after_two(nvme: Path) -> list[torch.Tensor]:
    model = make_model()
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=nvme, host_memory="1GiB") as optimizer:
        train(model, optimizer, range(2))
    return values(model)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    model = make_model()
    with (
        simulated(Failing) as devices,
        OffloadedAdamW(model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=SMALL) as optimizer,
    ):
        train(model, optimizer, range(1))
        (device,) = devices
        assert isinstance(device, Failing)
        yield Run(optimizer, model, device)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def gradient_of(parameter: nn.Parameter) -> torch.Tensor:
    assert parameter.grad is not None
    return parameter.grad


def add_to_weights(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.add_(1.0)


def replace(parameter: nn.Parameter, value: torch.Tensor) -> None:
    parameter.data = value


CHANGES: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "other memory": (lambda p: replace(p, p.data.clone()), "is in other memory: .* put these back"),
    "another dtype": (lambda p: replace(p, p.data.double()), "is torch.float64 .* put these back"),
    "another shape": (lambda p: replace(p, p.data[:3].clone()), "put these back"),
    "another layout": (lambda p: replace(p, p.data.t().contiguous().t()), "put these back"),
    "freed weights": (free, "its memory has been freed.*load the last checkpoint"),
    "changed weights": (add_to_weights, "0 was changed before .* of the model too"),
    "freed gradient": (lambda p: free(gradient_of(p)), "the gradient of 0.* has been freed"),
    "changed gradient": (lambda p: gradient_of(p).zero_(), "the gradient of 0.* was changed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_step_whose_tensors_are_others_is_not_finished(change: str, run: Run) -> None:
    run.stop("copy", Stream.UP, 3, 100)
    make, message = CHANGES[change]
    make(run.parameter)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=message):
            run.optimizer.flush()
    assert run.optimizer.report().steps == 1


def test_step_is_finished_when_its_memory_was_put_back(run: Run, tmp_path: Path) -> None:
    run.stop("copy", Stream.UP, 3, 100)
    before = run.parameter.data
    run.parameter.data = before.clone()
    with pytest.raises(RuntimeError, match="is in other memory"):
        run.optimizer.flush()
    run.parameter.data = before
    run.optimizer.flush()
    assert same(values(run.model), after_two(tmp_path))


WAITS = [
    (stream, first, times)
    for stream in (Stream.UP, Stream.DOWN)
    for first in (1, 3)
    for times in (3, 9)
]


@pytest.mark.parametrize(("stream", "first", "times"), WAITS)
def test_nothing_of_a_step_that_load_gave_up_is_under_way(
    stream: Stream, first: int, times: int, run: Run, tmp_path: Path
) -> None:
    run.optimizer.save(tmp_path / "saved")
    saved = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.stop("wait", stream, first, times)
    run.model.zero_grad()
    run.optimizer.load(tmp_path / "saved")
    run.model.load_state_dict(saved)
    assert not run.device._queues[Stream.UP].items
    assert not run.device._queues[Stream.DOWN].items
    for one in Stream:
        run.device.record(one).wait()
    assert same(values(run.model), [*saved.values()])
    train(run.model, run.optimizer, range(1, 2))
    assert same(values(run.model), after_two(tmp_path))


def test_load_is_refused_while_nobody_can_wait_for_the_device(run: Run, tmp_path: Path) -> None:
    """What is under way could be written over what is loaded; the step can be finished still."""
    run.optimizer.save(tmp_path / "saved")
    run.stop("wait", Stream.UP, 3, 100)
    run.device.fail("wait", Stream.UP, 1, 1)
    with pytest.raises(RuntimeError, match="the device failed"):
        run.optimizer.load(tmp_path / "saved")
    run.optimizer.flush()
    assert same(values(run.model), after_two(tmp_path))


@pytest.mark.parametrize(
    ("end", "kind"), by_turns(["flush", "load", "load_state_dict", "close"], ["copy", "wait"])
)
def test_nothing_of_the_program_is_held_when_a_step_has_ended(
    kind: str, end: str, run: Run, tmp_path: Path
) -> None:
    run.optimizer.save(tmp_path / "saved")
    state = run.optimizer.state_dict()
    run.stop(kind, Stream.UP, 3, 100)
    gradients = [weakref.ref(gradient_of(parameter)) for parameter in run.model.parameters()]
    addresses = {gradient_of(parameter).data_ptr() for parameter in run.model.parameters()}
    assert held(addresses)
    arguments = {"load": (tmp_path / "saved",), "load_state_dict": (state,)}
    getattr(run.optimizer, end)(*arguments.get(end, ()))
    run.model.zero_grad()
    gc.collect()
    assert not any(gradient() is not None for gradient in gradients)
    assert not held(addresses)


def held(addresses: set[int]) -> list[torch.Tensor]:
    """Tensors over that memory, or parts of it that begin there."""
    tensors = [one for one in gc.get_objects() if type(one) is torch.Tensor]
    return [tensor for tensor in tensors if _address_of(tensor) in addresses]


def _address_of(tensor: torch.Tensor) -> int | None:
    """None without memory, as of tensors that other tests have left."""
    try:
        return tensor.data_ptr() if tensor.numel() else None
    except RuntimeError:
        return None
