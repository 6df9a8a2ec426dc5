"""Settings of the engine and of staging, and the grids that a sweep goes through. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import product

from aio import Backend, Engine
from checkpoint.bench.conditions.units import format_size
from checkpoint.plan.write_runs import STAGING_BYTES

DEFAULT_QUEUE_DEPTH = 32
DEFAULT_BLOCK_BYTES = 1 << 20
SWEPT_QUEUE_DEPTHS = (1, 2, 4, 8, 16, 32, 64)
SWEPT_BLOCK_BYTES = (256 << 10, 1 << 20, 4 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What `aio.Engine` and `checkpoint.save` are given. `lanes` of None: one per directory."""

    backend: Backend = "auto"
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    block_bytes: int = DEFAULT_BLOCK_BYTES
    lanes: int | None = None
    staging_bytes: int = STAGING_BYTES

    def engine(self, num_directories: int) -> Engine:
        """An engine as this says. Raises what `aio.Engine` raises."""
        lanes = self.lanes_for(num_directories)
        return Engine(self.backend, self.queue_depth, self.block_bytes, lanes)

    def lanes_for(self, num_directories: int) -> int:
        return num_directories if self.lanes is None else self.lanes

    def texts(self) -> dict[str, str]:
        """Its fields as people read them."""
        return {
            "backend": self.backend,
            "depth": str(self.queue_depth),
            "block": format_size(self.block_bytes),
            "lanes": "1 per dir" if self.lanes is None else str(self.lanes),
            "staging": format_size(self.staging_bytes),
        }

    def __str__(self) -> str:
        texts = self.texts()
        return (
            f"{texts['backend']}, depth {texts['depth']}, blocks of {texts['block']}, "
            f"lanes {texts['lanes']}, staging {texts['staging']}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values of every field of `Setting`; all combinations are measured."""

    backends: tuple[Backend, ...] = ("auto",)
    queue_depths: tuple[int, ...] = (DEFAULT_QUEUE_DEPTH,)
    block_bytes: tuple[int, ...] = (DEFAULT_BLOCK_BYTES,)
    lanes: tuple[int | None, ...] = (None,)
    staging_bytes: tuple[int, ...] = (STAGING_BYTES,)

    def settings(self) -> tuple[Setting, ...]:
        combinations = product(
            self.backends, self.queue_depths, self.block_bytes, self.lanes, self.staging_bytes
        )
        return tuple(
            Setting(
                backend=backend, queue_depth=depth, block_bytes=block, lanes=lanes, staging_bytes=s
            )
            for backend, depth, block, lanes, s in combinations
        )


def varying_fields(settings: Sequence[Setting]) -> list[str]:
    """The names in `Setting.texts` under which the settings differ."""
    names = list(Setting().texts())
    different = []
    for name, field in zip(names, fields(Setting), strict=True):
        if len({getattr(setting, field.name) for setting in settings}) > 1:
            different.append(name)
    return different
