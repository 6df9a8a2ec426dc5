"""The end of the block when the disk fails, or the user has had enough: what there is, is given
back, and what is missing can still be got at.
"""

import errno
import gc
import itertools
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import infinity
from aio import AioError
from infinity import restoring
from infinity.autograd.lost_values import refuse_calls
from infinity.parameters.offloaded.becoming import become_plain
from swap.interruptions.undo import close_gone
from swap.storage.components import ComponentStore
from swap.update.stages import Stages
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits, values_of


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_PAUSES_SECONDS", (0.0, 0.0))


@pytest.fixture
def trained(tmp_path: Path) -> dict[str, torch.Tensor]:
    """What two steps make of the model."""
    model = seeded(Stack)
    _train(model, tmp_path)
    return values_of(model)


@contextmanager
def _disk(model: nn.Module, names: Callable[[str], bool], times: int) -> Iterator[list[str]]:
    """Reads of these parameters fail so many times; what failed is noted."""
    failed: list[str] = []
    read = ComponentStore.read

    def read_or_fail(self: ComponentStore, parameter: int, *arguments: Any) -> None:
        name = self.layout.specs[parameter].name
        if names(name) and len(failed) < times:
            failed.append(name)
            raise AioError("no bytes today", errno=errno.EIO, filename="state.swap")
        read(self, parameter, *arguments)

    with patch.object(ComponentStore, "read", read_or_fail):
        yield failed


def _train(
    model: nn.Module, nvme: Path, at_the_end: Any = None, host_memory: int | None = None
) -> None:
    host_memory = least_budget(Stack, nvme) if host_memory is None else host_memory
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for step in range(2):
            vector_loss(model, step).backward()
            offloaded.step()
        if at_the_end is not None:
            at_the_end(offloaded)


def test_transient_read_error_at_the_end_costs_nothing(
    tmp_path: Path, trained: dict[str, torch.Tensor]
) -> None:
    model = seeded(Stack)
    with _disk(model, lambda name: True, times=1) as failed:
        _train(model, tmp_path)
    assert len(failed) == 1
    assert _differing(model, trained) == set()
    assert list(tmp_path.iterdir()) == []


def test_unreadable_parameters_are_on_meta_and_can_be_read_later(
    tmp_path: Path, trained: dict[str, torch.Tensor]
) -> None:
    model = seeded(Stack)
    identities = [id(parameter) for parameter in model.parameters()]
    bad = {"layers.2.weight", "layers.7.weight"}
    with (
        _disk(model, bad.__contains__, times=1000),
        pytest.raises(infinity.RestoreError, match=r"2 of \d+ .*no bytes.* retry\(\)") as caught,
    ):
        _train(model, tmp_path)
    error = caught.value
    assert set(error.parameters) == bad
    assert error.errno == errno.EIO
    assert {name for name, p in model.named_parameters() if p.is_meta} == bad
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert all(Path(folder).is_dir() for folder in error.folders)
    with _disk(model, {"layers.7.weight"}.__contains__, times=1000):
        with pytest.raises(infinity.RestoreError) as caught:
            error.retry()
        assert caught.value.parameters == ["layers.7.weight"]
    caught.value.retry()
    error.retry()
    assert _differing(model, trained) == set()
    assert [id(parameter) for parameter in model.parameters()] == identities
    assert list(tmp_path.iterdir()) == []
    _train(model, tmp_path)  # the model is good for another block


def test_swap_files_go_with_the_error_that_keeps_them(tmp_path: Path) -> None:
    model = seeded(Stack)
    with _disk(model, {"layers.2.weight"}.__contains__, times=1000):
        with pytest.raises(infinity.RestoreError) as caught:
            _train(model, tmp_path)
        assert Path(caught.value.folders[0]).is_dir()
    del caught
    gc.collect()
    close_gone()
    assert list(tmp_path.iterdir()) == []


def test_swap_files_go_with_the_error_of_a_step_that_could_not_be_finished(tmp_path: Path) -> None:
    """The state keeps what stopped the step, which came through the frames of whoever saw it."""

    def train() -> None:
        model = seeded(Stack)
        least = least_budget(Stack, tmp_path)
        with infinity.offload(model, tmp_path, host_memory=least) as offloaded:
            vector_loss(model, 0).backward()
            offloaded.step()
            offloaded.flush()

    def fail(stages: Stages, job: Any) -> None:
        raise AioError("full", errno=errno.ENOSPC, filename="state.swap")

    with patch.object(Stages, "start_write", fail):
        with pytest.raises(infinity.RestoreError) as caught:
            train()
        with pytest.raises(infinity.RestoreError) as again:
            caught.value.retry()
        assert Path(again.value.folders[0]).is_dir()
    del caught, again
    gc.collect()
    close_gone()
    assert list(tmp_path.iterdir()) == []


def test_step_that_cannot_be_finished_leaves_values_from_before_it_until_the_retry(
    tmp_path: Path, trained: dict[str, torch.Tensor]
) -> None:
    model = seeded(Stack)
    start_write = Stages.start_write
    works = False

    def write_or_fail(self: Stages, job: Any) -> None:
        if not works:
            raise AioError("full", errno=errno.ENOSPC, filename="state.swap")
        start_write(self, job)

    def one_step(offloaded: infinity.OffloadedModel) -> None:
        vector_loss(model, 0).backward()
        offloaded.step()

    before = values_of(model)
    expected = seeded(Stack)
    with infinity.offload(expected, tmp_path, host_memory=least_budget(Stack, tmp_path)) as other:
        vector_loss(expected, 0).backward()
        other.step()
    with (
        patch.object(Stages, "start_write", write_or_fail),
        pytest.raises(infinity.RestoreError, match="values from before the last step") as caught,
        infinity.offload(model, tmp_path, host_memory=least_budget(Stack, tmp_path)) as offloaded,
    ):
        one_step(offloaded)
    unfinished = set(caught.value.parameters)
    assert "layers.3.weight" in unfinished
    for name, value in values_of(model).items():
        source = before if name in unfinished else values_of(expected)
        assert same_bits(value, source[name]), name
    works = True
    caught.value.retry()
    assert _differing(model, values_of(expected)) == set()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("after", [0, 5, 23])
def test_interrupt_while_parameters_are_restored_is_raised_when_all_are(
    tmp_path: Path, trained: dict[str, torch.Tensor], after: int
) -> None:
    model = seeded(Stack)
    calls = 0
    read = ComponentStore.read

    def interrupted(self: ComponentStore, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > after and calls <= after + 2:
            raise KeyboardInterrupt
        read(self, *arguments)

    with pytest.raises(KeyboardInterrupt), patch.object(ComponentStore, "read", interrupted):
        _train(model, tmp_path)
    assert _differing(model, trained) == set()
    assert list(tmp_path.iterdir()) == []


def _differing(model: nn.Module, expected: dict[str, torch.Tensor]) -> set[str]:
    found = values_of(model)
    return {name for name, value in expected.items() if not same_bits(value, found[name])}


@pytest.mark.parametrize("budget", ["least", "whole"])
@pytest.mark.parametrize("nth", [1, 2, 7])
@pytest.mark.parametrize("where", ["Restoring._read", "Restoring._insist", "become_plain"])
def test_what_a_handler_raises_at_the_end_costs_no_parameter(
    where: str, nth: int, budget: str, tmp_path: Path, trained: dict[str, torch.Tensor]
) -> None:
    """That of a DataLoader raises RuntimeError when a worker dies, those of time limits what the
    program likes.
    """
    model, calls = seeded(Stack), itertools.count(1)
    inner = getattr(restoring.Restoring, where.removeprefix("Restoring."), become_plain)

    def call_and_be_interrupted(*arguments: Any) -> Any:
        result = inner(*arguments)
        if next(calls) == nth:
            raise RuntimeError("a worker was killed")
        return result

    host_memory = None if budget == "least" else WHOLE
    with (
        patch(f"infinity.restoring.{where}", call_and_be_interrupted),
        pytest.raises(RuntimeError, match="a worker was killed") as caught,
    ):
        _train(model, tmp_path, host_memory=host_memory)
    assert not isinstance(caught.value, infinity.RestoreError)
    assert all(same_bits(values, trained[key]) for key, values in values_of(model).items())
    vector_loss(model, 2).backward()


def test_what_a_handler_raises_behind_missing_values_costs_no_retry(
    tmp_path: Path, trained: dict[str, torch.Tensor]
) -> None:
    """The error that keeps the values is raised, and that of the handler is behind it."""
    model, calls = seeded(Stack), itertools.count()
    inner = refuse_calls

    def call_and_be_interrupted(*arguments: Any) -> Any:
        result = inner(*arguments)
        if next(calls) == 0:
            raise TimeoutError("no time left")
        return result

    with (
        _disk(model, {"layers.2.weight"}.__contains__, times=1000),
        patch("infinity.restoring.refuse_calls", call_and_be_interrupted),
        pytest.raises(infinity.RestoreError, match="no bytes today") as caught,
    ):
        _train(model, tmp_path)
    assert str(caught.value.__context__) == "no time left"
    caught.value.retry()
    assert _differing(model, trained) == set()


def test_error_of_the_disk_behind_that_of_a_handler_is_what_is_told(
    tmp_path: Path, trained: dict[str, torch.Tensor]
) -> None:
    model, calls = seeded(Stack), itertools.count()
    inner = restoring.Restoring._read

    def read_and_be_interrupted(*arguments: Any) -> Any:
        if next(calls) == 0:
            raise TimeoutError("no time left")
        return inner(*arguments)

    with (
        _disk(model, lambda name: True, times=1000),
        patch("infinity.restoring.Restoring._read", read_and_be_interrupted),
        pytest.raises(infinity.RestoreError, match="no bytes today") as caught,
    ):
        _train(model, tmp_path)
    cause = caught.value.__cause__
    assert cause is not None
    assert [str(cause), str(cause.__context__)] == ["no bytes today", "no time left"]
    caught.value.retry()
    assert _differing(model, trained) == set()


@pytest.mark.parametrize("where", ["Restoring._insist", "Restoring._refuse_calls"])
def test_handler_that_raises_again_and_again_at_the_end_costs_no_parameter(
    where: str, tmp_path: Path, trained: dict[str, torch.Tensor]
) -> None:
    """As that of a DataLoader does when all of its workers die."""
    model, calls = seeded(Stack), itertools.count()
    inner = getattr(restoring.Restoring, where.removeprefix("Restoring."))

    def raise_error(number: int, frame: object) -> None:
        raise TimeoutError(errno.ETIMEDOUT, "killed")

    def call_and_be_interrupted(*arguments: Any) -> Any:
        result = inner(*arguments)
        if next(calls) < 20:
            signal.raise_signal(signal.SIGUSR1)
        return result

    before = signal.signal(signal.SIGUSR1, raise_error)
    try:
        with (
            patch(f"infinity.restoring.{where}", call_and_be_interrupted),
            pytest.raises(TimeoutError, match="killed"),
        ):
            _train(model, tmp_path)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert next(calls) > 20
    assert _differing(model, trained) == set()
