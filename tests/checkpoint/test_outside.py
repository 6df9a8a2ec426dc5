"""What a sink raises is its own error, whatever kind it is of, and says nothing of a checkpoint."""

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import checkpoint
from checkpoint.dcp import StorageReader
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

ERRORS: dict[str, Callable[[], Exception]] = {
    "missing": lambda: FileNotFoundError(errno.ENOENT, "my file is gone", "/elsewhere/w.bin"),
    "incomplete": lambda: checkpoint.IncompleteCheckpointError("another one"),
    "corrupt": lambda: checkpoint.CorruptCheckpointError("another one is damaged"),
    "unreadable": lambda: OSError(errno.EIO, "my disk", "/elsewhere/r0-0.safetensors"),
}


class Sink:
    """Fails when it is first written to, or asked for what it is."""

    shape = (4,)

    def __init__(self, error: Exception, failures: int, where: str = "write") -> None:
        self.error, self.failures, self.where = error, failures, where
        self.data = bytearray(16)

    @property
    def dtype(self) -> torch.dtype:
        self._at("dtype")
        return torch.float32

    def write(self, start: int, data: memoryview) -> None:
        self._at("write")
        self.data[start : start + len(data)] = data

    def _at(self, where: str) -> None:
        if where == self.where and self.failures:
            self.failures -= 1
            raise self.error


class SafeSink(Sink):
    thread_safe = True


@pytest.fixture
def series(tmp_path: Path) -> checkpoint.Manager:
    manager = checkpoint.Manager(tmp_path / "run", keep=2)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step)), "step": step})
    return manager


@pytest.mark.parametrize("kind", [Sink, SafeSink])
@pytest.mark.parametrize("failures", [1, 99])
@pytest.mark.parametrize("step", [None, 2])
@pytest.mark.parametrize("error", ERRORS)
def test_manager_with_a_failing_sink_raises_its_error_and_passes_over_nothing(
    series: checkpoint.Manager, error: str, step: int | None, failures: int, kind: type[Sink]
) -> None:
    sink = kind(ERRORS[error](), failures)
    with pytest.raises(type(sink.error)) as caught:
        series.load(step, into={"w": sink, "step": 0})
    assert caught.value is sink.error
    assert series.loaded is None
    series.save(3, {"w": torch.zeros(4), "step": 3})
    assert series.steps() == [2, 3], "the sound step counts as kept"


@pytest.mark.parametrize("error", ERRORS)
def test_load_with_a_failing_sink_raises_its_error_as_it_is(
    series: checkpoint.Manager, error: str
) -> None:
    sink = Sink(ERRORS[error](), 1)
    with pytest.raises(type(sink.error)) as caught:
        checkpoint.load(series.path(2), into={"w": sink, "step": 0})
    assert caught.value is sink.error
    assert str(caught.value) == str(ERRORS[error]())


def test_load_into_a_sink_without_a_dtype_raises_its_error(series: checkpoint.Manager) -> None:
    sink = Sink(ERRORS["missing"](), 99, "dtype")
    with pytest.raises(FileNotFoundError, match="my file is gone"):
        series.load(into={"w": sink, "step": 0})


def test_sink_that_loads_damage_elsewhere_is_not_taken_for_it(
    series: checkpoint.Manager, tmp_path: Path
) -> None:
    info = checkpoint.save({"w": torch.ones(4)}, tmp_path / "other")
    (tmp_path / "other" / "manifest.json").write_bytes(b"{}")

    class Nested(Sink):
        def write(self, start: int, data: memoryview) -> None:
            checkpoint.load(info.path)

    with pytest.raises(checkpoint.CorruptCheckpointError, match="other"):
        series.load(into={"w": Nested(ValueError(), 0), "step": 0})
    series.save(3, {"w": torch.zeros(4), "step": 3})
    assert series.steps() == [2, 3]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_planner_that_fails_while_a_save_comes_between_has_its_own_error(
    series: checkpoint.Manager,
) -> None:
    class Planner(DefaultLoadPlanner):
        def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
            checkpoint.save({"w": torch.zeros(4)}, series.path(2))
            raise ERRORS["missing"]()

    state: dict[str, Any] = {"w": torch.zeros(4)}
    with pytest.raises(BaseException, match="my file is gone"):
        dcp_load(state, storage_reader=StorageReader(series.path(2)), planner=Planner())
