"""Bits that flip in swap files under a model that is offloaded, and reads that fail."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from torch import nn

import infinity
from aio import AioError
from infinity.model import training_of
from swap.storage.components import ComponentStore
from swap.storage.extents import Extent
from swap.tiered import TieredState


def state_of(offloaded: infinity.OffloadedModel) -> TieredState:
    return training_of(offloaded).state


def flip_in(path: Path, offset: int) -> None:
    """Flip one bit of the byte there, on the disk."""
    with path.open("r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 8]))
        file.flush()
        os.fsync(file.fileno())


def flip_every_page(path: Path) -> None:
    """Flip one bit of the first byte of each page, on the disk."""
    with path.open("r+b") as file:
        content = bytearray(file.read())
        content[::4096] = bytes(byte ^ 8 for byte in content[::4096])
        file.seek(0)
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def flip(offloaded: infinity.OffloadedModel, parameter: str, component: str) -> str:
    """Flip a bit of the first value of a component of a parameter; its file. The component must be
    on NVMe, and not all zeros.
    """
    offloaded.flush()
    state = state_of(offloaded)
    index = next(spec.index for spec in state.layout.specs if spec.name == parameter)
    segment = state.layout.segments_of[index][0]
    extent = state.components.extent(segment.subgroup, component)
    assert extent is not None
    kind = state.components.component(segment.subgroup, component)
    return flip_at(state, extent, segment.offset // kind.per * kind.dtype.itemsize)


def flip_at(state: TieredState, extent: Extent, at: int) -> str:
    """Flip a bit of a byte of an extent that is in one piece; its file."""
    assert state.extents is not None
    path = state.extents.folders[extent.directory] / "state.swap"
    flip_in(path, extent.offset + at)
    state.weights.drop()  # what is read ahead is not read from there
    return str(path)


def fail(*_: object) -> None:
    """In the place of a read or a write."""
    raise AioError("no bytes today", errno=errno.EIO, filename="state.swap")


def restore_error(
    model: nn.Module, nvme: Path, *, max_parameter_bytes: int | None = None
) -> infinity.RestoreError:
    """That of a block at whose end no read worked."""
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.raises(infinity.RestoreError) as caught,
        infinity.offload(model, nvme, optimizer=None, max_parameter_bytes=max_parameter_bytes),
    ):
        patch.setattr(ComponentStore, "read", fail)
    assert [name for name, p in model.named_parameters() if p.is_meta] == caught.value.parameters
    return caught.value
