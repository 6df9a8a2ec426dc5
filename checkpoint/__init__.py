"""State trees on disk: durable, checked, striped over SSDs, readable by the rest of the world."""

from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.export import export_safetensors, write_safetensors
from checkpoint.loading import list_tensors, load
from checkpoint.saving import SaveInfo, save
from checkpoint.sources import ByteSink, ByteSource
from checkpoint.verifying import VerifyReport, verify

__all__ = [
    "ByteSink",
    "ByteSource",
    "CorruptCheckpointError",
    "IncompleteCheckpointError",
    "SaveInfo",
    "VerifyReport",
    "export_safetensors",
    "list_tensors",
    "load",
    "save",
    "verify",
    "write_safetensors",
]
