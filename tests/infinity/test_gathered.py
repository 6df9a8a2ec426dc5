"""``gathered`` inside ``gathered``, and what cannot be done inside it."""

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.parameters.records import Record
from infinity.ranks.context import SingleRank
from tests.support.models import Stack, seeded, vector_loss, vectors
from tests.support.training import WHOLE, same_bits, values_of


def _add_one(model: Stack) -> None:
    with torch.no_grad():
        model.layer(0).weight.add_(1)


@pytest.mark.parametrize("modify", [True, False])
def test_gathered_within_gathered_shares_what_was_changed(
    modify: bool, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    weight = model.layer(0).weight
    before = weight.detach().clone()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        with offloaded.gathered(weight, modify=True):
            _add_one(model)
            with offloaded.gathered(modify=modify):
                assert same_bits(weight.detach(), before + 1)
                _add_one(model)
            _add_one(model)
        assert same_bits(weight.detach(), before + 1 + 1 + 1)
        vector_loss(model, 0).backward()
        offloaded.step()


def test_what_is_modified_within_a_plain_gathered_is_kept(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    before = model.layer(0).weight.detach().clone()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded, offloaded.gathered():
        with offloaded.gathered(model.layer(0), modify=True):
            _add_one(model)
        _add_one(model)
    assert same_bits(model.layer(0).weight.detach(), before + 1)


def test_blocks_of_gathered_that_overlap_keep_all_changes(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    before = model.layer(0).weight.detach().clone()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        first, second = offloaded.gathered(modify=True), offloaded.gathered(modify=True)
        first.__enter__()
        second.__enter__()
        _add_one(model)
        first.__exit__(None, None, None)
        _add_one(model)
        second.__exit__(None, None, None)
    assert same_bits(model.layer(0).weight.detach(), before + 1 + 1)


def _stepped_with_a_pass_inside(nvme: Path, host_memory: int) -> dict[str, torch.Tensor]:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for batch in range(3):  # after the first step one is expected, and updates go ahead of it
            with offloaded.gathered(modify=True), torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.5)
                with torch.enable_grad():
                    vector_loss(model, batch).backward()
                model.layer(1).weight.add_(1)
            offloaded.step()
    return values_of(model)


def test_what_is_modified_around_a_backward_pass_is_what_the_step_updates(
    host_memory: int, nvme: Path
) -> None:
    whole = _stepped_with_a_pass_inside(nvme, WHOLE)
    for name, value in _stepped_with_a_pass_inside(nvme, host_memory).items():
        assert same_bits(value, whole[name]), name


CALLS: dict[str, Callable[[infinity.OffloadedModel, Path], Any]] = {
    "step": lambda offloaded, _: offloaded.step(),
    "load": lambda offloaded, path: offloaded.load(path / "before"),
    "save": lambda offloaded, path: offloaded.save(path / "inside"),
    "export": lambda offloaded, path: offloaded.export(path / "exported"),
}


@pytest.mark.parametrize("modify", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_calls_that_work_at_home_are_refused_inside_gathered(
    name: str, modify: bool, host_memory: int, nvme: Path, tmp_path: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        offloaded.save(tmp_path / "before")
        vector_loss(model, 0).backward()
        with offloaded.gathered([model.layer(3).weight], modify=modify):
            if modify or name in ("step", "load"):
                with pytest.raises(
                    RuntimeError, match=rf"^{name}\(\) inside .*layers\.3\.weight.*leave the"
                ):
                    CALLS[name](offloaded, tmp_path)
                assert not (tmp_path / "inside").exists()
                assert not (tmp_path / "exported").exists()
            else:
                CALLS[name](offloaded, tmp_path)
        offloaded.step()
        assert offloaded.grad_norm > 0


@pytest.mark.parametrize("modify", [True, False])
def test_a_block_that_ends_inside_gathered_says_so(
    modify: bool, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    before = values_of(model)
    block = infinity.offload(model, nvme, host_memory=host_memory)
    offloaded = block.__enter__()
    lent = offloaded.gathered([model.layer(0).weight], modify=modify)
    lent.__enter__()
    _add_one(model)
    with pytest.raises(RuntimeError, match=r"ended inside gathered\(\) of layers\.0\.weight"):
        block.__exit__(None, None, None)
    for name, value in values_of(model).items():
        assert same_bits(value, before[name])
    with pytest.raises(RuntimeError, match="changed there is lost"):
        lent.__exit__(None, None, None)
    assert type(model.layer(0).weight) is nn.Parameter


def test_an_abandoned_gathered_leaves_no_error_behind(nvme: Path) -> None:
    """An error in a finalizer fails a test: see ``filterwarnings``."""
    model = seeded(Stack)
    lent: list[Any] = []

    def leave() -> None:
        with infinity.offload(model, nvme) as offloaded:
            lent.append(offloaded.gathered(modify=True))
            lent[0].__enter__()

    with pytest.raises(RuntimeError, match="ended inside gathered"):
        leave()
    lent.clear()
    gc.collect()
    assert type(model.layer(0).weight) is nn.Parameter


def test_a_swapped_parameter_is_named(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with (
        pytest.raises(RuntimeError, match=r"^layers\.0\.weight was swapped for another tensor"),
        infinity.offload(model, nvme, host_memory=host_memory) as offloaded,
        offloaded.gathered(modify=True),
    ):
        torch.utils.swap_tensors(model.layer(0).weight, nn.Parameter(torch.ones(256, 256)))
    for name, value in values_of(model).items():
        assert same_bits(value, before[name])
    assert torch.isfinite(model(vectors(0))).all()


def _bits_only(weight: torch.Tensor) -> torch.Tensor:
    """Other bits that compare as equal, or as unequal already before: signs of zero, one NaN for
    another.
    """
    changed = weight.detach().clone()
    words = changed.view(-1).view(torch.int32 if weight.dtype == torch.float32 else torch.int16)
    words[words == 0] = torch.iinfo(words.dtype).min
    words[changed.view(-1).isnan()] += 1
    return changed


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_changes_that_are_bits_alone_are_taken(
    dtype: torch.dtype | None, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    weight = model.layer(0).weight
    with torch.no_grad():
        weight.view(-1)[::2] = 0.0
        weight.view(-1)[1::4] = float("nan")
    with infinity.offload(
        model, nvme, host_memory=WHOLE if dtype else host_memory, compute_dtype=dtype
    ) as offloaded:
        with offloaded.gathered(weight, modify=True):
            expected = _bits_only(weight)
            assert not same_bits(expected, weight.detach())
            weight.data.copy_(expected)
        with offloaded.gathered(weight):
            assert same_bits(weight.detach(), expected)
        assert same_bits(weight.detach(), expected)
    assert torch.signbit(model.layer(0).weight.view(-1)[::2]).all()


def test_what_cannot_be_lent_whole_is_given_back_at_once(
    nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values beyond the budget stayed while a program had the error."""
    model = seeded(Stack)
    weight_of, failing = SingleRank.weight_of, model.layer(1).weight

    def fail(self: SingleRank, record: Record) -> torch.Tensor:
        if record.parameter is failing:
            raise OSError(errno.EIO, "cannot read")
        return weight_of(self, record)

    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        monkeypatch.setattr(SingleRank, "weight_of", fail)
        with pytest.raises(OSError, match="cannot read") as kept, offloaded.gathered():
            pass
        assert not offloaded._training.residency.kept_out, kept
