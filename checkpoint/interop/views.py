"""Checkpoints as other libraries see them: zarr groups, and references for fsspec."""

from __future__ import annotations

import base64
import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aio.errors import check_flag
from checkpoint.directory.destination import PathLike, checkpoint_path
from checkpoint.directory.files.replacing import replace_durably
from checkpoint.directory.relocation import Relocation, StripeDirs, relocation
from checkpoint.format.records import Manifest, TensorRecord
from checkpoint.format.slices import contiguous_strides, flat_first, offset_of
from checkpoint.format.tree import data_nodes
from checkpoint.interop.zarr_layout import (
    GROUP_METADATA,
    ArrayLayout,
    array_layout,
    consolidated_metadata,
    layout_in_boxes,
    node_paths,
)
from checkpoint.loading.opened import OpenCheckpoint, open_current
from checkpoint.sheltered import Cancellation, sheltered
from checkpoint.tensors.assembly import TensorView, array_dtype, view_of

if TYPE_CHECKING:
    import numpy as np
    import zarr

logger = logging.getLogger(__name__)


def open_zarr(
    path: PathLike, *, verify: bool = True, stripe_dirs: StripeDirs | None = None
) -> zarr.Group:
    """A checkpoint as a read-only zarr group; dots in names are levels of groups.

    Nothing is read but the manifest until an array is indexed; then grains or checksum blocks are
    read and verified, unless `verify` is false. Types that zarr lacks (bfloat16, float8) appear as
    unsigned integers of their size, with torch's name of the type in the attribute `dtype`. Arrays
    of numpy of a type that torch lacks (dates, texts, records, bytes in another order) appear as
    bytes, with a dimension more, and have numpy's description of the type there, as files of
    `numpy.save` do ("<M8[D]"). The group stands for the save that it was opened of: another one at
    the same path does not change it, and a copy that was pickled raises FileNotFoundError if
    another save has come. `stripe_dirs` is as in `load`. A child process that was forked opens a
    group of its own.

    Raises what `load` raises for a missing, incomplete or corrupt checkpoint; indexing raises
    CorruptCheckpointError. Needs zarr 3.
    """
    from checkpoint.interop.zarr_store import open_group

    check_flag("verify", verify)
    return open_group(checkpoint_path(path), verify=verify, moved=relocation(stripe_dirs))


def write_references(
    path: PathLike, file: PathLike, *, stripe_dirs: StripeDirs | None = None
) -> Path:
    """Writes a reference file with which fsspec and zarr read a checkpoint without this library.

    Open it with `zarr.open_group("reference://", storage_options={"fo": str(file)}, mode="r")`,
    which lists all groups; paths in it are absolute. Nothing verifies the bytes then. Leaves
    whose bytes lie apart in another tensor are not in it, nor, with a warning, are tensors that
    ranks saved in boxes of uneven widths. `stripe_dirs` is as in `load`. `file` is replaced when
    all is written; it stands for the save that it was made of, whose files go when another save
    takes its place.

    Raises what `load` raises for a missing, incomplete or corrupt checkpoint, OSError for `file`.
    """
    checkpoint, target = checkpoint_path(path), checkpoint_path(file, "file")
    moved = relocation(stripe_dirs)

    def work(cancellation: Cancellation) -> None:
        _write_references(checkpoint, moved, target, cancellation)

    sheltered(work, "checkpoint-references")
    return target


def _write_references(
    checkpoint: Path, moved: Relocation, target: Path, cancellation: Cancellation
) -> None:
    with open_current(checkpoint, moved) as opened:
        manifest = opened.manifest
        references = _references(opened, cancellation)
    # Every file was there when the checkpoint was opened; a save may take its place at any time.
    templates = {
        f"f{number}": str(manifest.file_path(checkpoint, record))
        for number, record in enumerate(manifest.files)
    }
    document = {"version": 1, "templates": templates, "refs": references}
    replace_durably(target, json.dumps(document).encode())


def _references(opened: OpenCheckpoint, cancellation: Cancellation) -> dict[str, Any]:
    manifest, path = opened.manifest, opened.path
    nodes = data_nodes(manifest.tree)
    metadata: dict[str, str] = {}
    references: dict[str, Any] = {}
    for name, place in node_paths(nodes).items():
        cancellation.check()
        view = view_of(manifest, *nodes[name])
        if not view.is_row_major:
            continue
        layout = _layout(manifest, view, array_dtype(nodes[name][1]))
        if layout is None:
            logger.warning("%s: %s lies in uneven boxes and is not in the references", path, name)
            continue
        for end in [index for index, char in enumerate(place) if char == "/"]:
            metadata[place[:end]] = GROUP_METADATA
        metadata[place] = layout.metadata()
        for index in layout.chunk_indices():
            key = "/".join([place, "c", *map(str, index)])
            references[key] = _reference(opened, view, layout, index)
    # The root has all metadata: zarr finds nothing in inner folders that fsspec lists.
    own = {f"{place}/zarr.json": text for place, text in metadata.items()}
    return {"zarr.json": consolidated_metadata(metadata), **own, **references}


def _layout(
    manifest: Manifest, view: TensorView, array: np.dtype[Any] | None
) -> ArrayLayout | None:
    """How a leaf is cut; None if it lies in boxes of which no array is made up."""
    layout, record = array_layout(view.dtype, view.shape, array), manifest.tensors[view.tensor]
    if not is_in_boxes(record):
        return layout
    if view.shape != record.shape:
        return None
    chunks = [chunk for chunk in record.chunks if chunk.nbytes]
    return layout_in_boxes(layout, [(chunk.start, chunk.shape) for chunk in chunks])


def _reference(
    opened: OpenCheckpoint, view: TensorView, layout: ArrayLayout, index: tuple[int, ...]
) -> Any:
    """Where a chunk lies; the bytes themselves if it does not lie in one piece.

    A chunk at the edge of its array must be as long as the others. What follows it in the file does
    for the rest, since nobody looks at it.
    """
    first, nbytes = layout.chunk_range(index)
    extent = _extent(opened.manifest, view, first, nbytes, layout.chunk_nbytes)
    if extent is not None:
        number, offset = extent
        return [f"{{{{f{number}}}}}", offset, layout.chunk_nbytes]
    data = bytearray(layout.chunk_nbytes)
    opened.source(view).read(first, memoryview(data)[:nbytes])
    return "base64:" + base64.b64encode(data).decode("ascii")


def _extent(
    manifest: Manifest, view: TensorView, first: int, nbytes: int, padded: int
) -> tuple[int, int] | None:
    record = manifest.tensors[view.tensor]
    first += view.offset
    if is_in_boxes(record):
        return _extent_in_box(record, first, nbytes)
    for chunk in record.chunks:
        start = flat_first(record.shape, chunk.start, chunk.shape)
        if start is None:
            continue
        into = first - start * record.element.itemsize
        if into >= 0 and into + nbytes <= chunk.nbytes:
            offset = chunk.offset + into
            fits = offset + padded <= manifest.files[chunk.file].nbytes
            return (chunk.file, offset) if fits else None
    return None


def is_in_boxes(record: TensorRecord) -> bool:
    """Whether a chunk of a tensor is no gapless range of it."""
    return any(
        flat_first(record.shape, chunk.start, chunk.shape) is None for chunk in record.chunks
    )


def _extent_in_box(record: TensorRecord, first: int, nbytes: int) -> tuple[int, int]:
    """Where the piece lies that begins at byte `first` of the tensor, and is gapless in its box."""
    place, rest = [], first // record.element.itemsize
    for stride in contiguous_strides(record.shape):
        low, rest = divmod(rest, stride)
        place.append(low)
    for chunk in record.chunks:
        inside = [low - start for low, start in zip(place, chunk.start, strict=True)]
        if all(0 <= low < size for low, size in zip(inside, chunk.shape, strict=True)):
            into = offset_of(inside, contiguous_strides(chunk.shape)) * record.element.itemsize
            assert into + nbytes <= chunk.nbytes, "a piece lies in one box"
            return chunk.file, chunk.offset + into
    raise AssertionError("boxes make up their tensor")
