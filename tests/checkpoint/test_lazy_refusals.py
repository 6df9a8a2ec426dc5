"""What an open checkpoint refuses by name, with what to do: being taken for tensors in memory, and
being read in the midst of a read of the same thread.
"""

from __future__ import annotations

import copy
import io
import operator
import pickle
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import checkpoint
from checkpoint.loading import chunks
from tests.faults.test_forks import in_child
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()

STATE: dict[str, Any] = {
    "weight": torch.arange(12.0).reshape(3, 4),
    "bias": torch.ones(3),
    "scalar": torch.tensor(2.5),
    "array": np.arange(5),
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    checkpoint.save(STATE, tmp_path / "step")
    return tmp_path / "step"


@pytest.fixture
def lazy(path: Path) -> Iterator[checkpoint.LazyCheckpoint]:
    with checkpoint.open(path) as opened:
        yield opened


USES: dict[str, Callable[[Any], object]] = {
    "plus": lambda lazy: lazy["weight"] + 1,
    "right": lambda lazy: torch.ones(3) * lazy["bias"],
    "matmul": lambda lazy: lazy["weight"] @ torch.ones(4),
    "compare": lambda lazy: lazy["weight"] > 1,
    "equal": lambda lazy: lazy["bias"] == torch.ones(3),
    "equal, right": lambda lazy: torch.ones(3) == lazy["bias"],
    "equal to an array, right": lambda lazy: np.arange(5) == lazy["array"],
    "equal to a number": lambda lazy: lazy["scalar"] == 2.5,
    "equal to a number, right": lambda lazy: operator.eq(2.5, lazy["scalar"]),
    "unequal to a number": lambda lazy: lazy["scalar"] != 2.5,
    "equal to a list": lambda lazy: lazy["bias"] == [1, 1, 1],
    "truth": lambda lazy: bool(lazy["scalar"]),
    "truth of a row": lambda lazy: bool(lazy["bias"]),
    "bytes": lambda lazy: bytes(lazy["array"]),
    "length": lambda lazy: len(lazy["bias"]),
    "range": lambda lazy: range(lazy["scalar"]),
    "round": lambda lazy: round(lazy["scalar"]),
    "shift": lambda lazy: 1 << lazy["array"],
    "index of a tensor": lambda lazy: torch.ones(9, 9)[lazy["array"]],
    "index of a tensor that is set": lambda lazy: torch.ones(9, 9).__setitem__(lazy["array"], 1),
    "index of a tensor, of several": lambda lazy: torch.ones(9, 9)[lazy["array"], 0],
    "index of a list": lambda lazy: [1, 2][lazy["array"]],
    "torch.tensor": lambda lazy: torch.tensor(lazy["bias"]),
    "torch.tensor, no dimension": lambda lazy: torch.tensor(lazy["scalar"]),
    "torch.as_tensor": lambda lazy: torch.as_tensor(lazy["weight"]),
    "torch.asarray": lambda lazy: torch.asarray(lazy["bias"]),
    "function of numpy": lambda lazy: np.dot(lazy["bias"], lazy["bias"]),
    "ufunc of numpy": lambda lazy: np.add(lazy["array"], 1),
    "array, plus": lambda lazy: np.arange(5) + lazy["array"],
    "minus": lambda lazy: -lazy["bias"],
    "float": lambda lazy: float(lazy["scalar"]),
    "attribute": lambda lazy: lazy["weight"].to(torch.float64),
    "array": lambda lazy: lazy["array"].astype("f4"),
    "parameter": lambda lazy: torch.nn.Parameter(lazy["weight"]),
    "change": lambda lazy: lazy["weight"].__setitem__(0, 1),
    "module": lambda lazy: torch.nn.Linear(4, 3).load_state_dict(lazy, strict=False),
    "on meta": lambda lazy: torch.nn.Linear(4, 3, device="meta").load_state_dict(
        lazy, strict=False
    ),
    "module, assigned": lambda lazy: torch.nn.BatchNorm1d(3).load_state_dict(
        {"running_mean": lazy["bias"]}, strict=False, assign=True
    ),
    "pickle": lambda lazy: pickle.dumps(lazy["weight"]),
    "copy": lambda lazy: copy.deepcopy(dict(lazy)),
    "torch.save": lambda lazy: torch.save(dict(lazy), io.BytesIO()),
    "write": lambda lazy: checkpoint.write_safetensors(lazy, "unused"),
}


@pytest.mark.parametrize("use", USES)
def test_a_tensor_that_is_not_read_yet_says_so_where_values_are_wanted(
    lazy: checkpoint.LazyCheckpoint, use: str
) -> None:
    with pytest.raises((TypeError, AttributeError, RuntimeError), match=r"index it: `\[...\]`"):
        USES[use](lazy)


def test_a_save_of_what_is_not_read_says_what_to_give(
    lazy: checkpoint.LazyCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(TypeError, match=r"cannot save state\['weight'\].*index it: `\[...\]`"):
        checkpoint.save(dict(lazy), tmp_path / "other")
    with pytest.raises(TypeError, match=r"cannot save state: .*index it by a name"):
        checkpoint.save(lazy, tmp_path / "other")
    assert not (tmp_path / "other").exists()


FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "add": lambda value: torch.add(value, 1),
    "keyword": lambda value: torch.add(torch.ones(3), other=value),
    "list": lambda value: torch.stack([torch.ones(3), value]),
    "method": lambda value: torch.empty(3).copy_(value),
    "masked": lambda value: torch.ones(3).masked_fill(value, 0),
    "full": lambda value: torch.full((2,), value),
    "buffer": lambda value: torch.nn.Module().register_buffer("it", value),
    "parameter": lambda value: torch.nn.Module().register_parameter("it", value),
    "buffer, assigned": lambda value: setattr(torch.nn.BatchNorm1d(3), "running_mean", value),
    "parameter, assigned": lambda value: setattr(torch.nn.BatchNorm1d(3), "weight", value),
}


@pytest.mark.parametrize("use", FUNCTIONS)
def test_nothing_that_is_not_read_is_a_tensor_to_torch(
    lazy: checkpoint.LazyCheckpoint, use: str
) -> None:
    """Whose errors name its class; and modules take it for no buffer."""
    with pytest.raises(TypeError, match="LazyTensor"):
        FUNCTIONS[use](lazy["bias"])
    with pytest.raises(TypeError, match="LazyCheckpoint"):
        FUNCTIONS[use](lazy)


def test_attributes_that_no_tensor_has_are_missing_as_of_any_object(
    lazy: checkpoint.LazyCheckpoint,
) -> None:
    with pytest.raises(AttributeError, match="'LazyTensor' object has no attribute 'nonsense'"):
        operator.attrgetter("nonsense")(lazy["weight"])
    bias = lazy["bias"]
    assert bias in {bias}
    others: list[object] = [bias, lazy["bias"], None]
    assert [bias == other for other in others] == [True, False, False]
    assert [bias != other for other in others] == [False, True, True]
    assert {bias: 1}[bias] == 1


class Broken:
    """Does something at each line of the reading, as the handler of a signal would that comes
    there, and keeps what became of it.
    """

    def __init__(self, handler: Callable[[], object]) -> None:
        self._handler = handler
        self._is_inside = False
        self.results: list[object] = []

    def __call__(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(str(Path(chunks.__file__).parent)):
            return None
        if event == "line" and not self._is_inside:
            self._is_inside = True
            try:
                self.results.append(self._handler())
            except RuntimeError as error:
                self.results.append(error)
            finally:
                self._is_inside = False
        return self


@pytest.mark.parametrize("verify", [True, False])
def test_a_handler_reads_the_checkpoint_that_it_broke_into_or_is_refused_by_name(
    path: Path, verify: bool
) -> None:
    with checkpoint.open(path, verify=verify) as lazy:
        came = Broken(lambda: lazy["bias"][...])
        before = sys.gettrace()
        sys.settrace(came)
        try:
            found = lazy["weight"][1]
        finally:
            sys.settrace(before)
        assert torch.equal(found, STATE["weight"][1])
        refused = [one for one in came.results if isinstance(one, RuntimeError)]
        assert 0 < len(refused) < len(came.results)
        for one in came.results:
            if isinstance(one, RuntimeError):
                assert str(one).startswith(f"{path} is read in a handler of a signal")
                assert "open it anew there" in str(one)
            else:
                assert isinstance(one, torch.Tensor)
                assert torch.equal(one, STATE["bias"])
        assert torch.equal(lazy["weight"][...], STATE["weight"])


def test_a_handler_that_opens_the_checkpoint_anew_reads_it(path: Path) -> None:
    def anew() -> object:
        with checkpoint.open(path) as again:
            return again["bias"][...]

    with checkpoint.open(path) as lazy:
        came = Broken(anew)
        before = sys.gettrace()
        sys.settrace(came)
        try:
            found = lazy["weight"][1]
        finally:
            sys.settrace(before)
    assert torch.equal(found, STATE["weight"][1])
    assert came.results
    assert all(isinstance(one, torch.Tensor) for one in came.results)


def _vanish(path: Path) -> None:
    shutil.rmtree(path)


def _become_a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("text")


def _lose_its_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def _be_saved_over(path: Path) -> None:
    checkpoint.save({"other": torch.zeros(1)}, path)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (_vanish, FileNotFoundError, "there is no checkpoint"),
        (_become_a_file, NotADirectoryError, "this is a file"),
        (_lose_its_manifest, checkpoint.IncompleteCheckpointError, "holds no manifest.json"),
    ],
)
def test_a_path_that_changes_meanwhile_is_an_error_by_name(
    path: Path, change: Callable[[Path], None], error: type[Exception], words: str
) -> None:
    with checkpoint.open(path) as lazy:
        change(path)
        assert torch.equal(lazy["weight"][...], STATE["weight"]), "its files are open"
        for way in (checkpoint.load, checkpoint.open, checkpoint.verify):
            with pytest.raises(error, match=words):
                way(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_vanish, "is not there any more"),
        (_become_a_file, "is not there any more"),
        (_be_saved_over, "has been replaced by .*; open the checkpoint again"),
    ],
)
def test_data_that_went_with_their_save_are_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Path], None], words: str
) -> None:
    """Of more files than are kept open."""
    path, stripes = tmp_path / "step", [tmp_path / name for name in "ab"]
    for stripe in stripes:
        stripe.mkdir()
    checkpoint.save({"w": torch.zeros(1 << 20), "v": torch.ones(1 << 20)}, path, stripes)
    monkeypatch.setattr(chunks, "MAX_OPEN_FILES", 1)
    with checkpoint.open(path) as lazy:
        change(path)
        for stripe in stripes:
            shutil.rmtree(stripe)
        with pytest.raises(FileNotFoundError, match=words) as caught:
            torch.cat([lazy[name][...] for name in ("w", "v", "w")])
    assert caught.value.filename == str(path)


def test_data_that_went_while_their_save_is_there_are_damage(path: Path) -> None:
    with checkpoint.open(path) as lazy:
        (file,) = path.rglob("*.safetensors")
        lazy.opened._files.clear()
        file.unlink()
        with pytest.raises(checkpoint.CorruptCheckpointError, match="data file is missing"):
            lazy["bias"][...]


def test_a_file_of_another_save_is_refused_each_time_it_is_read(path: Path, tmp_path: Path) -> None:
    checkpoint.save(STATE | {"weight": torch.zeros(3, 4)}, tmp_path / "other")
    with checkpoint.open(path, verify=False) as lazy:
        (file,), (other,) = (where.rglob("*.safetensors") for where in (path, tmp_path / "other"))
        lazy.opened._files.clear()  # as of more files than are kept open
        other.replace(file)
        for _ in range(2):
            with pytest.raises(checkpoint.CorruptCheckpointError, match="not the file that was"):
                lazy["weight"][...]


def test_numpy_is_refused_a_dtype_that_it_lacks_before_anything_is_read(tmp_path: Path) -> None:
    checkpoint.save({"half": torch.ones(3, dtype=torch.bfloat16)}, tmp_path / "half")
    with checkpoint.open(tmp_path / "half") as lazy:
        half = lazy["half"]
    with pytest.raises(TypeError, match=r"numpy has no torch.bfloat16, which <'half'.*float"):
        np.asarray(half)
    with pytest.raises(ValueError, match="open it again"):
        half[...]


def test_a_forked_child_is_told_to_open_the_checkpoint_itself(
    lazy: checkpoint.LazyCheckpoint,
) -> None:
    """Nothing of it was read before: what was is there in the child, too."""
    told = in_child(lambda: lazy["weight"][1])
    assert "RuntimeError" in told
    assert "which was forked from it; open it again there" in told
