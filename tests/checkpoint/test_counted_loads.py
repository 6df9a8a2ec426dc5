"""Loads into live tensors count as changes of them: saves and graphs from before take notice."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import checkpoint
from checkpoint.dcp import StorageReader

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


class Gate:
    """A source that is read when the test lets it, ahead of all that follows it."""

    dtype = torch.uint8
    shape = (4,)

    def __init__(self) -> None:
        self.opened = threading.Event()

    def read(self, start: int, out: memoryview) -> None:
        assert self.opened.wait(60)
        out[:] = bytes(len(out))


def test_a_load_into_tensors_that_a_guarded_save_has_not_read_is_an_error_of_the_save(
    tmp_path: Path,
) -> None:
    weight = torch.nn.Parameter(torch.ones(1 << 10))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    checkpoint.save({"w": weight}, tmp_path / "old")
    gate = Gate()
    pending = checkpoint.save_async({"gate": gate, "w": weight}, tmp_path / "new", guard=optimizer)
    checkpoint.load(tmp_path / "old", into={"w": weight})
    gate.opened.set()
    with pytest.raises(checkpoint.ChangedTensorError, match="'w'"):
        pending.result()


@pytest.mark.parametrize(
    ("loads", "is_inference"), [("into", False), ("into", True), ("dcp", False)]
)
def test_a_graph_from_before_a_load_is_refused(
    tmp_path: Path, loads: str, is_inference: bool
) -> None:
    weight = torch.nn.Parameter(torch.ones(16))
    checkpoint.save({"w": weight}, tmp_path / "old")
    loss = (weight * weight).sum()
    with torch.inference_mode(is_inference):
        if loads == "into":
            checkpoint.load(tmp_path / "old", into={"w": weight})
        else:
            dcp_load({"w": weight}, storage_reader=StorageReader(tmp_path / "old"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_load_into_tensors_of_the_inference_mode_is_a_load(tmp_path: Path) -> None:
    with torch.inference_mode():
        tensor = torch.zeros(4)
    checkpoint.save({"x": torch.ones(4)}, tmp_path / "old")
    checkpoint.load(tmp_path / "old", into={"x": tensor})
    assert bool((tensor == 1).all())
