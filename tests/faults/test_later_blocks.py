"""What a ``RestoreError`` still has, when the program goes on with the model: nothing gets lost in
a later block.
"""

import os
import pickle
import signal
import threading
import time
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import infinity
from infinity import restoring
from swap.storage.components import ComponentStore
from swap.storage.volumes import SharedFile
from tests.support.damage import fail, restore_error
from tests.support.models import seeded
from tests.support.snapshot_runs import (
    ADAMW,
    Net,
    assert_restored,
    block_of,
    everything,
    left_empty,
    train,
)
from tests.support.training import least_budget, same_bits

BIG = 256  # 256 x 256 elements are on NVMe, biases and norms are not


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(restoring, "_PAUSES_SECONDS", (0.0,))


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(BIG, BIG, bias=False) for _ in range(2)))


def _check_whole(model: nn.Module, nvme: Path) -> None:
    for (name, found), expected in zip(
        model.named_parameters(), _model().parameters(), strict=True
    ):
        assert same_bits(found, expected), name
    assert list(nvme.iterdir()) == []


def test_block_over_values_that_an_error_still_has_is_refused_by_name(tmp_path: Path) -> None:
    model = _model()
    error = restore_error(model, tmp_path)
    for part in (model, model[1]):
        with (
            pytest.raises(ValueError, match=r"weight.* RestoreError .*retry\(\) first"),
            infinity.offload(part, tmp_path),
        ):
            pass
    error.retry()
    _check_whole(model, tmp_path)
    with infinity.offload(model, tmp_path, optimizer=None):
        pass
    _check_whole(model, tmp_path)


def test_retry_inside_a_block_is_refused_and_works_after_it(tmp_path: Path) -> None:
    model, other = _model(), _model()
    error = restore_error(model, tmp_path)
    lost = model[1].weight
    with infinity.offload(other, tmp_path, optimizer=None):
        model[1].weight = other[1].weight
        with pytest.raises(RuntimeError, match=r"1\.weight is in an offload block.* after that"):
            error.retry()
        assert all(Path(folder).is_dir() for folder in error.folders)
        model[1].weight = lost
    error.retry()
    _check_whole(model, tmp_path)


def test_call_of_a_model_without_its_values_is_refused_by_name_until_it_has_some(
    tmp_path: Path,
) -> None:
    model, inputs = _model(), torch.ones(2, BIG)
    expected = model(inputs)
    error = restore_error(model, tmp_path)
    elsewhere = pickle.loads(ForkingPickler.dumps(model))
    for called, name in ((model, "0.weight"), (model[1], "1.weight"), (elsewhere, "0.weight")):
        with pytest.raises(RuntimeError, match=rf"{name}.* has no values.* retry\(\)"):
            called(inputs)
    error.retry()
    assert same_bits(model(inputs), expected)
    del error
    restore_error(model, tmp_path)
    model.load_state_dict(_model().state_dict(), assign=True)
    assert same_bits(model(inputs), expected)
    restore_error(model, tmp_path)
    save_file(_model().state_dict(), tmp_path / "weights.safetensors")
    weights = tmp_path / "weights.safetensors"
    with infinity.offload(model, tmp_path, optimizer=None, weights=weights):
        assert same_bits(model(inputs), expected)
    assert same_bits(model(inputs), expected)


def test_errors_of_two_blocks_are_retried_in_any_order(tmp_path: Path) -> None:
    model = _model()
    errors = [restore_error(part, tmp_path) for part in model]
    for error in reversed(errors):
        error.retry()
    _check_whole(model, tmp_path)


def test_retry_puts_values_where_the_model_has_other_parameters_now(tmp_path: Path) -> None:
    model = _model()
    error = restore_error(model, tmp_path)
    model.to_empty(device="cpu")
    with pytest.raises(ValueError, match=r"retry\(\) first"), infinity.offload(model, tmp_path):
        pass
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComponentStore, "read", fail)
        with pytest.raises(infinity.RestoreError) as caught:
            error.retry()
    assert not any(parameter.is_meta for parameter in model.parameters())
    caught.value.retry()
    _check_whole(model, tmp_path)


def test_retry_where_the_model_has_another_shape_is_refused_and_works_later(tmp_path: Path) -> None:
    model = _model()
    error = restore_error(model, tmp_path)
    lost = model[1].weight
    model[1].weight = nn.Parameter(torch.zeros(3, BIG))
    with pytest.raises(RuntimeError, match=r"1\.weight is of shape \(3, 256\).* swap files stay"):
        error.retry()
    model[1].weight = lost
    error.retry()
    _check_whole(model, tmp_path)


def test_retries_of_several_threads_lose_nothing(tmp_path: Path) -> None:
    model = _model()
    error, read = restore_error(model, tmp_path), ComponentStore.read
    done: list[bool] = []

    def read_slowly(*arguments: Any) -> None:
        time.sleep(0.02)  # the others come meanwhile
        read(*arguments)

    def retry() -> None:
        error.retry()
        done.append(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComponentStore, "read", read_slowly)
        threads = [threading.Thread(target=retry) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    assert len(done) == 3
    _check_whole(model, tmp_path)


def test_block_that_begins_beside_a_retry_is_refused_by_name(tmp_path: Path) -> None:
    """It would have the values that its modules draw, and the retry nobody to give its own to."""
    model = _model()
    error, read = restore_error(model, tmp_path), ComponentStore.read
    is_reading, may_go_on = threading.Event(), threading.Event()

    def read_late(*arguments: Any) -> None:
        is_reading.set()
        may_go_on.wait(10)
        read(*arguments)

    retrying = threading.Thread(target=error.retry)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComponentStore, "read", read_late)
        retrying.start()
        assert is_reading.wait(10)
        patch.undo()
        try:
            with pytest.raises(ValueError, match=r"0\.weight, 1\.weight would begin the block"):
                infinity.offload(model, tmp_path).__enter__()
        finally:
            may_go_on.set()
            retrying.join(20)
    _check_whole(model, tmp_path)


def test_retry_in_the_midst_of_one_is_refused(tmp_path: Path) -> None:
    """By the handler of a signal, which would wait for what it has interrupted."""
    model = _model()
    error, read = restore_error(model, tmp_path), ComponentStore.read
    refused: list[str] = []

    def retry_again(*arguments: Any) -> None:
        try:
            error.retry()
        except RuntimeError as refusal:
            refused.append(str(refusal))
        read(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ComponentStore, "read", retry_again)
        error.retry()
    assert [text.partition(" of ")[0] for text in refused] == ["retry() in the midst"] * 2
    _check_whole(model, tmp_path)


def test_retry_in_a_forked_child_is_refused(tmp_path: Path) -> None:
    """Which would wait for a retry that was under way as it was forked."""
    model = _model()
    error = restore_error(model, tmp_path)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            error.retry()
        except RuntimeError as refusal:
            os.write(writing, str(refusal).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as lines:
        assert "RestoreError of process" in lines.read()
    os.waitpid(child, 0)
    error.retry()
    _check_whole(model, tmp_path)


def _restore_and_fail(model: nn.Module, nvme: Path, least: int, patch: pytest.MonkeyPatch) -> None:
    with infinity.offload(model, nvme, host_memory=least, optimizer=ADAMW) as offloaded:
        offloaded.restore("2")
        patch.setattr(ComponentStore, "read", fail)


def test_snapshots_are_free_when_a_block_has_ended_in_an_error_that_keeps_its_values(
    tmp_path: Path,
) -> None:
    """The next block may restore one, and drop that of which the error's values are; they stay."""
    nvme, least = tmp_path / "nvme", least_budget(Net, tmp_path)
    with left_empty(nvme, Net):
        with block_of(Net, nvme, least) as offloaded:
            for number in range(3):
                train(offloaded, number, number + 1)
                offloaded.snapshot(str(number))
                if number == 0:
                    old = everything(offloaded)
            new = everything(offloaded)
        model = seeded(Net, 1)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(infinity.RestoreError) as caught:
            _restore_and_fail(model, nvme, least, patch)
        with block_of(Net, nvme, least, 2) as offloaded:
            assert_restored(offloaded, old, "0")
            offloaded.drop_snapshot("2")
        with block_of(Net, nvme, least, 3) as offloaded:
            assert_restored(offloaded, old, "0")
        caught.value.retry()
    for name, found in model.named_parameters():
        assert same_bits(found, new[f"weight of {name}"].view_as(found)), name


def test_child_forked_beside_a_kept_error_keeps_no_space_of_snapshots(tmp_path: Path) -> None:
    path = tmp_path / "kept.swap"
    path.write_bytes(bytes([1]) * 8192)
    with SharedFile(path) as first, SharedFile(path) as second:
        assert not first.punch(0, 4096)
        second.close()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writing, b"1")
            signal.pause()
        os.read(reading, 1)  # what it does at once is done
        try:
            assert first.punch(0, 4096)
            first.close()
            with SharedFile(path) as other:
                assert other.punch(4096, 4096)
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert path.read_bytes() == bytes(8192)
