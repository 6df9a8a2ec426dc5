"""Bits that flip in swap files: without ``verify_swap`` nothing is said of them, with it they are
an error that names the parameter, and no value is wrong.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.model import training_of
from tests.support.damage import flip, flip_at, flip_in, state_of
from tests.support.models import seeded
from tests.support.proof import matrix
from tests.support.snapshot_runs import ADAMW, WIDTH, Net, assert_same, everything, train
from tests.support.training import least_budget

NAME = "layers.5.weight"
COMPONENTS = [
    (None, "weight"),
    (None, "exp_avg"),
    (None, "exp_avg_sq"),
    (torch.bfloat16, "weight"),
    (torch.bfloat16, "lo"),
    (torch.float16, "master"),
]
OPTIONS: dict[str, Any] = {"optimizer": ADAMW}


@pytest.fixture
def nvme(tmp_path: Path) -> Iterator[Path]:
    directory = tmp_path / "nvme"
    directory.mkdir()
    yield directory
    assert [path for path in directory.rglob("*") if path.is_file()] == []


@pytest.fixture(scope="module")
def least(tmp_path_factory: pytest.TempPathFactory) -> int:
    return least_budget(Net, tmp_path_factory.mktemp("least"), verify_swap=True, **OPTIONS)


def offload(nvme: Path, least: int, *, verify: bool = True, **options: Any) -> Any:
    return infinity.offload(
        seeded(Net), nvme, host_memory=least, verify_swap=verify, **(OPTIONS | options)
    )


def check_error(error: infinity.CorruptSwapError, path: str, what: str) -> None:
    assert what in str(error)
    assert error.filename == path
    assert path in str(error)
    assert error.offset is not None
    assert error.nbytes == 4096
    assert "offloaded.load(path)" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)


def finished_step(
    offloaded: infinity.OffloadedModel, number: int, dtype: torch.dtype | None
) -> None:
    train(offloaded, number, number + 1, dtype)
    offloaded.flush()


@pytest.mark.parametrize(("dtype", "component"), matrix(COMPONENTS, usual=COMPONENTS[::2]))
def test_a_bit_that_flips_in_a_component_is_an_error_with_its_name_and_load_mends_it(
    dtype: torch.dtype | None, component: str, least: int, nvme: Path, tmp_path: Path
) -> None:
    with offload(nvme, least, compute_dtype=dtype) as offloaded:
        train(offloaded, 0, 2, dtype)
        offloaded.save(tmp_path / "saved")
        before = everything(offloaded)
        train(offloaded, 2, 4, dtype)
        after = everything(offloaded)
        path = flip(offloaded, NAME, component)
        with pytest.raises(infinity.CorruptSwapError) as caught:
            finished_step(offloaded, 4, dtype)
        check_error(caught.value, path, f"{component} of {NAME}")
        with pytest.raises(infinity.CorruptSwapError):
            offloaded.save(tmp_path / "other")
        assert not (tmp_path / "other" / "manifest.json").exists()
        offloaded.load(tmp_path / "saved")
        assert_same(before, everything(offloaded))
        train(offloaded, 2, 4, dtype)
        assert_same(after, everything(offloaded))


@pytest.mark.parametrize(("dtype", "component"), COMPONENTS[:1])
def test_without_verify_swap_nothing_is_said_of_a_flipped_bit(
    dtype: torch.dtype | None, component: str, least: int, nvme: Path
) -> None:
    with offload(nvme, least, verify=False, compute_dtype=dtype) as offloaded:
        train(offloaded, 0, 2, dtype)
        before = everything(offloaded)
        flip(offloaded, NAME, component)
        key = f"{component} of {NAME}"
        wrong = before[key].view(torch.uint8) != everything(offloaded)[key].view(torch.uint8)
        assert int(wrong.sum()) == 1
        train(offloaded, 2, 3, dtype)


def test_values_that_are_gathered_saved_or_exported_are_verified(
    least: int, nvme: Path, tmp_path: Path
) -> None:
    with offload(nvme, least) as offloaded:
        train(offloaded, 0, 1)
        path = flip(offloaded, NAME, "weight")
        parameter = offloaded.model.get_parameter(NAME)
        with pytest.raises(infinity.CorruptSwapError) as caught, offloaded.gathered([parameter]):
            pass
        check_error(caught.value, path, f"weight of {NAME}")
        with pytest.raises(infinity.CorruptSwapError):
            offloaded.export(tmp_path / "exported")
        with offloaded.gathered([offloaded.model.get_parameter("layers.0.weight")]):
            pass
        training_of(offloaded).state.write_values(_index(offloaded), 0, torch.ones(WIDTH * WIDTH))
        with offloaded.gathered([parameter]):
            assert bool((parameter == 1).all())


def _index(offloaded: infinity.OffloadedModel) -> int:
    return next(s.index for s in state_of(offloaded).layout.specs if s.name == NAME)


def test_a_spilled_gradient_that_is_damaged_is_an_error_and_load_mends_it(
    least: int, nvme: Path, tmp_path: Path
) -> None:
    with offload(nvme, least, overlap=False) as offloaded:
        train(offloaded, 0, 1)
        offloaded.save(tmp_path / "saved")
        train(offloaded, 1, 2)
        after = everything(offloaded)
        state = state_of(offloaded)
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
        offloaded.backward(offloaded.model(x).square().mean())
        state.gradients.flush()
        subgroup = min(state.gradients._spilled)
        name = state.layout.specs[state.layout.subgroups[subgroup].segments[0].parameter].name
        path = flip_at(state, state.gradients._on_nvme[subgroup], 0)
        offloaded.step()
        with pytest.raises(infinity.CorruptSwapError) as caught:
            offloaded.flush()
        check_error(caught.value, path, f"the gradient of {name}")
        offloaded.load(tmp_path / "saved")
        train(offloaded, 1, 2)
        assert_same(after, everything(offloaded))


def test_frozen_weights_of_inference_are_verified(nvme: Path) -> None:
    least = least_budget(Net, nvme, verify_swap=True, optimizer=None)
    model = seeded(Net).eval()
    x = torch.randn(4, WIDTH)
    expected = model(x)
    with (
        infinity.offload(
            model, nvme, host_memory=least, verify_swap=True, optimizer=None
        ) as offloaded,
        torch.no_grad(),
    ):
        assert torch.equal(offloaded.model(x), expected)
        placement = offloaded._training.state.placement
        there = placement.units_on_nvme[0].parameters[0]
        name = placement.layout.specs[there].name
        path = flip(offloaded, name, "weight")
        with pytest.raises(infinity.CorruptSwapError) as caught:
            offloaded.model(x)
        check_error(caught.value, path, f"weight of {name}")
        assert caught.value.offset is not None
        flip_in(Path(path), caught.value.offset)  # as if the way had been at fault, not the disk
        assert torch.equal(offloaded.model(x), expected)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_verifying_changes_no_bit_and_keeps_the_budget(
    dtype: torch.dtype | None, overlap: bool, least: int, nvme: Path
) -> None:
    found = []
    for verify in (True, False):
        torch.manual_seed(1)
        with offload(
            nvme, least, verify=verify, compute_dtype=dtype, overlap=overlap, max_grad_norm=1.0
        ) as offloaded:
            train(offloaded, 0, 3, dtype)
            found.append(everything(offloaded))
            report = offloaded.report()
            assert (report.planned_bytes["checksums"] > 0) == verify
            assert report.peak_host_bytes <= least
    assert_same(*found)


def test_the_plan_says_what_checksums_take() -> None:
    given: dict[str, Any] = {"host_memory": "4GiB", "compute_dtype": torch.bfloat16}
    plain = infinity.plan(2 * 10**9, **given)
    verified = infinity.plan(2 * 10**9, verify_swap=True, **given)
    taken = verified.least_host_bytes - plain.least_host_bytes
    assert 0.5 < taken / (plain.nvme_wanted_bytes * 4 / 4096) < 2
    assert verified.host_bytes <= verified.budget_host_bytes


@pytest.mark.parametrize("wrong", ["yes", 1, None])
def test_verify_swap_that_is_no_truth_value_is_refused(wrong: Any, nvme: Path) -> None:
    with (
        pytest.raises(TypeError, match="verify_swap="),
        infinity.offload(seeded(Net), nvme, verify_swap=wrong),
    ):
        raise AssertionError("it was taken")
