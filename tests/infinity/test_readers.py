"""Threads that read weights while another one trains: what is computed after a step has its
weights, whatever others held as it was taken.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import infinity
from tests.support.models import Stack, seeded, vector_loss, vectors
from tests.support.proof import matrix
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of

Hold = Callable[[Stack, Callable[[], None]], None]


class _Stops(TorchDispatchMode):
    """Waits within each operation that reads something."""

    def __init__(self, stop: Callable[[], None]) -> None:
        super().__init__()
        self._stop = stop

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.linalg_vector_norm.default:
            self._stop()
        return func(*args, **(kwargs or {}))


def _operation(model: Stack, stop: Callable[[], None]) -> None:
    with torch.no_grad(), _Stops(stop):
        model.layer(0).weight.norm()


def _module(model: Stack, stop: Callable[[], None]) -> None:
    hook = model.layer(0).register_forward_pre_hook(lambda *_: stop())
    with torch.no_grad():
        model.layer(0)(vectors(0))
    hook.remove()


def _attribute(model: Stack, stop: Callable[[], None]) -> None:
    """Of a module that is within the one whose forward runs."""

    def reach(*_: Any) -> None:
        assert model.layer(0).weight.is_floating_point()
        stop()

    hook = model.norm.register_forward_pre_hook(reach)
    with torch.no_grad():
        model.norm(vectors(0))
    hook.remove()


def _left(model: Stack, stop: Callable[[], None]) -> None:
    """A forward that an exception has ended past the hooks of torch; its thread goes on."""

    def end(*_: Any) -> None:
        raise KeyboardInterrupt

    hook = model.layer(0).register_forward_pre_hook(end)
    with pytest.raises(KeyboardInterrupt):
        model.layer(0)(vectors(0))
    hook.remove()
    stop()


class _Reader:
    """Holds a weight on a thread of its own until ``end``."""

    def __init__(self, model: Stack, hold: Hold) -> None:
        self._held, self._go_on = threading.Event(), threading.Event()
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(hold, model, self._stop)
        assert self._held.wait(10)

    def _stop(self) -> None:
        if threading.current_thread() is threading.main_thread():
            return  # which comes through the same hooks
        self._held.set()
        assert self._go_on.wait(10)

    def end(self) -> None:
        self._go_on.set()
        with self._pool:
            self._future.result()


@contextmanager
def _reading(model: Stack, hold: Hold | None) -> Iterator[None]:
    reader = None if hold is None else _Reader(model, hold)
    try:
        yield
    finally:
        if reader is not None:
            reader.end()


def _by_forward(model: Stack) -> torch.Tensor:
    return vector_loss(model, 5).detach()


def _by_operation(model: Stack) -> torch.Tensor:
    return model.layer(0).weight.detach().clone()


def _in_forward(model: Stack) -> torch.Tensor:
    """By attribute, within the forward of another module."""
    found: list[torch.Tensor] = []
    hook = model.norm.register_forward_pre_hook(
        lambda *_: found.append(model.layer(0).weight.detach().clone())
    )
    model.norm(vectors(0))
    hook.remove()
    return found[0]


def _trained(
    nvme: Path, host_memory: int, hold: Hold | None, read: Callable[[Stack], torch.Tensor]
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    model, found = seeded(Stack), []
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for step in range(3):
            vector_loss(model, step).backward()
            with _reading(model, hold):
                offloaded.step()
                found.append(read(model))
                found.append(vector_loss(model, step).detach())
                torch.autograd.grad(vector_loss(model, step), model.norm.weight)
    return found, values_of(model)


HOLDS = [_operation, _module, _attribute, _left]
READS = [_by_forward, _by_operation, _in_forward]
USUAL = [(_module, _by_operation)]


@pytest.mark.parametrize(("hold", "read"), matrix(product(HOLDS, READS), usual=USUAL))
def test_what_a_thread_holds_over_a_step_is_not_computed_with_after_it(
    hold: Hold, read: Callable[[Stack], torch.Tensor], nvme: Path
) -> None:
    expected = _trained(nvme, WHOLE, None, read)
    for host_memory in (WHOLE, least_budget(Stack, nvme)):
        found = _trained(nvme, host_memory, hold, read)
        assert all(map(same_bits, found[0], expected[0]))
        assert same_values(found[1], expected[1])


@pytest.mark.parametrize("hold", [_operation, _module])
def test_what_a_thread_holds_over_a_load_is_not_computed_with_after_it(
    hold: Hold, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
        expected = _by_forward(model)
        offloaded.save(tmp_path / "saved")
        vector_loss(model, 0).backward()
        offloaded.step()
        with _reading(model, hold):
            offloaded.load(tmp_path / "saved")
            assert same_bits(_by_forward(model), expected)


def test_reader_that_goes_on_after_a_step_gets_the_new_values(nvme: Path) -> None:
    found: list[torch.Tensor] = []

    def read(model: Stack, stop: Callable[[], None]) -> None:
        def twice(module: torch.nn.Module, *_: Any) -> None:
            stop()
            found.append(model.layer(0).weight.detach().clone())

        hook = model.norm.register_forward_pre_hook(twice)
        model.norm(vectors(0))
        hook.remove()

    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme)) as offloaded:
        vector_loss(model, 0).backward()
        with _reading(model, read):
            offloaded.step()
        expected = _by_operation(model)
    assert same_bits(found[0], expected)
