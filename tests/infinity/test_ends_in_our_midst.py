"""Blocks and models that handlers of signals, and the garbage collector, end or call in the midst
of hooks, where a lock is held for which their ends would wait.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.model import training_of
from tests.support.models import seeded
from tests.support.snapshot_runs import ADAMW, Net, assert_same, everything, train

PATIENCE_SECONDS = 30.0
X = torch.ones(8, 256)


@contextmanager
def amid_a_hook(offloaded: infinity.OffloadedModel, act: Callable[[], None]) -> Iterator[None]:
    """``act`` runs where the next weights are put in place, once, and the lock of that is held."""
    residency: Any = training_of(offloaded).residency
    real = residency._put_in

    def put_in(*arguments: Any) -> None:
        residency._put_in = real
        act()
        real(*arguments)

    residency._put_in = put_in
    try:
        yield
    finally:
        residency.__dict__.pop("_put_in", None)


def forward(model: torch.nn.Module) -> torch.Tensor:
    """On a thread, of which it is noticed that it waits for ever."""
    torch.manual_seed(0)
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(model(X).detach()), daemon=True)
    thread.start()
    thread.join(PATIENCE_SECONDS)
    assert found, "the forward pass failed, or waits for ever"
    return found[0]


def error_of(call: Callable[[Any], object], argument: Any, errors: list[Exception]) -> None:
    """What a handler would do that keeps its errors to itself."""
    try:
        call(argument)
    except Exception as error:
        errors.append(error)


@pytest.mark.parametrize("end", ["dropped", "generator"])
def test_a_gathered_block_that_is_dropped_in_a_hook_gives_its_parameters_back_later(
    end: str, nvme: Path
) -> None:
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
        weight = next(iter(offloaded.model.get_submodule("norm").parameters()))
        before = forward(offloaded.model)
        kept: list[Any] = []
        if end == "dropped":
            kept.append(stack := ExitStack())
            stack.enter_context(offloaded.gathered([weight], modify=True))
            del stack
        else:

            def hold() -> Iterator[None]:
                with offloaded.gathered([weight], modify=True):
                    yield

            kept.append(holding := hold())
            next(holding)
            del holding
        with torch.no_grad():
            weight.add_(1)
        lent = weight.untyped_storage().data_ptr()
        with amid_a_hook(offloaded, kept.clear):
            forward(offloaded.model)
        assert weight.untyped_storage().data_ptr() == lent
        torch.testing.assert_close(forward(offloaded.model), before, rtol=0, atol=0)
        offloaded.step()  # which is refused while something is lent


def test_a_block_that_a_handler_leaves_in_a_hook_stays_and_names_the_call(nvme: Path) -> None:
    block = infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB")
    with block as offloaded:
        errors: list[Exception] = []
        leave = partial(error_of, partial(block.__exit__, None, None), None, errors)
        with amid_a_hook(offloaded, leave):
            forward(offloaded.model)
        train(offloaded, 0, 1)
        assert str(errors[0]).startswith("the end of the offload block in the midst of")


def test_a_gathered_block_that_a_handler_leaves_in_a_hook_says_so_and_is_over(nvme: Path) -> None:
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
        weight = next(iter(offloaded.model.get_submodule("norm").parameters()))
        (stack := ExitStack()).enter_context(offloaded.gathered([weight], modify=True))
        errors: list[Exception] = []
        leave = partial(error_of, lambda _: stack.close(), None, errors)
        with amid_a_hook(offloaded, leave):
            forward(offloaded.model)
        assert str(errors[0]).startswith("the end of gathered() in the midst of")
        train(offloaded, 0, 1)


def test_a_model_that_a_handler_calls_in_a_hook_is_refused_and_the_pass_goes_on(nvme: Path) -> None:
    """Also where its outermost module has no parameters of its own."""
    runs = []
    for is_called in (False, True):
        torch.manual_seed(0)
        with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
            assert not list(offloaded.model.parameters(recurse=False))
            errors: list[Exception] = []
            call = partial(error_of, offloaded.model, X, errors)
            with amid_a_hook(offloaded, call if is_called else lambda: None):
                train(offloaded, 0, 2)
            assert len(errors) == is_called
            assert all(str(one).startswith("a use of the Net in the midst") for one in errors)
            runs.append(everything(offloaded))
    assert_same(*runs)


def test_a_gathered_block_is_entered_once_at_a_time_and_left_once(nvme: Path) -> None:
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
        lent = offloaded.gathered(modify=True)
        with pytest.raises(RuntimeError, match="is not entered"):
            lent.__exit__(None, None, None)
        for _ in range(2):
            with lent, pytest.raises(RuntimeError, match="entered already"):
                lent.__enter__()
        with pytest.raises(RuntimeError, match="left before"):
            lent.__exit__(None, None, None)
        train(offloaded, 0, 1)


def test_parameters_that_a_generator_gives_may_come_from_calls_of_the_handle(nvme: Path) -> None:
    with infinity.offload(seeded(Net), nvme, optimizer=ADAMW, host_memory="1GiB") as offloaded:
        offloaded.model(X).sum().backward()
        parameters = offloaded.model.parameters()
        lent = offloaded.gathered(p for p in parameters if offloaded.gradient(p) is not None)
        for _ in range(2):
            with lent:
                assert all(type(p.data) is torch.Tensor for p in offloaded.model.parameters())


def test_a_pass_that_an_interrupt_ended_leaves_the_autocast_cache_as_it_was(nvme: Path) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    assert torch.is_autocast_cache_enabled()
    model = seeded(Net)
    handle = model.get_submodule("norm").register_forward_pre_hook(interrupt)
    try:
        with (
            pytest.raises(KeyboardInterrupt),
            infinity.offload(model, nvme, optimizer=ADAMW, host_memory="1GiB"),
        ):
            model(X)
        assert torch.is_autocast_cache_enabled()
    finally:
        handle.remove()
        torch.set_autocast_cache_enabled(True)


def test_a_gathered_block_that_is_open_as_the_process_ends_says_nothing_of_us(nvme: Path) -> None:
    program = f"""
import infinity, torch
stack = infinity.offload(torch.nn.Linear(16, 16), {str(nvme)!r}, host_memory="64MiB")
offloaded = stack.__enter__()
lent = offloaded.gathered()
lent.__enter__()
"""
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0
    assert "Exception ignored" not in ended.stderr
    assert "Traceback" not in ended.stderr
