"""Tables and experts in tiles over ranks: every rank asks for the same tiles, whatever it needs."""

from pathlib import Path

import pytest
import torch

from tests.support import rank_tables
from tests.support.proof import matrix
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")


# Experts have each rank import transformers.
@pytest.mark.parametrize("name", matrix(rank_tables.MODELS, usual=["table"]))
def test_two_ranks_train_in_tiles_as_one_that_accumulates(name: str, tmp_path: Path) -> None:
    job = {"name": name, "batches": [[1], [2]], "host_memory": "least"}
    two = run_ranks(rank_tables.train, tmp_path / "two", 2, **job)
    alone = tmp_path / "alone"
    alone.mkdir()
    one = rank_tables.train(0, alone, name=name, batches=[[1, 2]], host_memory="1GiB")
    assert [losses[step] for step in (0, 1) for losses in two] == one
    expected = torch.load(alone / f"{name}-0", weights_only=True)
    for rank in range(2):
        values = torch.load(tmp_path / "two" / f"{name}-{rank}", weights_only=True)
        assert all(torch.equal(values[key], value) for key, value in expected.items())
