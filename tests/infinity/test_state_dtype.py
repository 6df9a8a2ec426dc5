"""Moments in 16 and 8 bits: as exact as 32 bits are, fewer bytes, saved and loaded bit for bit."""

import re
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
import infinity
from tests.support.models import Gpt, Stack, seeded, token_loss, vector_loss
from tests.support.proof import by_turns, matrix
from tests.support.training import (
    assert_same_runs,
    least_budget,
    same_bits,
    train,
    train_each,
)

DTYPES = [torch.bfloat16, torch.uint8]
COMPUTED = [*product(DTYPES, (None, torch.bfloat16, torch.float16))]
USUAL = [(torch.uint8, torch.bfloat16)]
MOMENTS = ("exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")
WIDE = partial(Stack, width=400, depth=6)
"""160000 elements a matrix: no whole number of blocks, and more than the smallest subgroup."""
wide_loss = partial(vector_loss, width=400)


def _adam(dtype: torch.dtype) -> infinity.AdamW:
    return infinity.AdamW(lr=1e-2, state_dtype=dtype)


@pytest.mark.parametrize(("dtype", "compute_dtype"), matrix(COMPUTED, usual=USUAL))
def test_training_under_any_budget_gives_the_same_bits(
    dtype: torch.dtype, compute_dtype: torch.dtype | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optimizer": _adam(dtype), "compute_dtype": compute_dtype}
    runs = train_each(WIDE, wide_loss, tmp_path, steps=4, **options)
    assert_same_runs(runs)
    other = _adam(DTYPES[dtype == torch.bfloat16])
    different = train(WIDE, wide_loss, tmp_path, host_memory=1 << 30, steps=4, optimizer=other)
    assert runs["whole"].losses != different.losses


def test_fewer_bits_are_fewer_bytes() -> None:
    def planned(dtype: torch.dtype) -> infinity.Plan:
        return infinity.plan(10**9, host_memory="4GiB", optimizer=infinity.AdamW(state_dtype=dtype))

    wide, half, eighth = (planned(dtype) for dtype in (torch.float32, *DTYPES))
    numel = 10**9
    assert wide.written_bytes_per_step > half.written_bytes_per_step > eighth.written_bytes_per_step
    everything = [sum(plan.bytes_by_tier.values()) for plan in (wide, half, eighth)]
    assert everything[0] == pytest.approx(14 * numel, rel=1e-3)
    assert everything[1] == pytest.approx(10 * numel, rel=1e-3)
    assert everything[2] == pytest.approx((8 + 2 * 4 / 256) * numel, rel=1e-3)


@pytest.mark.parametrize(("dtype", "tiled"), by_turns(DTYPES, [True, False]))
def test_a_checkpoint_brings_every_bit_of_the_state_back(
    dtype: torch.dtype, tiled: bool, nvme: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "optimizer": _adam(dtype),
        "compute_dtype": torch.bfloat16,
        "max_parameter_bytes": 280_000 if tiled else None,
    }
    least = least_budget(WIDE, nvme, **options)
    finals = []
    for resume in (False, True):
        model = seeded(WIDE)
        # Resumed under another budget, which packs and places in another way.
        room = 1 << 30 if resume else least
        with infinity.offload(model, nvme, host_memory=room, **options) as offloaded:
            if resume:
                offloaded.load(tmp_path / "saved")
                offloaded.save(tmp_path / "again")
            for step in range(3 if resume else 0, 6):
                wide_loss(model, step).backward()
                offloaded.step()
                if step == 2:
                    offloaded.save(tmp_path / "saved")
        finals.append([parameter.detach() for parameter in model.parameters()])
    saved, again = (checkpoint.load(tmp_path / name) for name in ("saved", "again"))
    components = saved["optimizer"]
    assert set(components) == {"lo", *(MOMENTS if dtype == torch.uint8 else MOMENTS[:2])}
    for component, tensors in components.items():
        for name, tensor in tensors.items():
            assert same_bits(tensor, again["optimizer"][component][name]), (component, name)
            assert tensor.count_nonzero() > tensor.numel() // 2, (component, name)
    assert components["exp_avg"]["layers.0.weight"].dtype == dtype
    assert all(map(same_bits, *finals))


def _save(path: Path, nvme: Path, **options: Any) -> None:
    model = seeded(WIDE)
    with infinity.offload(model, nvme, host_memory=1 << 30, **options) as offloaded:
        wide_loss(model, 0).backward()
        offloaded.step()
        offloaded.save(path)


@pytest.mark.parametrize("saved", [torch.float32, *DTYPES], ids=str)
def test_moments_of_another_dtype_are_refused_before_anything_changes(
    saved: torch.dtype, nvme: Path, tmp_path: Path
) -> None:
    _save(tmp_path / "saved", nvme, optimizer=_adam(saved))
    model = seeded(WIDE, seed=1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    other = torch.bfloat16 if saved == torch.uint8 else torch.uint8
    message = (
        rf"moments of layers\.0\.weight in {re.escape(str(saved))}, .* keeps {other}.* trainer"
    )
    with (
        infinity.offload(model, nvme, optimizer=_adam(other)) as offloaded,
        pytest.raises(ValueError, match=message),
    ):
        offloaded.load(tmp_path / "saved")
    assert all(map(same_bits, before, model.parameters()))


def test_weights_load_for_inference_whatever_the_moments_are(nvme: Path, tmp_path: Path) -> None:
    _save(tmp_path / "saved", nvme, optimizer=_adam(torch.uint8))
    model = seeded(WIDE, seed=1)
    with infinity.offload(model, nvme, optimizer=None) as offloaded:
        offloaded.load(tmp_path / "saved")
    expected = checkpoint.load(tmp_path / "saved", only=["model.*"])["model"]
    for name, parameter in model.named_parameters():
        assert same_bits(parameter, expected[name])


def test_blocks_of_other_tiles_are_refused(nvme: Path, tmp_path: Path) -> None:
    tiles: dict[str, Any] = {"max_parameter_bytes": 280_000}
    _save(tmp_path / "saved", nvme, optimizer=_adam(torch.uint8), **tiles)
    model = seeded(WIDE)
    with (
        infinity.offload(model, nvme, optimizer=_adam(torch.uint8)) as offloaded,
        pytest.raises(ValueError, match="in other tiles"),
    ):
        offloaded.load(tmp_path / "saved")
    with infinity.offload(model, nvme, optimizer=_adam(torch.uint8), **tiles) as offloaded:
        offloaded.load(tmp_path / "saved")


@pytest.mark.parametrize("dtype", matrix(DTYPES, usual=[torch.uint8]), ids=str)
def test_training_gets_as_far_as_with_32_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    """A little model learns one batch: the loss falls by as much, within a twentieth."""
    make = partial(Gpt, depth=2)

    def one_batch(model: torch.nn.Module, step: int) -> torch.Tensor:
        return token_loss(model, 0)

    losses = {}
    for kind in (torch.float32, dtype):
        optimizer = infinity.AdamW(lr=1e-3, state_dtype=kind)
        run = train(make, one_batch, tmp_path, host_memory=1 << 30, steps=30, optimizer=optimizer)
        losses[kind] = run.losses
    first, last = losses[torch.float32][0], losses[torch.float32][-1]
    assert last < first / 2
    assert abs(losses[dtype][-1] - last) < (first - last) / 20
