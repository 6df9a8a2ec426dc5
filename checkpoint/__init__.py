"""State trees on disk: durable, checked, striped over SSDs, readable by the rest of the world."""

import importlib
from types import ModuleType

from checkpoint.errors import (
    ChangedTensorError,
    CorruptCheckpointError,
    IncompleteCheckpointError,
    RankFailedError,
)
from checkpoint.format.records import SaveInfo
from checkpoint.interop.export import export_safetensors, write_safetensors
from checkpoint.interop.views import open_zarr, write_references
from checkpoint.known.verdicts import LoadedStep
from checkpoint.loading.api import list_tensors, load
from checkpoint.loading.lazy import LazyCheckpoint, LazyTensor
from checkpoint.loading.lazy import open_lazily as open  # noqa: A004  as in gzip
from checkpoint.loading.verifying import VerifyReport, verify
from checkpoint.manager import Manager
from checkpoint.ranks.coordinator import Coordinator, SingleProcess
from checkpoint.ranks.group import GroupCoordinator
from checkpoint.saving.api import save, save_async
from checkpoint.saving.pending import PendingSave
from checkpoint.streams import open_stream
from checkpoint.tensors.sources import ByteSink, ByteSource, PartialSink, PartialSource

__all__ = [
    "ByteSink",
    "ByteSource",
    "ChangedTensorError",
    "Coordinator",
    "CorruptCheckpointError",
    "GroupCoordinator",
    "IncompleteCheckpointError",
    "LazyCheckpoint",
    "LazyTensor",
    "LoadedStep",
    "Manager",
    "PartialSink",
    "PartialSource",
    "PendingSave",
    "RankFailedError",
    "SaveInfo",
    "SingleProcess",
    "VerifyReport",
    "export_safetensors",
    "list_tensors",
    "load",
    "open",
    "open_stream",
    "open_zarr",
    "save",
    "save_async",
    "verify",
    "write_references",
    "write_safetensors",
]


def __getattr__(name: str) -> ModuleType:
    """`checkpoint.dcp` imports torch.distributed.checkpoint, which takes time, when it is used."""
    if name == "dcp":
        return importlib.import_module("checkpoint.dcp")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
