"""An error that is kept (in a variable, for a retry, by a notebook) keeps no buffer of ours."""

import errno
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import infinity
from aio import AioError, Operation, Slab
from aio.errors import let_go
from infinity import restoring
from swap.interruptions.undo import Undo
from swap.memory import passage as passages
from swap.memory.passage import Passage
from swap.plan.layout import CHUNK_BYTES, PASSAGE_BYTES
from tests.support.training import values_of


class _Thing:
    """What a frame may hold."""


def _fail(held: _Thing) -> None:
    raise AioError("no", errno=errno.EIO)


def _fail_again(held: _Thing) -> None:
    try:
        _fail(_Thing())
    except AioError as error:
        raise RuntimeError("no") from error


def test_error_that_was_let_go_holds_nothing_and_still_says_where() -> None:
    thing = _Thing()
    held = weakref.ref(thing)
    try:
        _fail_again(thing)
    except RuntimeError as error:
        kept = let_go(error)
    del thing
    assert held() is None
    trace = kept.__traceback__
    assert trace is not None
    assert trace.tb_next is not None
    assert trace.tb_next.tb_frame.f_code is _fail_again.__code__


def test_undo_that_was_interrupted_is_repeated_without_what_the_interrupt_held() -> None:
    held: list[weakref.ref[_Thing]] = []
    alive: list[bool] = []

    def work() -> None:
        thing = _Thing()
        held.append(weakref.ref(thing))
        raise KeyboardInterrupt

    def undo() -> None:
        if held:
            alive.append(held[0]() is not None)
        else:
            work()

    with pytest.raises(KeyboardInterrupt), Undo() as block:
        block.callback(undo)
    assert alive == [False]


def test_failed_transfers_whose_errors_are_kept_hold_no_chunk() -> None:
    slab = Slab(PASSAGE_BYTES)
    passage = Passage(slab)

    def submit(start: int, buffer: np.ndarray) -> Operation:
        raise AioError("no", errno=errno.EIO)

    kept = []
    for way in (passage.read, passage.write):
        for _ in range(4):
            with pytest.raises(AioError) as caught:
                way(0, np.zeros(CHUNK_BYTES, np.uint8), submit)
            kept.append(caught.value)
            assert slab.used_bytes == 0


def test_passage_whose_memory_is_kept_by_others_goes_on_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(passages, "_RELEASE_SECONDS", 0.0)
    slab = Slab(PASSAGE_BYTES)
    kept = slab.allocate(PASSAGE_BYTES)

    def submit(start: int, buffer: np.ndarray) -> Operation:
        raise AioError("reached the disk", errno=errno.EIO)

    with pytest.raises(AioError, match="reached the disk"):
        Passage(slab).read(0, np.zeros(8, np.uint8), submit)
    assert "error that is kept" in caplog.text
    assert kept.size == PASSAGE_BYTES


@pytest.mark.timeout(60)
def test_swap_that_cannot_be_read_as_the_block_ends_can_be_read_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "_PAUSES_SECONDS", (0.0, 0.0, 0.0))
    nvme, copy = tmp_path / "nvme", tmp_path / "copy"
    nvme.mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(384, 384) for _ in range(4)))
    before = values_of(model)
    least = infinity.plan(model).least_host_bytes
    block = infinity.offload(model, nvme, host_memory=least)
    block.__enter__().flush()
    (swap,) = nvme.glob(".infinity/*/state.swap")
    shutil.copy(swap, copy)
    with swap.open("r+b") as file:
        file.truncate(0)
    with pytest.raises(infinity.RestoreError) as caught:
        block.__exit__(None, None, None)
    assert caught.value.parameters
    with swap.open("r+b") as file:
        file.write(copy.read_bytes())
    caught.value.retry()
    for name, value in values_of(model).items():
        assert torch.equal(value, before[name]), name
