"""State trees on disk: durable, checked, striped over SSDs, readable by the rest of the world."""

from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.export import export_safetensors, write_safetensors
from checkpoint.loading import list_tensors, load
from checkpoint.manager import Manager
from checkpoint.pending import PendingSave
from checkpoint.records import SaveInfo
from checkpoint.saving import save, save_async
from checkpoint.sources import ByteSink, ByteSource
from checkpoint.verifying import VerifyReport, verify
from checkpoint.views import open_zarr, write_references

__all__ = [
    "ByteSink",
    "ByteSource",
    "CorruptCheckpointError",
    "IncompleteCheckpointError",
    "Manager",
    "PendingSave",
    "SaveInfo",
    "VerifyReport",
    "export_safetensors",
    "list_tensors",
    "load",
    "open_zarr",
    "save",
    "save_async",
    "verify",
    "write_references",
    "write_safetensors",
]
