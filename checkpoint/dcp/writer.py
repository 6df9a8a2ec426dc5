"""The storage writer of DCP: each hook takes its stages of the order in `checkpoint.saving.commit`.

Rank 0 makes the directories when it sees the plans of all, every rank writes and syncs its files,
and rank 0 publishes the manifest in `finish`. The directory of the checkpoint is locked in between.
"""

from __future__ import annotations

import errno
import math
import os
import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from aio import sync_directory
from checkpoint.dcp.items import Items
from checkpoint.dcp.staging import Staging
from checkpoint.dcp.tree import build_tree
from checkpoint.directory.destination import (
    Destination,
    PathLike,
    checkpoint_path,
    new_uuid,
    stripe_paths,
)
from checkpoint.directory.generations import generations
from checkpoint.directory.locate import read_manifest
from checkpoint.directory.lock import end_given_up
from checkpoint.errors import IncompleteCheckpointError
from checkpoint.format.manifest import encode_manifest
from checkpoint.known.damage import damage_to_tell
from checkpoint.known.elsewhere import note_told
from checkpoint.plan.readable import check_files, check_tree
from checkpoint.plan.write_runs import STAGING_BYTES, check_staging_bytes
from checkpoint.saving.entries import manifest_of
from checkpoint.saving.generation import Generation
from checkpoint.series import time_of_save
from checkpoint.sheltered import sheltered
from checkpoint.transfer.cuda import copier_of_caller


@dataclass(slots=True)
class _Order:
    """What rank 0 tells every rank: the save's id, the rank's number, how many stripes it has, and
    bytes of the tensors of all ranks.

    A planner that keeps plans gives an order of an earlier save back, which `is_used` then.
    """

    uuid: str
    rank: int
    num_stripes: int
    state_nbytes: int
    is_used: bool = False


@dataclass(frozen=True, slots=True)
class _Told:
    """Ids of saves of which a rank knows damage, which it tells rank 0 with its plan, and with what
    it wrote: a planner that keeps plans leaves those out. It has a name of its own.
    """

    rank_name: str
    damaged: frozenset[str]


class _Ranks:
    """Those of the last save by DCP, whichever group they were of."""


_ranks = _Ranks()
_THREAD = "checkpoint-dcp"


_SAVE = "save"
_here = threading.local()


class _Place(NamedTuple):
    """A path without links, and what was given for it: the name of a link may be that of a step."""

    path: Path
    given: PathLike

    @classmethod
    def of(cls, given: PathLike, name: str) -> _Place:
        """Raises as `checkpoint_path`."""
        return cls(checkpoint_path(given, name), Path(given).absolute())


def _asked_here() -> WeakKeyDictionary[StorageWriter, _Place]:
    """The paths that this thread gave to writers: DCP resets a writer for each save."""
    if not hasattr(_here, "asked"):
        _here.asked = WeakKeyDictionary()
    asked: WeakKeyDictionary[StorageWriter, _Place] = _here.asked
    return asked


def _num_ranks() -> int:
    distributed = torch.distributed
    return distributed.get_world_size() if distributed.is_initialized() else 1


def _tensor_bytes(plan: SavePlan) -> int:
    """Bytes of the parts of tensors that a rank is to write."""
    datas = (item.tensor_data for item in plan.items)
    return sum(
        math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
        for data in datas
        if data is not None
    )


class _Save:
    """One save of rank 0, from its plan to its end."""

    def __init__(self, destination: Destination, given: PathLike) -> None:
        self.destination = destination
        self.given = given
        self.told: list[Any] = []
        """By rank, with its plan."""
        self.generation = Generation(destination)
        self._thread = threading.current_thread()

    def is_over(self) -> bool:
        """DCP saves from one thread, which is elsewhere or gone when it has given a save up."""
        return self._thread is threading.current_thread() or not self._thread.is_alive()

    def end_if_given_up(self) -> None:
        if self.is_over():
            self.generation.end()

    def begin(self) -> None:
        """Locks the checkpoint and makes the directories."""
        self.generation.claim(self)
        self.generation.make()
        for directory in self.generation.unsynced:
            sync_directory(directory)


class StorageWriter(TorchStorageWriter, Staging):
    """Writes what `torch.distributed.checkpoint.save` and `async_save` give it.

    `path` and `stripe_dirs` are as in `checkpoint.save`, the same on every rank and on file systems
    that all ranks see. A checkpoint at `path` stays whole until the new one takes its place.

    DCP does not tell a writer that it gave a save up because another rank failed. What that save
    made and its lock, which keeps other processes from saving to `path`, go with the next save of
    the same thread to `path` or by this writer, or with `reset` there. Another thread (that of
    `async_save`, behind a `save`) is refused as long as that one goes on, for it may be saving
    still: call `reset` where the save failed. When nobody has the writer any more, and cycles in
    which DCP has it are collected, the lock goes, and what was made with the next save to `path`,
    of whichever process.
    """

    def __init__(
        self,
        path: PathLike,
        stripe_dirs: Sequence[PathLike] | None = None,
        *,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        super().__init__()
        self._place = _Place.of(path, "path")
        self._stripes = stripe_paths(stripe_dirs)
        check_staging_bytes(staging_bytes)
        self._staging_bytes = staging_bytes
        self._save_id = secrets.token_hex(8)
        self._running: dict[str, _Save] = {}
        """The save of rank 0 that runs, if one does: `setdefault` lets one thread begin."""

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        save = self._save()
        if save is not None and save.is_over():
            self._end(save)
        if checkpoint_id is not None:
            self._place = _Place.of(checkpoint_id, "checkpoint_id")
            _asked_here()[self] = self._place
        self._save_id = secrets.token_hex(8)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing is made before all plans are known. Raises ValueError for ranks that do not talk
        to each other: a checkpoint is committed by one of them.
        """
        _asked_here().setdefault(self, self._place)
        if not kwargs.get("use_collectives", True) and _num_ranks() > 1:
            raise ValueError(
                "use_collectives=False of torch.distributed.checkpoint.save makes a checkpoint of "
                "each rank, which a StorageWriter does not: leave it out, or save to a path for "
                "each rank with no_dist=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return replace(plan, storage_data=self._told())

    def _told(self) -> _Told:
        return _Told(self._save_id, frozenset(damage_to_tell()))

    def _note_told(self, told: Iterable[_Told]) -> None:
        """Of the other ranks: what this one knows itself is sound as soon as it has read that."""
        others = [one.damaged for one in told if one.rank_name != self._save_id]
        note_told(_ranks, frozenset().union(*others))

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Rank 0 locks the checkpoint and makes the directories.

        Raises OSError; BlockingIOError while another save to this checkpoint is running.
        """
        path, given = self._place_here()
        destination = Destination(path, new_uuid(path), self._stripes)
        save = self._claim(_Save(destination, given))
        try:
            end_given_up(destination.path)
            sheltered(lambda _: save.begin(), _THREAD)
        except BaseException:
            self._give_up(save)
            raise
        save.told = [plan.storage_data for plan in plans]
        nbytes = sum(_tensor_bytes(plan) for plan in plans)
        return [
            replace(plan, storage_data=_Order(destination.uuid, rank, len(self._stripes), nbytes))
            for rank, plan in enumerate(plans)
        ]

    def _save(self) -> _Save | None:
        return self._running.get(_SAVE)

    def _own_save(self) -> _Save | None:
        """The save that this thread runs, if it is rank 0's."""
        save = self._save()
        return save if save is not None and save.is_over() else None

    def _claim(self, save: _Save) -> _Save:
        """Makes `save` the one that runs. One that DCP gave up, because another rank failed, ends:
        it tells no writer. Raises BlockingIOError naming its path if another one runs.
        """
        while (running := self._running.setdefault(_SAVE, save)) is not save:
            if not running.is_over():
                raise BlockingIOError(
                    errno.EAGAIN,
                    "this StorageWriter is still saving there; wait for that, or make a writer for "
                    "each save; if that save has failed, call reset() of the writer in the thread "
                    "that called it",
                    str(running.destination.path),
                )
            self._end(running)
        return save

    @property
    def path(self) -> Path:
        """Where the next save goes."""
        return self._place.path

    def _place_here(self) -> _Place:
        """Where this thread saves to; another one may have given the writer another path since."""
        return _asked_here().get(self, self._place)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Every rank writes its items and makes them durable. Raises OSError naming the file, and
        ValueError where this rank was given other stripes than rank 0.
        """
        order: _Order = plan.storage_data
        save = self._own_save()
        try:
            if len(self._stripes) != order.num_stripes:
                raise ValueError(
                    f"rank {order.rank} has {len(self._stripes)} stripe_dirs, rank 0 has "
                    f"{order.num_stripes}; give every rank the same"
                )
            uuid = self._uuid_of(order)
            destination = Destination(self._place_here().path, uuid, self._stripes)
            items = Items(plan.items, planner)
            copier = copier_of_caller()
            items.begin_reading(copier)
            numbers = order.rank, self._staging_bytes, order.state_nbytes
            written = sheltered(partial(items.write, destination, *numbers, copier), _THREAD)
        except BaseException:
            if save is not None:
                self._give_up(save)
            raise
        told = self._told()
        # One result of a rank carries what all of them would say.
        future: Future[list[WriteResult]] = Future()
        future.set_result(
            [
                WriteResult(item.index, nbytes, (written, told) if number == 0 else None)
                for number, (item, nbytes) in enumerate(zip(plan.items, items.sizes, strict=True))
            ]
        )
        return future

    def _uuid_of(self, order: _Order) -> str:
        """The id of the save that runs, which the order of a kept plan does not have."""
        save, path = self._own_save(), self._place_here().path
        if save is not None:
            return save.destination.uuid
        if not order.is_used and (path / order.uuid).is_dir():
            order.is_used = True
            return order.uuid
        try:
            published = read_manifest(path).uuid
        except IncompleteCheckpointError:
            published = None
        running = [uuid for uuid in generations(path) if uuid != published]
        if len(running) != 1:
            raise RuntimeError(
                f"{path} has {len(running)} saves that are not finished, and the plan that "
                "the planner kept does not say which one this is; save without "
                "enable_plan_caching, and on a file system that all ranks see"
            )
        return running[0]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Rank 0 makes the checkpoint exist. Raises OSError naming the file."""
        save = self._own_save()
        if save is None:
            raise RuntimeError("finish() without prepare_global_plan(): not the coordinator")
        try:
            written = [rank[0].storage_data[0] for rank in results if rank]
            told = [
                rank[0].storage_data[1] if rank else one
                for rank, one in zip(results, save.told, strict=True)
            ]
            destination = save.destination
            names = metadata.state_dict_metadata
            tree_of = partial(build_tree, paths=metadata.planner_data)
            saved = time_of_save(save.given, destination.uuid)
            manifest = manifest_of(
                destination, written, names, tree_of, world_size=len(results), saved=saved
            )
            check_tree(manifest.tree, manifest.tensors, manifest.storages)
            check_files(manifest, destination.path)
            raw = encode_manifest(manifest)
            sheltered(lambda _: save.generation.publish(raw), _THREAD)
            if len(told) > 1:
                self._note_told(one for one in told if isinstance(one, _Told))
        finally:
            self._give_up(save)

    def _give_up(self, save: _Save) -> None:
        sheltered(lambda _: self._end(save), _THREAD)

    def _end(self, save: _Save) -> None:
        save.generation.end()
        if self._save() is save:
            del self._running[_SAVE]

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self._place_here().path), save_id=self._save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return "://" not in os.fspath(checkpoint_id)
