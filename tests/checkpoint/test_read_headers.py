"""What reading takes of the engine: memory of its own only where there is no other way."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

import checkpoint
from aio import Engine, File, Operation


def test_headers_are_read_into_whole_pages_and_so_without_memory_of_the_engine(
    tmp_path: Path,
) -> None:
    """Each lane would take megabytes for what it reads into other memory."""
    checkpoint.save({"w": torch.ones(1 << 20)}, tmp_path / "one")
    read, reads = Engine.read, list[tuple[int, int]]()

    def seen(self: Engine, file: File, offset: int, buffer: Any, **options: Any) -> Operation:
        if not offset:
            reads.append((np.frombuffer(buffer, np.uint8).ctypes.data, len(buffer)))
        return read(self, file, offset, buffer, **options)

    with mock.patch.object(Engine, "read", seen):
        checkpoint.load(tmp_path / "one")
        with checkpoint.open(tmp_path / "one") as opened:
            opened["w"][:1]
    assert len(reads) == 2
    assert not [one for one in reads if one[0] % 4096 or one[1] % 4096]
