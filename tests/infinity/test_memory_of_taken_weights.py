"""What taking values from a checkpoint leaves in memory."""

from pathlib import Path

import pytest
from torch import nn

import checkpoint
import infinity
from checkpoint.loading.opened import OpenCheckpoint


@pytest.mark.timeout(60)
def test_checkpoint_that_weights_came_from_keeps_nothing_of_them_in_memory(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[OpenCheckpoint] = []
    init = OpenCheckpoint.__init__

    def kept(self: OpenCheckpoint, *arguments: object, **options: object) -> None:
        opened.append(self)
        init(self, *arguments, **options)  # type: ignore[arg-type]

    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    checkpoint.save(model.state_dict(), tmp_path / "weights")
    monkeypatch.setattr(OpenCheckpoint, "__init__", kept)
    with infinity.offload(model, nvme, weights=tmp_path / "weights"):
        assert [one._blocks.held_bytes for one in opened] == [0]
