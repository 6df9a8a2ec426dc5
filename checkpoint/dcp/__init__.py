"""torch.distributed.checkpoint over this format: `StorageWriter` and `StorageReader`.

Every rank writes its own data files, at the speed of its stripes; rank 0 commits. A checkpoint
written so is an ordinary one: `checkpoint.load` reads it as the nested tree that was saved (with
the keys that DCP has: text), and a checkpoint of `checkpoint.save` loads through DCP. Values that
are no tensors are kept as values. Of those that no state tree holds (objects of other classes,
tensors in tuples) the bytes are kept that DCP made, a pickle, which DCP alone reads:
`checkpoint.load` gives them as an array of dtype V1. (An array of that dtype that
`checkpoint.save` was given loads through DCP as the array that it is, unless it begins as what
torch.save writes.)

Importing this imports torch.distributed.checkpoint; `checkpoint.dcp` does so when first used.
"""

from __future__ import annotations

from checkpoint.dcp.reader import StorageReader
from checkpoint.dcp.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
