"""What would not load is not published: the rules of readers, run by writers.

The tree is checked as it is planned, before anything is made; records when all of them are known;
data files when they are durable, before the manifest gets its name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checkpoint.directory.locate import check_data_file
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.records import Manifest, TensorRecord
from checkpoint.format.tree import DataNode, decode_tree
from checkpoint.tensors.assembly import view_of


def check_tree(tree: Any, tensors: Sequence[TensorRecord], storages: Sequence[int]) -> None:
    """Decodes a tree as a reader would. `tensors` may lack their chunks. No I/O.

    Raises ValueError naming the path of what would not load.
    """
    manifest = Manifest("", 1, (), (), tuple(storages), tuple(tensors), tree)
    count = len(manifest.tensors)

    def check(path: tuple[object, ...], node: DataNode) -> None:
        if len(node) == 1 and 0 <= node.get("tensor", -1) < count:  # as most are
            return
        view_of(manifest, path, node)

    try:
        decode_tree(tree, check)
    except CorruptCheckpointError as error:
        raise ValueError(f"cannot save {error}; this would not load") from error


def check_files(manifest: Manifest, checkpoint: Path) -> None:
    """Finds every data file under the name that readers will look for, of the size they expect.

    Raises OSError naming a file that is not there, as where ranks do not see each other's disks.
    """
    for file in manifest.files:
        try:
            check_data_file(manifest, checkpoint, file)
        except CorruptCheckpointError as error:
            raise FileNotFoundError(
                f"{error}; the checkpoint is not published, because it would not load here"
            ) from error
