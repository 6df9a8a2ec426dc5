"""Any combination of options, under any budget, gives the bits of training in memory.

The modes are drawn at random, by seed: what one seed finds, it finds again. The reference is no run
of the library but a plain loop (``tests.support.eager``).
"""

import random
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from infinity.optim.adamw import AdamRule
from infinity.parameters.records import least_arena_bytes, records_of
from tests.support.eager import train_eagerly
from tests.support.models import Gpt, Recompute, token_loss
from tests.support.proof import matrix
from tests.support.training import WHOLE, Make, assert_same_runs, least_budget, train

STEPS = 5
SEEDS = range(12)
RECOMPUTE: tuple[Recompute, ...] = ("no", "reentrant", "non-reentrant")


@dataclass(frozen=True)
class Mode:
    """What one run draws; ``room`` is the part of the way from the least budget to the whole."""

    recompute: Recompute
    dropout: float
    dtype: torch.dtype | None
    max_grad_norm: float | None
    accumulate: int
    overlap: bool
    directories: int
    activations: str
    room: float
    device_room: float | None
    optimizer: infinity.AdamW


def _draw(seed: int) -> Mode:
    choose = random.Random(seed)
    return Mode(
        # Every value of what matters most comes up, whatever else is drawn.
        dtype=(None, torch.bfloat16)[seed % 2],
        room=(0.0, choose.random(), 0.0, choose.random() / 3, 1.0, choose.random())[seed % 6],
        overlap=seed % 4 != 3,
        recompute=choose.choice(RECOMPUTE),
        dropout=choose.choice((0.0, 0.1)),
        max_grad_norm=choose.choice((None, 0.3, 1e6)),
        accumulate=choose.choice((1, 1, 2, 3)),
        directories=choose.choice((1, 2, 3)),
        activations=choose.choice(("keep", "keep", "host", "nvme")),
        device_room=choose.choice((None, None, 0.0, 0.5)),
        optimizer=infinity.AdamW(
            lr=choose.choice((1e-3, 1e-2)),
            betas=choose.choice(((0.9, 0.999), (0.5, 0.9))),
            weight_decay=choose.choice((0.0, 0.1)),
            state_dtype=choose.choice((torch.float32, torch.float32, torch.bfloat16, torch.uint8)),
        ),
    )


def _host_memory(make: Make, directories: list[Path], mode: Mode, options: dict[str, Any]) -> int:
    if mode.room == 1.0:
        return WHOLE
    least = least_budget(make, directories, **options)
    return least + int(mode.room * (6e6 if mode.dtype is None else 3e6))


def _device_memory(make: Make, mode: Mode) -> int | None:
    if mode.device_room is None:
        return None
    model = make()
    least = least_arena_bytes(model, records_of(model, mode.dtype))
    return int(least * (1.0 + mode.device_room))


@pytest.mark.parametrize("seed", matrix(SEEDS, usual=SEEDS[:2]))
def test_any_mode_gives_the_bits_of_training_in_memory(seed: int, tmp_path: Path) -> None:
    mode = _draw(seed)
    make = partial(Gpt, recompute=mode.recompute, dropout=mode.dropout, depth=3)
    directories = [tmp_path / f"nvme{index}" for index in range(mode.directories)]
    for directory in directories:
        directory.mkdir()
    options: dict[str, Any] = {
        "optimizer": mode.optimizer,
        "compute_dtype": mode.dtype,
        "max_grad_norm": mode.max_grad_norm,
        "activations": mode.activations,
    }
    found = train(
        make,
        token_loss,
        directories,
        host_memory=_host_memory(make, directories, mode, options),
        device_memory=_device_memory(make, mode),
        steps=STEPS,
        accumulate=mode.accumulate,
        overlap=mode.overlap,
        **options,
    )
    expected = train_eagerly(
        make,
        token_loss,
        steps=STEPS,
        accumulate=mode.accumulate,
        dtype=mode.dtype,
        rule=AdamRule(state_dtype=mode.optimizer.state_dtype),
        options=mode.optimizer.defaults(),
        max_grad_norm=mode.max_grad_norm,
    )
    assert_same_runs({f"in memory, {mode}": expected, "offloaded": found})
    assert found.read_bytes or mode.room > 0.5
    assert all(list(directory.iterdir()) == [] for directory in directories)
