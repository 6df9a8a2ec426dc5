"""What every measured system does, and the library itself as one of them.

A system times itself, so that each says what counts. Saving counts from the call on; `returned` is
when it returned, `durable` when all it wrote and the names of it were synced. Loading counts until
every byte is in memory and may be used.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

import checkpoint
from aio import sync_directory
from checkpoint.bench.conditions.pagecache import files_below
from checkpoint.bench.conditions.scratch import Place
from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.conditions.workload import State, byte_view

_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class SaveTimes:
    """Seconds from the call until it returned, and until the `nbytes` were durable."""

    nbytes: int
    returned_seconds: float
    durable_seconds: float


@dataclass(frozen=True, slots=True)
class Loaded:
    """Seconds of a load of `nbytes`, and what it gave; None if the system has checked it itself."""

    nbytes: int
    seconds: float
    tensors: Mapping[str, torch.Tensor] | None


class System(ABC):
    """Something that saves a state and loads it again; one instance for all its runs.

    `loads_live` says that it loads into the tensors of the state, so that these are cleared first;
    `has_tensors` that what the state consists of matters to it, and not its size alone.
    """

    name: ClassVar[str]
    has_tensors: ClassVar[bool] = True
    loads_live: bool = False

    @abstractmethod
    def save(self, state: State, place: Place) -> SaveTimes:
        """Saves to empty folders; nothing of it runs on after this returns."""

    @abstractmethod
    def load(self, state: State, place: Place) -> Loaded:
        """Loads what `save` put there."""


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start


class Infinity(System):
    """`checkpoint.save` and `checkpoint.load`; each call has an engine of its own, as by default.

    `live`: load into live tensors, and not into new ones.
    """

    name = "infinity"

    def __init__(self, setting: Setting, *, verify: bool, live: bool) -> None:
        self.setting = setting
        self._verify = verify
        self.loads_live = live

    def save(self, state: State, place: Place) -> SaveTimes:
        watch = Stopwatch()
        with self.setting.engine(len(place.folders)) as engine:
            checkpoint.save(
                state.tensors,
                place.main / "step",
                stripes(place),
                engine,
                staging_bytes=self.setting.staging_bytes,
            )
            returned = watch.seconds()
        return SaveTimes(state.nbytes, returned, returned)

    def load(self, state: State, place: Place) -> Loaded:
        watch = Stopwatch()
        with self.setting.engine(len(place.folders)) as engine:
            tensors = checkpoint.load(
                place.main / "step",
                into=state.tensors if self.loads_live else None,
                verify=self._verify,
                engine=engine,
                staging_bytes=self.setting.staging_bytes,
            )
        return Loaded(state.nbytes, watch.seconds(), tensors)


class InfinityAsync(Infinity):
    """`checkpoint.save_async` without a guard: it returns when the state may be changed."""

    name = "infinity async"

    def save(self, state: State, place: Place) -> SaveTimes:
        watch = Stopwatch()
        pending = checkpoint.save_async(state.tensors, place.main / "step", stripes(place))
        returned = watch.seconds()
        pending.result()
        return SaveTimes(state.nbytes, returned, watch.seconds())


def stripes(place: Place) -> list[Path] | None:
    """What a user would give as `stripe_dirs`: nothing for a single directory."""
    return list(place.folders) if len(place.folders) > 1 else None


def make_durable(folder: Path) -> None:
    """Syncs every file in a folder, then every directory of it, and that it exists."""
    for path in files_below([folder]):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    directories = [path for path in folder.rglob("*") if path.is_dir()]
    for directory in [*directories, folder, folder.parent]:
        sync_directory(directory)


def touch_pages(tensors: Mapping[str, torch.Tensor]) -> None:
    """Reads a byte of every page, so that a mapped file counts as loaded when it is in memory."""
    for tensor in tensors.values():
        byte_view(tensor)[::_PAGE_BYTES].max(initial=0)
