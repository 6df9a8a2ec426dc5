"""Ranks of which some bring a model on the meta device, or in another dtype, and others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import infinity
from tests.support.models import vector_loss
from tests.support.rank_jobs import complaint, stack, world
from tests.support.ranks import run_ranks
from tests.support.training import same_values, values_of


@pytest.mark.parametrize("whole", [0, 1])
def test_a_rank_that_came_with_values_gets_them_back_where_another_came_on_meta(
    tmp_path: Path, whole: int
) -> None:
    results = run_ranks(one_whole_model, tmp_path, 2, whole=whole)
    assert results[whole] == ["same", "same"]
    assert results[1 - whole] == ["on meta", "on meta"]


def one_whole_model(rank: int, folder: Path, *, whole: int) -> list[str]:
    """What each of two blocks over one model ends with, beside a run in which all came whole."""
    expected, model, file = stack(), stack(), folder / f"weights-{rank}.safetensors"
    save_file(dict(model.state_dict()), file)
    if rank != whole:
        model = model.to("meta")
    told = []
    for _ in range(2):
        for each in (expected, model):
            with infinity.offload(
                each, folder, weights=file, host_memory="256MiB", process_group=world()
            ) as offloaded:
                vector_loss(each, rank).backward()
                offloaded.step()
        if all(p.is_meta for p in model.parameters()):
            told.append("on meta")
        else:
            is_same = same_values(values_of(expected), values_of(model))
            told.append("same" if is_same else "other")
    return told


def test_models_of_other_dtypes_on_some_ranks_are_refused(tmp_path: Path) -> None:
    for told in run_ranks(one_in_bfloat16, tmp_path, 2):
        assert "layers.0.weight is" in told
        assert "of a model in torch.float32 on rank 0" in told


def one_in_bfloat16(rank: int, folder: Path) -> str:
    """What a block raises where rank 1 has the model in the dtype that is computed with."""
    model, file = stack(), folder / f"weights-{rank}.safetensors"
    save_file(dict(model.state_dict()), file)
    if rank:
        model = model.bfloat16()

    def train() -> None:
        with infinity.offload(
            model,
            folder,
            weights=file,
            host_memory="256MiB",
            compute_dtype=torch.bfloat16,
            process_group=world(),
        ):
            pass

    return complaint(train)
