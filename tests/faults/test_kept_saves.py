"""What a background save that failed keeps: its error, and nothing of what it was to save."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
import infinity
from aio import AioError
from checkpoint.saving.data_files import RankFiles
from checkpoint.sheltered import join_workers
from infinity.snapshots import moment, points
from tests.support.models import seeded
from tests.support.proof import matrix
from tests.support.snapshot_runs import ADAMW, Net

_TIMES = 30


def _no_room(*_: object, **__: object) -> Any:
    raise AioError("no room", errno=errno.ENOSPC)


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    if isinstance(tree, dict):
        for value in tree.values():
            yield from _tensors(value)
    elif isinstance(tree, torch.Tensor):
        yield tree


@pytest.mark.parametrize("place", ["write", "files"])
def test_failed_snapshots_that_nobody_asks_for_keep_nothing_of_their_trees(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[weakref.ref[torch.Tensor]] = []
    tree_of = vars(moment)["tree_of"]

    def watched(*arguments: Any, **options: Any) -> dict[str, Any]:
        tree: dict[str, Any] = tree_of(*arguments, **options)
        held.extend(weakref.ref(tensor) for tensor in _tensors(tree))
        return tree

    monkeypatch.setattr(moment, "tree_of", watched)
    owner, name = {"write": (RankFiles, "write"), "files": (points, "keep_files")}[place]
    monkeypatch.setattr(owner, name, _no_room)
    model = seeded(lambda: Net(3), 0)
    model.register_buffer("watched", torch.zeros(8))

    def run() -> None:
        with infinity.offload(model, tmp_path, host_memory="1GiB", optimizer=ADAMW) as offloaded:
            for number in range(_TIMES):
                offloaded.snapshot(
                    f"s{number}", extra={"x": torch.ones(3)}, block=False
                ).wait_done()
            join_workers()
            gc.collect()
            assert len(held) >= 2 * _TIMES
            assert [one for one in held if one() is not None] == []

    with pytest.raises(AioError, match="no room") as caught:
        run()
    assert f"{_TIMES - 1} more saves failed, see the log" in caught.value.__notes__


@contextmanager
def _without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _Fails:
    dtype = torch.float32
    shape = (4,)

    def read(self, start: int, out: memoryview) -> None:
        raise OSError(errno.EIO, "cannot be read")


def _saved(state: Any, path: Path) -> None:
    checkpoint.save({**state, "fails": _Fails()}, path)


def _saved_behind(state: Any, path: Path) -> None:
    checkpoint.save_async({**state, "fails": _Fails()}, path).result()


def _refused(state: Any, path: Path) -> None:
    checkpoint.save({**state, "fails": object()}, path)


def _refused_behind(state: Any, path: Path) -> None:
    checkpoint.save_async({**state, "fails": object()}, path)


def _loaded(state: Any, path: Path) -> None:
    checkpoint.load(path, into=state)


CALLS = [_saved, _saved_behind, _refused, _refused_behind, _loaded]


@pytest.mark.parametrize("call", matrix(CALLS, usual=[_saved_behind, _refused, _loaded]))
def test_call_that_failed_keeps_no_tensor_of_the_caller(
    call: Callable[[Any, Path], None], tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    if call is _loaded:
        checkpoint.save({"t": torch.zeros(3)}, path)
    tensor = torch.zeros(8)
    held = weakref.ref(tensor)
    with _without_collector():
        with pytest.raises((OSError, TypeError, ValueError)) as caught:
            call({"t": tensor}, path)
        del tensor, caught
        assert held() is None
