"""OffloadedAdamW meets errors of I/O and a full disk, and leaves no file however it ends."""

import errno
import gc
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from aio import AioError, Engine
from aio.backends import MemoryBackend
from infinity import OffloadedAdamW
from swap.interruptions.undo import close_gone
from swap.storage import opening
from swap.storage.extents import ExtentStore
from tests.support.adamw_model import (
    AMPLE,
    DTYPES,
    SMALL,
    backward,
    files_in,
    make_model,
    same,
    train,
    values,
)
from tests.support.scripts import Script

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Makes the engines of later optimizers fail with that probability a block."""

    def install(error: float) -> None:
        backend = MemoryBackend(seed=7, error=error, errno=errno.EIO, short_transfer=0.1)
        monkeypatch.setattr(opening, "Engine", partial(Engine, backend))

    return install


@pytest.mark.parametrize("dtype", DTYPES)
def test_io_errors_are_raised_and_flush_finishes_the_step_exactly(
    dtype: torch.dtype, tmp_path: Path, faulty: Callable[[float], None]
) -> None:
    model = make_model(dtype)
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=AMPLE) as optimizer:
        train(model, optimizer, range(6))
    expected = values(model)
    faulty(0.2)
    failures = 0
    model = make_model(dtype)
    with OffloadedAdamW(model.parameters(), lr=1e-2, nvme=tmp_path, host_memory=SMALL) as optimizer:
        for step in range(6):
            backward(model, step)
            if not take_step(optimizer):
                with pytest.raises(RuntimeError, match=r"optimizer\.flush\(\)"):
                    optimizer.step()
                failures += finish(optimizer)
            optimizer.zero_grad()
    assert failures > 3
    assert same(values(model), expected)


def take_step(optimizer: OffloadedAdamW) -> bool:
    """Whether the step was not stopped by an error that says how to finish it."""
    try:
        optimizer.step()
    except AioError as error:
        return not str(error).endswith("call optimizer.flush() to finish it")
    return True


def finish(optimizer: OffloadedAdamW) -> int:
    """Flush until it succeeds; returns how often it was tried."""
    for tries in range(1, 1000):
        try:
            optimizer.flush()
        except AioError:
            continue
        return tries
    raise AssertionError("flush never succeeded")


def test_gradient_zeroed_in_place_before_a_stopped_step_is_finished_is_refused(
    tmp_path: Path, faulty: Callable[[float], None]
) -> None:
    faulty(1.0)
    model = make_model()
    with OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL) as optimizer:
        backward(model, 0)
        with pytest.raises(AioError):
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with pytest.raises(RuntimeError, match="load the last checkpoint"):
            optimizer.flush()


def test_full_disk_is_an_error_when_the_optimizer_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise AioError("no space", errno=errno.ENOSPC, filename=os.fspath(tmp_path))

    monkeypatch.setattr("swap.storage.extents.ExtentStore.reserve", full)
    with pytest.raises(AioError, match="no space"):
        OffloadedAdamW(make_model().parameters(), nvme=tmp_path, host_memory=SMALL)
    assert files_in(tmp_path) == []


def test_report_counts_all_space_that_is_reserved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserved: list[int] = []
    reserve = ExtentStore.reserve

    def noted(store: ExtentStore, nbytes: int) -> None:
        reserved.append(nbytes)
        reserve(store, nbytes)

    monkeypatch.setattr(ExtentStore, "reserve", noted)
    parameters = [*make_model().parameters()]
    with OffloadedAdamW(parameters[:3], nvme=tmp_path, host_memory=SMALL) as optimizer:
        optimizer.add_param_group({"params": parameters[3:]})
        assert optimizer.report().nvme_bytes == reserved[-1]


# Cleaning up.


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[list[OffloadedAdamW]]:
    model = make_model()
    optimizers = [OffloadedAdamW(model.parameters(), nvme=tmp_path, host_memory=SMALL)]
    train(model, optimizers[0], range(1))
    assert files_in(tmp_path) != []
    yield optimizers
    assert files_in(tmp_path) == []


def test_close_leaves_no_file_and_refuses_further_use(opened: list[OffloadedAdamW]) -> None:
    (optimizer,) = opened
    optimizer.close()
    optimizer.close()
    for call in (optimizer.step, optimizer.flush, optimizer.state_dict):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_collected_optimizer_leaves_no_file(opened: list[OffloadedAdamW]) -> None:
    opened.clear()
    gc.collect()
    close_gone()


def test_exception_in_the_block_leaves_no_file(opened: list[OffloadedAdamW]) -> None:
    with pytest.raises(KeyError), opened[0]:
        raise KeyError


def test_fork_leaves_the_files_of_the_parent(opened: list[OffloadedAdamW], tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        opened[0].close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert files_in(tmp_path) != []
    opened[0].close()


def test_interpreter_exit_without_close_leaves_no_file(tmp_path: Path) -> None:
    program = """
import sys, warnings, torch, infinity
warnings.simplefilter("error")
model = torch.nn.Linear(1000, 1000)
optimizer = infinity.OffloadedAdamW(model.parameters(), nvme=sys.argv[1], host_memory="7MiB")
model(torch.ones(1, 1000)).sum().backward()
optimizer.step()
assert optimizer.report().nvme_bytes
"""
    script = Script(program, tmp_path, ends_interpreter=True)
    _, errors = script.end()
    assert (script.returncode, errors) == (0, "")
    assert files_in(tmp_path) == []


_CLOSED_BY_A_FINALIZER = """
import sys
import torch, infinity

class Trainer:
    def __init__(self, nvme):
        self.itself = self
        self.optimizer = infinity.OffloadedAdamW([torch.nn.Parameter(torch.ones(8))], nvme=nvme)
    def __del__(self, say=print):
        self.optimizer.close()
        say("closed", flush=True)

trainer = Trainer(sys.argv[1])
"""


def test_a_finalizer_at_the_end_of_the_interpreter_may_close_it(tmp_path: Path) -> None:
    script = Script(_CLOSED_BY_A_FINALIZER, tmp_path, ends_interpreter=True)
    printed, errors = script.end()
    assert (script.returncode, printed, errors) == (0, "closed\n", "")
    assert not list(tmp_path.rglob("*.swap"))
