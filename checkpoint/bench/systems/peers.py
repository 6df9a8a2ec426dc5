"""Other libraries as contestants, each called as its own documentation does, in one directory.

What they do not sync is synced for them before a save counts as durable. Their loads give new
tensors, but DCP's, which loads into live ones as that library does.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, ClassVar, cast

import torch

from checkpoint.bench.conditions.scratch import Place
from checkpoint.bench.conditions.workload import State
from checkpoint.bench.systems.system import (
    Loaded,
    SaveTimes,
    Stopwatch,
    System,
    make_durable,
    touch_pages,
)

_DCP_THREADS = 4
_ZARR_CHUNK_BYTES = 64 << 20


class OneFolder(System):
    """A peer that writes `place.main`. `package` must be installed for it."""

    package: ClassVar[str] = "torch"

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """Why it cannot be measured here; None if it can."""
        if importlib.util.find_spec(cls.package) is None:
            return f"the package {cls.package} is not installed"
        return None

    def save(self, state: State, place: Place) -> SaveTimes:
        with quiet():
            watch = Stopwatch()
            self.save_folder(state, place)
            returned = watch.seconds()
            make_durable(place.main)
            return SaveTimes(state.nbytes, returned, watch.seconds())

    def load(self, state: State, place: Place) -> Loaded:
        with quiet():
            watch = Stopwatch()
            tensors = self.load_folder(state, place)
            touch_pages(tensors)
            return Loaded(state.nbytes, watch.seconds(), tensors)

    @abstractmethod
    def save_folder(self, state: State, place: Place) -> None:
        """Saves below `place.main`; when it returns is what counts as returned."""

    @abstractmethod
    def load_folder(self, state: State, place: Place) -> dict[str, torch.Tensor]:
        """The tensors by name; mapped files will be touched for it."""


class TorchSave(OneFolder):
    """`torch.save` and `torch.load`."""

    name = "torch"

    def save_folder(self, state: State, place: Place) -> None:
        torch.save(state.tensors, place.main / "state.pt")

    def load_folder(self, state: State, place: Place) -> dict[str, torch.Tensor]:
        loaded = torch.load(place.main / "state.pt", weights_only=True)
        return cast("dict[str, torch.Tensor]", loaded)


class Safetensors(OneFolder):
    """`save_file` and `load_file`."""

    name = "safetensors"
    package = "safetensors"

    def save_folder(self, state: State, place: Place) -> None:
        from safetensors.torch import save_file

        save_file(state.tensors, place.main / "state.safetensors")

    def load_folder(self, state: State, place: Place) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(place.main / "state.safetensors")


class Dcp(OneFolder):
    """torch.distributed.checkpoint, its file system writer with four threads, in one process."""

    name = "dcp"
    loads_live = True

    def save_folder(self, state: State, place: Place) -> None:
        from torch.distributed.checkpoint.filesystem import FileSystemWriter
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = FileSystemWriter(place.main, thread_count=_DCP_THREADS)
        with _raising_causes():
            save(dict(state.tensors), storage_writer=writer, no_dist=True)

    def load_folder(self, state: State, place: Place) -> dict[str, torch.Tensor]:
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.state_dict_loader import load

        tensors = dict(state.tensors)
        with _raising_causes():
            load(tensors, storage_reader=FileSystemReader(place.main), no_dist=True)
        return tensors


@contextmanager
def _raising_causes() -> Iterator[None]:
    """DCP raises what is no `Exception`, also for one: that would end the whole measurement. An
    interrupt is in it as well.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        raise next(cause for cause, _ in error.failures.values()) from error


class Zarr(OneFolder):
    """One uncompressed array per tensor in a local store; types numpy lacks as plain integers."""

    name = "zarr"
    package = "zarr"

    def save_folder(self, state: State, place: Place) -> None:
        import zarr

        group = zarr.create_group(store=str(place.main / "state.zarr"))
        for name, tensor in state.tensors.items():
            data = _as_numpy(tensor)
            array = group.create_array(
                name.replace("/", "_"),
                shape=data.shape,
                dtype=data.dtype,
                chunks=_chunks(data.shape, data.dtype.itemsize),
                compressors=None,
            )
            array[...] = data

    def load_folder(self, state: State, place: Place) -> dict[str, torch.Tensor]:
        import zarr

        group: Any = zarr.open_group(store=str(place.main / "state.zarr"), mode="r")
        loaded = {}
        for name, tensor in state.tensors.items():
            data = group[name.replace("/", "_")][...]
            loaded[name] = torch.as_tensor(data).view(tensor.dtype).reshape(tensor.shape)
        return loaded


def _as_numpy(tensor: torch.Tensor) -> Any:
    if tensor.dtype in _INTEGERS:
        return tensor.view(_INTEGERS[tensor.dtype]).numpy()
    return tensor.numpy()


_INTEGERS = {
    torch.bfloat16: torch.uint16,
    torch.float8_e4m3fn: torch.uint8,
    torch.float8_e5m2: torch.uint8,
}


def _chunks(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Whole rows, as many as make a chunk of the size that suits large reads."""
    if not shape:
        return ()
    row_bytes = math.prod(shape[1:]) * itemsize
    rows = min(max(_ZARR_CHUNK_BYTES // max(row_bytes, 1), 1), shape[0])
    return (rows, *shape[1:])


@contextmanager
def quiet() -> Iterator[None]:
    """Other libraries' warnings are not about what is measured, nor their prints results."""
    with warnings.catch_warnings(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        yield
