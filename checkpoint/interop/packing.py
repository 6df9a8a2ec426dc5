"""A state tree in one piece of memory: what one rank has for itself, on its way through others.

The piece is eight bytes with the length of a manifest, the manifest, and the bytes of the tensors,
each at a multiple of 4096 of the one data file that the manifest speaks of, without its header.
"""

from __future__ import annotations

from typing import Any

import torch

from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.checksum import CRC_BLOCK_BYTES, copy_ranges
from checkpoint.format.datafile import ALIGNMENT, align_up
from checkpoint.format.manifest import decode_manifest, encode_manifest
from checkpoint.format.records import ChunkRecord, FileRecord, Manifest, TensorRecord
from checkpoint.format.tree import decode_tree
from checkpoint.plan.state_plan import TensorPlan, plan_state
from checkpoint.tensors.assembly import Assembler
from checkpoint.tensors.targets import TensorTarget

_UUID = "0" * 8
_LENGTH_BYTES = 8


def pack(state: object) -> torch.Tensor:
    """The bytes of a state tree, on the CPU; equal trees give equal bytes. Raises as `save`."""
    plan = plan_state(state)
    records: list[TensorRecord] = []
    end = ALIGNMENT
    for tensor in plan.tensors:
        records.append(_placed(tensor, align_up(end)))
        end = align_up(end) + tensor.source.nbytes
    manifest = Manifest(
        uuid=_UUID,
        world_size=1,
        roots=(),
        files=(FileRecord(None, f"{_UUID}/r0-0.safetensors", align_up(end), ALIGNMENT, 0),),
        storages=plan.storages,
        tensors=tuple(records),
        tree=plan.tree,
    )
    head = encode_manifest(manifest, plan.tree_text)
    origin = align_up(_LENGTH_BYTES + len(head)) - ALIGNMENT
    out = torch.zeros(origin + align_up(end), dtype=torch.uint8, device="cpu")
    out[:_LENGTH_BYTES] = _bytes(len(head).to_bytes(_LENGTH_BYTES, "little"))
    out[_LENGTH_BYTES : _LENGTH_BYTES + len(head)] = _bytes(head)
    for tensor, record in zip(plan.tensors, records, strict=True):
        _copy_from(tensor, out[origin + record.chunks[0].offset :][: record.nbytes])
    return out


def unpack(data: torch.Tensor) -> Any:
    """The tree that `pack` was given, its tensors on the CPU. Raises CorruptCheckpointError."""
    length = int.from_bytes(data[:_LENGTH_BYTES].numpy().tobytes(), "little")
    if data.numel() < _LENGTH_BYTES or length > data.numel() - _LENGTH_BYTES:
        raise CorruptCheckpointError("the state of a rank is cut off")
    manifest = decode_manifest(data[_LENGTH_BYTES : _LENGTH_BYTES + length].numpy().tobytes())
    origin = align_up(_LENGTH_BYTES + length) - ALIGNMENT
    if len(manifest.files) != 1 or data.numel() != origin + manifest.files[0].nbytes:
        raise CorruptCheckpointError("the state of a rank has another length than it says")
    assembler = Assembler(manifest, torch.device("cpu"))
    tree = decode_tree(manifest.tree, assembler.build)
    for index, tensor in assembler.tensors.items():
        for chunk in manifest.tensors[index].chunks:
            part = data[origin + chunk.offset :][: chunk.nbytes]
            place = TensorTarget.of(tensor).place(chunk.start, chunk.shape)
            if place.address is not None:
                copy_ranges([part.data_ptr()], [place.address], [chunk.nbytes])
            elif place.deliver is not None:
                place.deliver(0, part.numpy().data)
    return tree


def _placed(tensor: TensorPlan, offset: int) -> TensorRecord:
    record = tensor.record
    blocks = -(-tensor.source.nbytes // CRC_BLOCK_BYTES)
    start = (0,) * len(record.shape)
    # The checkpoint that these bytes go into has sums of them.
    chunk = ChunkRecord(0, offset, tensor.source.nbytes, start, record.shape, (0,) * blocks)
    return record.with_chunks([chunk])


def _copy_from(tensor: TensorPlan, out: torch.Tensor) -> None:
    source = tensor.source
    if not out.numel():
        return
    if source.address is not None:
        copy_ranges([source.address], [out.data_ptr()], [out.numel()])
    elif source.read is not None:
        source.read(0, out.numpy().data)


def _bytes(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)
