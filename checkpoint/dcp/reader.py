"""The storage reader of DCP: gives its planner the boxes it asks for, verified.

A box that is a gapless range of a chunk is read straight to where it goes, if dtype and memory are
those of the target, and so are rows of a box that lie far apart. Rows that lie close together are
read with what is between them; the box is picked out of them as they come, and converted. Nothing
is staged but what `staging_bytes` allows.
"""

from __future__ import annotations

import os
import secrets
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from aio.errors import check_flag
from checkpoint.dcp.contents import Contents, StoredChunk
from checkpoint.dcp.items import distributed
from checkpoint.directory.destination import PathLike, checkpoint_path
from checkpoint.directory.locate import read_manifest
from checkpoint.directory.relocation import StripeDirs, relocation
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.format.records import Manifest
from checkpoint.format.slices import Shape
from checkpoint.known.damage import note_error
from checkpoint.loading.opened import OpenCheckpoint
from checkpoint.loading.reading import PlacedRead, read_files
from checkpoint.outside import carrying, entrance, outside
from checkpoint.plan.write_runs import STAGING_BYTES, check_staging_bytes
from checkpoint.sheltered import Cancellation, sheltered
from checkpoint.tensors.boxes import BoxPicker, check_target, read_box, reads_of_box
from checkpoint.tensors.changes import count_changes
from checkpoint.transfer.cuda import copier_of_caller
from checkpoint.transfer.reader import ChunkRead, ReadOptions

Finish = Callable[[], None]


class StorageReader(TorchStorageReader):
    """Reads what `torch.distributed.checkpoint.load` asks for, on any number of ranks.

    `path` is a checkpoint of `StorageWriter` or of `checkpoint.save`; of the latter, a part of the
    tree without tensors can be asked for as one value. Every grain that is touched, or checksum
    block of a checkpoint without grains, is read whole and verified, unless `verify` is false.
    `stripe_dirs` is as in `checkpoint.load`.
    """

    def __init__(
        self,
        path: PathLike,
        *,
        verify: bool = True,
        staging_bytes: int = STAGING_BYTES,
        stripe_dirs: StripeDirs | None = None,
    ) -> None:
        super().__init__()
        self.path = checkpoint_path(path)
        check_flag("verify", verify)
        check_staging_bytes(staging_bytes)
        self._options = ReadOptions(engine=None, staging_bytes=staging_bytes, verify=verify)
        self._moved = relocation(stripe_dirs)
        self._load_id = secrets.token_hex(8)
        self._manifest: Manifest | None = None
        self._storage: dict[Any, Any] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self.path = checkpoint_path(checkpoint_id, "checkpoint_id")
        self._manifest = None
        self._load_id = secrets.token_hex(8)

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        """Raises what `checkpoint.load` raises for a missing, incomplete or corrupt checkpoint."""
        self._manifest = read_manifest(self.path, self._moved)
        metadata = Contents(self._manifest).metadata()
        metadata.storage_meta = StorageMeta(checkpoint_id=str(self.path), load_id=self._load_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **options: Any
    ) -> None:
        self._storage = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._known_manifest().uuid)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raises RuntimeError where ranks are about to load different saves."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise _saved_over(self.path)
        return plans

    @entrance
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Raises CorruptCheckpointError naming file, tensor and extent, or OSError; RuntimeError if
        another save took the place of the checkpoint after `read_metadata`.
        """
        manifest = self._known_manifest()
        try:
            self._read(manifest, plan, planner)
        except (CorruptCheckpointError, OSError) as error:
            if _uuid_at(self.path) not in (manifest.uuid, None):
                raise _saved_over(self.path) from error
            note_error(self.path, manifest, error)
            raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read(self, manifest: Manifest, plan: LoadPlan, planner: LoadPlanner) -> None:
        by_file: dict[int, list[PlacedRead]] = defaultdict(list)
        finish: list[Finish] = []
        others: list[ReadItem] = []
        written: list[torch.Tensor] = []
        for item in plan.items:
            stored = self._storage.get(item.storage_index)
            if item.type != LoadItemType.BYTE_IO and isinstance(stored, StoredChunk):
                with outside():
                    target = planner.resolve_tensor(item).detach()
                by_file[stored.chunk.file].extend(self._plan_reads(stored, item, target))
                written += [target, *distributed(planner, item.dest_index.fqn)]
                finish.append(_committed(planner, item, target))
            else:
                others.append(item)
        count_changes(written)
        is_inference = torch.is_inference_mode_enabled()
        copier = copier_of_caller(follows=True)
        copier.finish_caller()

        def read(cancellation: Cancellation) -> None:
            options = replace(self._options, cancellation=cancellation, copier=copier)
            with closing(copier), torch.inference_mode(is_inference), copier.as_caller():
                try:
                    read_files(manifest, self.path, by_file, options)
                except (CorruptCheckpointError, OSError) as error:
                    note_error(self.path, manifest, error)  # no interrupt comes before that
                    raise

        sheltered(read, "checkpoint-dcp")
        count_changes(written)
        for step in finish:
            step()
        if others:
            self._read_others(manifest, others, planner)

    def _plan_reads(
        self, stored: StoredChunk, item: ReadItem, target: torch.Tensor
    ) -> list[PlacedRead]:
        """What to read for an item, and where it goes."""
        name, chunk = stored.record.name, stored.chunk
        box = _box(item, chunk.shape, stored.record.element.torch, target)
        unit = chunk.unit_nbytes if self._options.verify else ALIGNMENT
        return [
            (ChunkRead(name, chunk, first, last), place)
            for first, last, place in reads_of_box(box, unit)
        ]

    def _read_others(self, manifest: Manifest, items: list[ReadItem], planner: LoadPlanner) -> None:
        """Values, and views of other tensors' bytes."""
        contents = Contents(manifest)
        with OpenCheckpoint(manifest, self.path, verify=self._options.verify) as opened:
            for item in items:
                if item.type == LoadItemType.BYTE_IO:
                    name = item.storage_index.fqn
                    value = contents.serialised(name, opened, is_torchs=_is_torchs(planner))
                    with outside():
                        planner.load_bytes(item, value)
                    continue
                view = self._storage[item.storage_index]
                with outside():
                    target = planner.resolve_tensor(item).detach()
                source = opened.source(view)
                read_box(source, _box(item, source.shape, source.dtype, target))
                count_changes(distributed(planner, item.dest_index.fqn))
                with outside():
                    planner.commit_tensor(item, target)

    def _known_manifest(self) -> Manifest:
        """That of the last `read_metadata`: a plan is made for one save."""
        if self._manifest is None:
            self._manifest = read_manifest(self.path, self._moved)
        return self._manifest

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)


def _uuid_at(path: Path) -> str | None:
    """The id of the save that is at a path now; None where there is none to be trusted."""
    try:
        return read_manifest(path).uuid
    except (CorruptCheckpointError, IncompleteCheckpointError, OSError):
        return None


def _is_torchs(planner: LoadPlanner) -> bool:
    """Whether a planner takes values as torch's own does."""
    return getattr(type(planner), "load_bytes", None) is DefaultLoadPlanner.load_bytes


def _saved_over(path: Path) -> RuntimeError:
    return RuntimeError(
        f"{path} was saved over while it was being loaded, and what was loaded is of no use; load "
        "again, and save each step to a path of its own"
    )


def _box(item: ReadItem, whole: Shape, dtype: torch.dtype, target: torch.Tensor) -> BoxPicker:
    name = item.storage_index.fqn
    if tuple(target.shape) != tuple(item.lengths):
        raise ValueError(
            f"{name}: the planner gives a tensor of shape {tuple(target.shape)} for a box of "
            f"shape {tuple(item.lengths)}"
        )
    check_target(target, dtype, name)
    return BoxPicker(target, dtype, whole, tuple(item.storage_offsets))


def _committed(planner: LoadPlanner, item: ReadItem, target: torch.Tensor) -> Finish:
    return partial(carrying(planner.commit_tensor), item, target)
