"""torch.distributed.checkpoint over this format: `StorageWriter` and `StorageReader`.

Every rank writes its own data files, at the speed of its stripes; rank 0 commits. A checkpoint
written so is an ordinary one: `checkpoint.load` reads it as the nested tree that was saved, and a
checkpoint of `checkpoint.save` loads through DCP. What DCP serialises itself, anything that is no
tensor, is kept as it came.

Importing this imports torch.distributed.checkpoint; `checkpoint.dcp` does so when first used.
"""

from __future__ import annotations

from checkpoint.dcp_reader import StorageReader
from checkpoint.dcp_writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
