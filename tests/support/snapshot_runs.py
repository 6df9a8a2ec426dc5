"""A small model with dropout and running averages, trained for a few steps at a time."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

import infinity
from aio import AioError
from checkpoint.saving.api import save_on
from tests.support.models import seeded
from tests.support.training import WHOLE, same_bits

WIDTH = 256
ADAMW = infinity.AdamW(lr=1e-2)


class Net(nn.Module):
    """Weights that move, two of which may be tiled, small ones that do not, buffers, and random
    numbers in its forward.
    """

    def __init__(self, depth: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(depth))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(x)))
        for layer in self.layers:
            x = x + self.dropout(torch.tanh(layer(x)))
        result: torch.Tensor = self.norm(x)
        return result


def shallow() -> Net:
    """One whose pieces are few, for tests of what happens beside the steps."""
    return Net(3)


def block_of(
    make: Callable[[], Net], nvme: Path, host_memory: int, seed: int = 0, **options: Any
) -> Any:
    model = seeded(make, seed)
    return infinity.offload(
        model, nvme, host_memory=host_memory, **({"optimizer": ADAMW} | options)
    )


@contextmanager
def left_empty(directory: Path, make: Callable[[], Net]) -> Iterator[Path]:
    """A new directory where nothing may stay but snapshots, which are dropped at the end."""
    directory.mkdir()
    yield directory
    with block_of(make, directory, WHOLE) as offloaded:
        for one in offloaded.snapshots():
            offloaded.drop_snapshot(one.name)
    assert list(directory.rglob("*")) == []


def train(
    offloaded: infinity.OffloadedModel, first: int, last: int, dtype: torch.dtype | None = None
) -> None:
    """Steps ``first`` to ``last``, each on the batch of its number."""
    for number in range(first, last):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
        out = offloaded.model(x.to(dtype or torch.float32))
        offloaded.backward(out.float().square().mean())
        offloaded.step()


def everything(offloaded: infinity.OffloadedModel) -> dict[str, Any]:
    """All state, by name, as copies; random state as well."""
    from infinity.model import training_of
    from infinity.values.persistence import scalars_of

    training = training_of(offloaded)
    offloaded.flush()
    found: dict[str, Any] = {}
    for record in training.records:
        for name in training.state.component_names(record.index):
            subgroup = training.state.layout.segments_of[record.index][0].subgroup
            component = training.state.components.component(subgroup, name)
            out = torch.empty(component.count(record.spec.numel), dtype=component.dtype)
            training.state.components.read(record.index, name, 0, out)
            found[f"{name} of {record.name}"] = out
    for name, buffer in training.model.named_buffers():
        found[f"buffer {name}"] = buffer.clone()
    scalars = scalars_of(training)
    found["random state"] = scalars["random"]["cpu"]
    for name in ("steps", "groups", "loss_scale", "small_state"):
        found[name] = _sorted(scalars[name])
    return found


def _sorted(value: Any) -> Any:
    """A copy with the entries of dictionaries in the order of their keys."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value, key=str)}
    return [_sorted(one) for one in value] if isinstance(value, list | tuple) else value


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit by bit, names included."""
    assert one.keys() == other.keys()
    for name, value in one.items():
        if isinstance(value, torch.Tensor):
            assert same_bits(value, other[name]), name
        else:
            assert str(value) == str(other[name]), name


def assert_restored(
    offloaded: infinity.OffloadedModel,
    expected: dict[str, Any],
    name: str = "a",
    extra: object = None,
) -> None:
    """The state is that of the snapshot, and this its ``extra``."""
    assert offloaded.restore(name) == extra
    assert_same(expected, everything(offloaded))


def no_room(*_: object, **__: object) -> Any:
    """In the place of what takes space on a disk."""
    raise AioError("no room", errno=errno.ENOSPC)


def save_and_fail(*arguments: Any) -> None:
    """In the place of ``save_on`` in ``infinity.snapshots.points``: all is there, but for what its
    last sync is for.
    """
    save_on(*arguments)
    raise OSError(errno.EIO, "the directory cannot be synced")
