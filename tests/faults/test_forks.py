"""Processes forked inside the block, as the workers of a DataLoader are: what is the parent's is
refused at once and by name, nothing is waited for, and the parent goes on exactly.
"""

import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import infinity
from swap.update.stages import Stages
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits, values_of

_ALARM_SECONDS = 30


def in_child(action: Callable[[], Any]) -> str:
    """What ``action`` raises or returns in a forked process, as text; it may not take long."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_ALARM_SECONDS)
        try:
            text = f"returned {action()}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        os.write(write_end, text.encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    assert status == 0, "the child hung"
    names = {str(os.getpid()): "PARENT", str(child): "CHILD"}
    return re.sub(r"\d+", lambda number: names.get(number[0], number[0]), text)


@contextmanager
def stuck_update() -> Iterator[None]:
    """Updates in the background do not go on before the end of this block."""
    may_go_on = threading.Event()
    run_kernel = Stages.run_kernel

    def wait_and_run(self: Stages, job: Any) -> None:
        if threading.current_thread().name == "infinity-update":
            may_go_on.wait()
        run_kernel(self, job)

    with patch.object(Stages, "run_kernel", wait_and_run):
        try:
            yield
        finally:
            may_go_on.set()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("budget", ["whole", "least"])
def test_child_that_touches_the_model_during_an_update_is_refused_at_once(
    tmp_path: Path, budget: str
) -> None:
    host_memory = WHOLE if budget == "whole" else least_budget(Stack, tmp_path)
    model, expected = seeded(Stack), seeded(Stack)
    with infinity.offload(expected, tmp_path, host_memory=host_memory) as other:
        _steps(expected, other, range(2))
    with infinity.offload(model, tmp_path, host_memory=host_memory) as offloaded:
        with stuck_update():
            _steps(model, offloaded, range(1))
            uses: dict[str, Callable[[], Any]] = {
                "layers.2.weight": lambda: model.layer(2).weight.sum(),
                "norm.weight": lambda: model.norm.weight.sum(),
                "offloaded layers": lambda: model(torch.ones(2, 256)),
                "offloaded model": lambda: offloaded.step(),
            }
            for name, use in uses.items():
                refusal = in_child(use)
                assert refusal.startswith("RuntimeError: "), refusal
                assert name in refusal
                assert "process PARENT cannot be used in process CHILD" in refusal
            assert in_child(lambda: tuple(model.layer(2).weight.shape)) == "returned (256, 256)"
            assert in_child(lambda: _files_of(tmp_path)) == "returned []"
        _steps(model, offloaded, range(1, 2))
    found = values_of(model)
    assert all(same_bits(value, found[name]) for name, value in values_of(expected).items())


@pytest.mark.timeout(120)
def test_child_that_leaves_the_block_takes_nothing_with_it(tmp_path: Path) -> None:
    model = seeded(Stack)
    block = infinity.offload(model, tmp_path, host_memory=least_budget(Stack, tmp_path))
    with block as offloaded:
        with stuck_update():
            _steps(model, offloaded, range(1))

            def leave() -> None:
                try:
                    raise SystemExit(3)
                except SystemExit as error:
                    block.__exit__(SystemExit, error, error.__traceback__)
                    raise

            before = sorted(tmp_path.rglob("*"))
            assert in_child(leave) == "SystemExit: 3"
            assert sorted(tmp_path.rglob("*")) == before
        _steps(model, offloaded, range(1, 2))


def test_gathered_weights_may_be_read_in_a_child(tmp_path: Path) -> None:
    model = seeded(Stack)
    value = model.layer(2).weight.detach()[0, 0].item()
    with infinity.offload(model, tmp_path) as offloaded, offloaded.gathered():
        read = in_child(lambda: model.layer(2).weight.detach()[0, 0].item())
    assert read == f"returned {value}"


def _steps(model: nn.Module, offloaded: infinity.OffloadedModel, steps: range) -> None:
    for step in steps:
        vector_loss(model, step).backward()
        offloaded.step()


def _files_of(folder: Path) -> list[str]:
    """What this process has open below ``folder``."""
    links = (fd for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink())
    return [name for fd in links if (name := str(fd.readlink())).startswith(str(folder))]


def test_a_child_leaves_gathered_whatever_other_threads_were_doing(tmp_path: Path) -> None:
    """A lock that another thread had is nobody's to release there."""
    model = seeded(Stack)
    is_held, may_go_on = threading.Event(), threading.Event()

    def change(state: Any) -> None:
        with state.changing:
            is_held.set()
            may_go_on.wait(30)

    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        lending = offloaded.gathered(modify=True)
        lending.__enter__()
        with torch.no_grad():
            model.layer(0).weight.add_(1.0)
        other = threading.Thread(target=change, args=(offloaded._training.state,))
        other.start()
        is_held.wait()

        def leave() -> None:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler would wait for the lock, too
            signal.alarm(5)
            lending.__exit__(None, None, None)

        try:
            told = in_child(leave)
        finally:
            may_go_on.set()
            other.join()
        lending.__exit__(None, None, None)
    assert told.startswith(("returned", "RuntimeError"))


def _at_once(use: Callable[[], Any]) -> Callable[[], Any]:
    def within() -> Any:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # a handler would wait for the lock, too
        signal.alarm(5)
        return use()

    return within


@pytest.mark.timeout(120)
def test_a_child_that_clears_gradients_during_an_update_ahead_of_its_step_is_refused(
    tmp_path: Path,
) -> None:
    """It waited for the end of that, which no thread of its own would ever reach."""
    model = seeded(Stack)
    weight = model.layer(2).weight
    with infinity.offload(model, tmp_path, host_memory=least_budget(Stack, tmp_path)) as offloaded:
        _steps(model, offloaded, range(2))
        offloaded.flush()
        with stuck_update():
            vector_loss(model, 2).backward()
            assert offloaded._training.state.speculation._fed
            uses: tuple[Callable[[], Any], ...] = (
                offloaded.optimizer.zero_grad,
                model.zero_grad,
                lambda: weight.grad,
                lambda: setattr(weight, "grad", None),
            )
            for use in uses:
                assert "process PARENT cannot be used in process CHILD" in in_child(_at_once(use))
        offloaded.step()


@pytest.mark.timeout(120)
def test_a_child_is_refused_whatever_locks_other_threads_had(tmp_path: Path) -> None:
    """It waited for locks that nobody releases there."""
    model = seeded(Stack)
    is_held, may_go_on = threading.Event(), threading.Event()
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        loss = vector_loss(model, 0)
        training = offloaded._training

        def hold() -> None:
            with (
                training.state.weights._lock,
                training.versions._counting,
                training._phases._lock,
                training.gradients.passes._lock,
            ):
                is_held.set()
                may_go_on.wait(60)

        other = threading.Thread(target=hold)
        other.start()
        is_held.wait()
        uses: tuple[Callable[[], Any], ...] = (
            lambda: model(torch.ones(2, 256)),
            lambda: model.layer(2)(torch.ones(2, 256)),
            loss.backward,
        )
        try:
            told = [in_child(_at_once(use)) for use in uses]
        finally:
            may_go_on.set()
            other.join()
        assert all("process PARENT cannot be used in process CHILD" in text for text in told), told
        loss.backward()
        offloaded.step()
