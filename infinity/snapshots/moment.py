"""The moment that a snapshot is of: what is kept of it, and what is to be saved.

From when its extents are pinned they stay as they are. What host memory has stays until the next
step: that is held back until it has been read, or it is read while the caller waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aio import AioError
from aio.errors import advise
from checkpoint import ChangedTensorError
from infinity.snapshots.entries import Entry, Point
from infinity.snapshots.sources import contents_of, model_of, tree_of
from infinity.values.persistence import TrainingState
from swap.snapshots.contents import encode
from swap.snapshots.folders import Folders, check_length
from swap.snapshots.sums import encode_sums
from swap.storage.extents import Extent
from swap.tiered import TieredState


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of now as the tree of a snapshot, to which ``pinned`` adds where extents are.

    ``since`` is what ``state.num_changes`` has to be still when something of it was read.
    """

    training: TrainingState
    name: str
    model: str
    step: int
    since: int
    tree: dict[str, Any]


def moment_of(training: TrainingState, name: str, extra: Any, *, copies: bool) -> Moment:
    """``copies`` are made of what a forward pass or the caller may change: buffers, extra state of
    modules, and ``extra``.
    """
    since = training.state.num_changes
    training.state.finish_step()  # one that another thread has begun by now
    return Moment(
        training=training,
        name=name,
        model=model_of(training),
        step=max(training.steps, default=0),
        since=since,
        tree=tree_of(training, extra, since, copies=copies),
    )


def pinned(moment: Moment, points: Path, number: int) -> Entry:
    """Pin what is on NVMe. Raises ``ChangedTensorError`` where another thread took a step; nothing
    stays pinned then.
    """
    state = moment.training.state
    published = state.components.pin_all()
    extents = [extent for extent in published.values() if extent is not None]
    try:
        if moment.since != state.num_changes:  # what is ahead of a step changes nothing at home
            raise ChangedTensorError(f"the state of snapshot {moment.name}")
        contents = contents_of(state, published)
        point = Point(
            name=moment.name,
            number=number,
            model=moment.model,
            time_ns=time.time_ns(),
            step=moment.step,
            kept_bytes=contents.nbytes,
        )
        moment.tree.update(point=point.to_tree(), contents=encode(contents))
        moment.tree.update(_sums(state, extents))
        return Entry(points / moment.name, point, contents, extents)
    except BaseException:
        if state.extents is not None:
            state.extents.unpin(extents)
        raise


def _sums(state: TieredState, extents: list[Extent]) -> dict[str, Any]:
    if state.extents is None or not state.extents.transfers.verifies:
        return {}
    transfers = state.extents.transfers
    known = (sums for extent in extents for sums in transfers.sums(extent))
    return {"sums": {"blocks": encode_sums(known)}}


def keep_files(folders: Folders, state: TieredState, entry: Entry) -> None:
    """Let the swap files that a snapshot needs outlive the process, durably, with what was written
    to them. Raises ``OSError``, also for one that somebody has cut short.
    """
    needed = entry.contents.by_file
    files = [] if state.extents is None else state.extents.own_files(entry.pinned)
    folders.keep(file.path for file in files)
    for file in files:
        try:
            file.sync()
        except AioError as error:
            advise(error, _UNSYNCED)
            raise
        check_length(file.path, file.size(), needed.get(file.path.parent.name, ()))


_UNSYNCED = (
    "nor can a later snapshot of this block be durable: use offloaded.save(path), and leave the "
    "block for another one on disks that work"
)
"""The kernel tells once that it has lost pages, of whichever write."""
