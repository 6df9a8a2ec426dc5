"""A snapshot, saved as a portable checkpoint while training goes on.

The tree is that of ``values.persistence``; its bytes come from what the snapshot keeps. No step has
to wait for them: what a snapshot keeps never changes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from checkpoint import PendingSave
from checkpoint.saving.api import SaveRequest, save_on, start_save
from infinity.snapshots.reading import SavedPoint
from infinity.values.component_bytes import values_at


@dataclass(frozen=True, slots=True)
class PointBytes:
    """A component of a tensor of a snapshot: a ``checkpoint.ByteSource``."""

    point: SavedPoint
    leaf: str
    component: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    thread_safe: ClassVar[bool] = True

    def read(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with the bytes from byte ``start``; whole elements. Raises ``AioError``, and
        ``CorruptCheckpointError`` for what host memory held.
        """
        self.point.fill(self.leaf, self.component, *values_at(start, out, self.dtype))


class _NothingToGuard:
    """Stands for the optimizer whose next step waits for a save: there is none."""

    def register_step_pre_hook(self, hook: object) -> None:
        """Never called."""


class PointSave:
    """One that is under way, with what it reads from."""

    def __init__(self, name: str, point: SavedPoint, pending: PendingSave) -> None:
        self.name = name
        self.pending = pending
        self._point = point

    def end(self) -> None:
        """Wait, whatever comes of it, and close the files."""
        self.pending.wait_done()
        self._point.close()


def save_now(
    point: SavedPoint,
    path: str | os.PathLike[str],
    stripe_dirs: Sequence[str | os.PathLike[str]] | None,
    staging_bytes: int,
) -> Any:
    """As ``checkpoint.save``."""
    return save_on(_request(point, path, stripe_dirs, staging_bytes))


def save_behind(
    point: SavedPoint,
    path: str | os.PathLike[str],
    stripe_dirs: Sequence[str | os.PathLike[str]] | None,
    staging_bytes: int,
) -> PendingSave:
    """As ``checkpoint.save_async``, with nothing that waits for it; ``point`` is read until it is
    done.
    """
    request = _request(point, path, stripe_dirs, staging_bytes)
    return start_save(replace(request, guard=_NothingToGuard()))


def _request(
    point: SavedPoint,
    path: str | os.PathLike[str],
    stripe_dirs: Sequence[str | os.PathLike[str]] | None,
    staging_bytes: int,
) -> SaveRequest:
    state = tree_of_point(point)
    return SaveRequest(state=state, path=path, stripe_dirs=stripe_dirs, staging_bytes=staging_bytes)


def tree_of_point(point: SavedPoint) -> dict[str, Any]:
    """What ``offloaded.save`` would have saved when the snapshot was taken."""
    training = point.training()
    model: dict[str, Any] = {}
    optimizer: dict[str, dict[str, Any]] = {}
    for leaf, names in training["planes"].items():
        shape = tuple(training["shapes"][leaf])
        for name in names:
            part = model if name == "weight" else optimizer.setdefault(name, {})
            part[leaf] = PointBytes(
                point, leaf, name, point.dtype(leaf, name), point.shape(leaf, name, shape)
            )
    model |= point.tree("model", default={})  # buffers
    return {
        "model": model,
        "optimizer": optimizer,
        "infinity": training,
        "extra": point.tree("extra"),
    }
