"""`save` and `save_async`: from a state tree to a durable checkpoint."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from aio import Engine
from checkpoint.collector import paused_collector
from checkpoint.directory.destination import (
    Destination,
    PathLike,
    checkpoint_path,
    new_uuid,
    stripe_paths,
)
from checkpoint.format.checksum import GRAIN_SIZES
from checkpoint.format.manifest import check_limits
from checkpoint.format.records import Manifest, SaveInfo
from checkpoint.known.elsewhere import note_told
from checkpoint.plan.state_plan import FilePlan, StatePlan, plan_files, plan_state
from checkpoint.plan.write_runs import (
    LARGE_SLOT_BYTES,
    LARGE_SLOTS,
    STAGING_BYTES,
    check_staging_bytes,
)
from checkpoint.ranks.coordinator import (
    Arrival,
    Coordinator,
    Operation,
    SingleProcess,
    accompanied,
    apart,
    ranks_of,
    together,
)
from checkpoint.saving.commit import SavePlan
from checkpoint.saving.guard import Guard, gate_of
from checkpoint.saving.pending import PendingSave
from checkpoint.saving.rank_plan import account_of, check_whole, plan_rank
from checkpoint.saving.running import Order, save_behind, save_now
from checkpoint.saving.unguarded import copied
from checkpoint.series import time_of_save
from checkpoint.sheltered import Cancellation
from checkpoint.tensors.copiers import NO_DEVICES, Copier, begin_reading
from checkpoint.tensors.sources import Source
from checkpoint.transfer.cuda import copier_of_caller
from checkpoint.transfer.filling import Filler
from checkpoint.transfer.memory import KeptMemory, available_bytes, check_engine
from checkpoint.transfer.snapshot import COPY_SLOT_BYTES, Snapshot

_MAX_NAME_BYTES = 246
"""File systems take 255; `<name>.<uuid>` is the directory on a stripe."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveRequest:
    """What is to be saved and where, and who takes part. See `save` and `save_async`; `previous` is
    a background save whose error this one raises. Parts of tensors can be read in grains of
    `least_grain_nbytes` or more: what is read as a whole, mostly, costs less with few of them. For
    the `arrival` see `accompanied`, in which a request is carried out.
    """

    state: object
    path: PathLike
    stripe_dirs: Sequence[PathLike] | None = None
    guard: Guard | None = None
    engine: Engine | None = None
    ranks: Coordinator = field(default_factory=SingleProcess)
    arrival: Arrival = field(default_factory=Arrival)
    staging_bytes: int | None = None
    previous: PendingSave | None = None
    least_grain_nbytes: int = GRAIN_SIZES[0]

    @property
    def memory_bytes(self) -> int:
        """For staging."""
        return STAGING_BYTES if self.staging_bytes is None else self.staging_bytes


def save(
    state: object,
    path: PathLike,
    stripe_dirs: Sequence[PathLike] | None = None,
    engine: Engine | None = None,
    *,
    staging_bytes: int = STAGING_BYTES,
    coordinator: Coordinator | None = None,
) -> SaveInfo:
    """Saves a state tree at `path`, a directory, and returns when it is durable.

    A checkpoint that is there already stays whole until the new one takes its place at once; files
    of the new one have the permissions of its manifest, and its owner as far as that may be. With
    `stripe_dirs` (which must exist, one per SSD) the data goes there, evenly by bytes. `engine` is
    used and left open; without one, an engine with a lane per stripe lives for the call.

    The tensors must not change during the call. If one does in a way that torch counts, is given
    other memory, or changes while it is written from where it lies, the save fails and the
    checkpoint before it stays; a change through numpy, `.data` or another library may go unnoticed
    otherwise. Beyond them it takes `staging_bytes` of memory.

    With a `coordinator` (see `GroupCoordinator`) several ranks save one checkpoint together: every
    rank calls with a tree of the same names, that of rank 0 is kept. A tensor that all ranks have
    is taken to be the same on each, and written once, by all of them in parts; of a `PartialSource`
    every rank writes what it has. `stripe_dirs` may be others on each rank, where all ranks see
    them. If a rank fails or dies none of the checkpoint counts, and all raise.

    Raises TypeError naming the path of a leaf that cannot be saved and ValueError for a tree that
    holds itself, both before anything is touched; BlockingIOError if another save to the same
    path is running; OSError naming the file if writing fails, after removing all it had written;
    ChangedTensorError naming a tensor that was changed; RankFailedError if another rank failed.

    An interrupt (KeyboardInterrupt, or what a handler of yours raises) stops the save and is raised
    when everything that it made is removed, or when it is done, if it had got so far. Another one
    meanwhile (Ctrl-C again, where a disk hangs) is raised at once; the removal goes on, and the
    next save of this process to the path waits for it, as the interpreter does at its end.
    """
    ranks = ranks_of(coordinator)

    def way(arrival: Arrival) -> SaveInfo:
        check_staging_bytes(staging_bytes)
        request = SaveRequest(
            state=state,
            path=path,
            stripe_dirs=stripe_dirs,
            engine=engine,
            ranks=ranks,
            arrival=arrival,
            staging_bytes=staging_bytes,
        )
        return save_on(request)

    return accompanied(ranks, Operation.SAVE, way)


def save_on(request: SaveRequest) -> SaveInfo:
    """`save`, on these ranks."""
    order = Order(
        path=_target(request),
        ranks=request.ranks,
        arrival=request.arrival,
        engine=request.engine,
        copier=copier_of_caller(),
        plan=partial(plan_save, request),
        previous=request.previous,
    )
    return save_now(order)


def _target(request: SaveRequest) -> Path:
    """Where to save to."""
    check_staging_bytes(request.memory_bytes)
    check_engine(request.engine)
    return checkpoint_path(request.path)


def save_async(
    state: object,
    path: PathLike,
    stripe_dirs: Sequence[PathLike] | None = None,
    guard: Guard | None = None,
    engine: Engine | None = None,
    *,
    staging_bytes: int | None = None,
    coordinator: Coordinator | None = None,
) -> PendingSave:
    """Saves a state tree in the background; see `save` for what and where.

    With `guard`, an optimizer, the call returns at once: bytes are read from the live tensors, with
    `staging_bytes` (default 256 MiB) of memory beside them, and the guard's next `step()` waits
    until they have been read. Tensors below 1 MiB that are no parameter or state of the guard, such
    as running averages, are copied during the call, beside `staging_bytes`, however many there are;
    a larger one must not change before the step does, and none of them be given other memory
    (`p.data = ...`, `module.to`, a resized storage)
    before `staged()`: ChangedTensorError. Without one, the tensors are copied first and the call
    returns when they may change. The copy takes at most `staging_bytes` (default: what the state
    needs, but no more than half of the memory that is free); a larger state is copied in waves,
    behind the writing.

    An earlier background save to the same path is waited for. An error is raised by `result()`, or
    else by the next save to the same path, or logged, when a save to another one begins or at
    exit. The interpreter ends after the save does. If an interrupt (Ctrl-C) ends the call the save
    is stopped, unless it has got so far that it is done.

    With a `coordinator` a save begins on every rank or on none. Where one rank cannot begin (a leaf
    that cannot be saved, no memory, an error of an earlier save) the call raises on every rank:
    there what is wrong, elsewhere RankFailedError. What fails later is raised by `result()`, on
    every rank too. A rank that is killed may be missed by the call on one and by `result()` on
    another.

    Raises TypeError and ValueError as `save`, and TypeError for a guard that cannot wait.
    """
    ranks = ranks_of(coordinator)

    def way(arrival: Arrival) -> PendingSave:
        request = SaveRequest(
            state=state,
            path=path,
            stripe_dirs=stripe_dirs,
            guard=guard,
            engine=engine,
            ranks=ranks,
            arrival=arrival,
            staging_bytes=staging_bytes,
        )
        return start_save(request)

    return accompanied(ranks, Operation.SAVE, way)


def start_save(
    request: SaveRequest,
    *,
    after: Callable[[], None] | None = None,
    memory: KeptMemory | None = None,
    on_committed: Callable[[Manifest], None] | None = None,
    on_begun: Callable[[PendingSave], None] = lambda _: None,
    when_read: Callable[[], None] = lambda: None,
    on_end: Callable[[BaseException | None], None] = lambda _: None,
) -> PendingSave:
    """`save_async`, with something to do on its thread `after` it has succeeded, and with `memory`
    for its copies that is kept for the next one. `on_committed` is given the manifest of a save by
    one process. `on_begun`, `when_read` and `on_end` are as in `Order`.
    """
    guard = request.guard

    def plan(cancellation: Cancellation, copier: Copier) -> SavePlan:
        planned = plan_save(request, cancellation, copier)
        return planned if guard is None else _with_large_slots(planned, request.memory_bytes)

    def snapshot(plan: SavePlan, num_here: int) -> Snapshot:
        return Snapshot(
            plan.fillers,
            _budget(plan, request.staging_bytes, num_here),
            memory,
            plan.versions.check,
            plan.cancellation,
        )

    order = Order(
        path=_target(request),
        ranks=request.ranks,
        arrival=request.arrival,
        engine=request.engine,
        copier=copier_of_caller(),
        plan=plan,
        snapshot=snapshot if guard is None else None,
        gate=None if guard is None else partial(gate_of, guard),
        previous=request.previous,
        on_committed=on_committed,
        on_begun=on_begun,
        when_read=when_read,
        on_end=on_end,
    )
    return save_behind(order, after)


def _budget(plan: SavePlan, staging_bytes: int | None, num_here: int) -> int:
    """Memory for a copy of the state: what was given, else what it needs if half of what is free
    has that much for each of so many, and two slots at least.
    """
    if staging_bytes is not None:
        return staging_bytes
    needed = sum(filler.plan.layout.nbytes + 2 * COPY_SLOT_BYTES for filler in plan.fillers)
    return min(needed, max(available_bytes() // 2 // num_here, 2 * COPY_SLOT_BYTES))


@paused_collector()
def plan_save(
    request: SaveRequest, cancellation: Cancellation, copier: Copier = NO_DEVICES
) -> SavePlan:
    """Decides everything about a save and touches nothing; raises what `save` does before that."""
    coordinator, staging_bytes = request.ranks, request.memory_bytes
    if coordinator.world_size == 1:
        target, stripes, state_plan = _checked(request, copier)
        check_whole(state_plan)
        uuid, weights = new_uuid(target), [1.0] * max(len(stripes), 1)
        saved = time_of_save(request.path, uuid)
        least = request.least_grain_nbytes
        files = plan_files(state_plan, uuid=uuid, rank=0, weights=weights, least_grain_nbytes=least)
        sources = [state_plan.sources_of(file) for file in files]
        return _save_plan(
            Destination(target, uuid, stripes),
            state_plan,
            files,
            sources,
            staging_bytes,
            saved,
            cancellation,
            copier,
        )
    found: list[tuple[Path, tuple[Path, ...], StatePlan, int]] = []
    is_first = coordinator.rank == 0

    def check() -> dict[str, Any]:
        target, stripes, state_plan = _checked(request, copier)
        uuid = new_uuid(target) if is_first else None
        saved = 0 if uuid is None else time_of_save(request.path, uuid)
        found.append((target, stripes, state_plan, saved))
        return account_of(state_plan, target, stripes, uuid)

    every = together(coordinator, check)
    others = [theirs for rank, theirs in enumerate(every) if rank != coordinator.rank]
    note_told(coordinator, (save for theirs in others for save in theirs["damaged"]))
    target, stripes, state_plan, saved = found[0]

    def decide() -> SavePlan:
        ranks = plan_rank(state_plan, every, coordinator.rank, stripes)
        destination = Destination(target, every[0]["uuid"], ranks.stripes, ranks.own)
        sources = [ranks.sources_of(file) for file in ranks.files]
        plan = _save_plan(
            *(destination, state_plan, ranks.files, sources),
            *(staging_bytes, saved, cancellation, copier),
        )
        return replace(plan, ranks=ranks)

    return apart(coordinator, decide)


def _checked(request: SaveRequest, copier: Copier) -> tuple[Path, tuple[Path, ...], StatePlan]:
    if request.guard is not None:
        gate_of(request.guard)  # raises for one that cannot wait
    target = checkpoint_path(request.path)
    _check_target(target)
    stripes = stripe_paths(request.stripe_dirs)
    if stripes:
        _check_name(target)
    state_plan = plan_state(request.state)
    begin_reading(copier, (tensor.source for tensor in state_plan.tensors))
    if request.guard is not None:
        state_plan = replace(state_plan, tensors=copied(state_plan.tensors, request.guard, copier))
    check_limits(state_plan.tree_text.encode("ascii"))
    return target, stripes, state_plan


def _check_target(target: Path) -> None:
    """Raises NotADirectoryError for what is no directory. It is looked at once: what a failed save
    made may just be removed, by another rank too.
    """
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISDIR(mode):
        raise NotADirectoryError(
            errno.ENOTDIR, "a checkpoint is a directory, this is not", str(target)
        )


def _save_plan(
    destination: Destination,
    state_plan: StatePlan,
    files: Sequence[FilePlan],
    sources: Sequence[Sequence[Source]],
    staging_bytes: int,
    saved: int,
    cancellation: Cancellation,
    copier: Copier,
) -> SavePlan:
    share = staging_bytes // len(files)
    fillers = [Filler(file, own, copier) for file, own in zip(files, sources, strict=True)]
    return SavePlan(
        destination=destination,
        state=state_plan,
        fillers=tuple(fillers),
        slots=tuple(filler.slots(share) for filler in fillers),
        saved=saved,
        versions=state_plan.versions(),
        cancellation=cancellation,
    )


def _with_large_slots(plan: SavePlan, staging_bytes: int) -> SavePlan:
    share = staging_bytes // len(plan.fillers)
    slots = [filler.slots(share, LARGE_SLOTS, LARGE_SLOT_BYTES) for filler in plan.fillers]
    return replace(plan, slots=tuple(slots))


def _check_name(target: Path) -> None:
    """Raises OSError for a name that leaves no room for the id of a save behind it."""
    if len(os.fsencode(target.name)) > _MAX_NAME_BYTES:
        what = f"with stripes a name has at most {_MAX_NAME_BYTES} bytes"
        raise OSError(errno.ENAMETOOLONG, what, str(target))
