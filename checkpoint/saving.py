"""`save` and `save_async`: from a state tree to a durable checkpoint."""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from aio import Engine
from checkpoint.collector import paused_collector
from checkpoint.commit import SavePlan, commit
from checkpoint.commit_ranks import commit_ranks, numbers_of, together
from checkpoint.coordinator import Coordinator, SingleProcess
from checkpoint.destination import Destination
from checkpoint.early import COPY_SLOT_BYTES, EarlyStage
from checkpoint.filling import Filler
from checkpoint.guard import Guard, check_guard, hold_back
from checkpoint.manifest import check_limits
from checkpoint.memory import KeptMemory, available_bytes, machine
from checkpoint.pending import PendingSave, begin, settle
from checkpoint.planning import FilePlan, StatePlan, plan_files, plan_state
from checkpoint.rank_planning import check_same_place, check_whole, plan_rank
from checkpoint.records import Manifest, SaveInfo
from checkpoint.sources import Source
from checkpoint.staging import LARGE_SLOT_BYTES, LARGE_SLOTS, plan_slots

STAGING_BYTES = 256 << 20
"""Host memory that a save or a load may take beyond the tensors themselves."""

PathLike = str | os.PathLike[str]


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

    A checkpoint that is there already stays whole until the new one takes its place at once. With
    `stripe_dirs` (which must exist, one per SSD) the data goes there, evenly by bytes. `engine` is
    used and left open; without one, an engine with a lane per stripe lives for the call.

    The tensors must not change during the call. Beyond them it takes `staging_bytes` of memory.

    With a `coordinator` (see `GroupCoordinator`) several ranks save one checkpoint together: every
    rank calls with a tree of the same names, that of rank 0 is kept. A tensor that all ranks have
    is taken to be the same on each, and written once, by all of them in parts; of a `PartialSource`
    every rank writes what it has. `stripe_dirs` may be others on each rank, where all ranks see
    them. If a rank fails or dies none of the checkpoint counts, and all raise.

    Raises TypeError naming the path of a leaf that cannot be saved and ValueError for a tree that
    holds itself, both before anything is touched; BlockingIOError if another save to the same
    path is running; OSError naming the file if writing fails, after removing all it had written;
    RankFailedError if another rank failed.
    """
    ranks = coordinator or SingleProcess()
    return save_after(0, state, path, stripe_dirs, engine, ranks, staging_bytes=staging_bytes)


def save_after(
    before: int,
    state: object,
    path: PathLike,
    stripe_dirs: Sequence[PathLike] | None,
    engine: Engine | None,
    ranks: Coordinator,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> SaveInfo:
    """`save`, of which the manifest says that it was later than `before` (nanoseconds since 1970),
    whatever the clock says.
    """
    started = time.perf_counter()
    ranks.begin()
    try:
        plan = plan_save(state, path, stripe_dirs, ranks, staging_bytes, before)
        _settle(plan.path, ranks)
        return _run(plan, engine, started, ranks)
    finally:
        ranks.end()


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
    until they have been read. Without one, the tensors are copied first and the call returns when
    they may change. The copy takes at most `staging_bytes` (default: what the state needs, but no
    more than half of the memory that is free); a larger state is copied in waves, behind the
    writing.

    An earlier background save to the same path is waited for. An error is raised by `result()`, or
    else by the next save, or logged at exit. The interpreter ends after the save does.

    Raises TypeError and ValueError as `save`, and TypeError for a guard that cannot wait.
    """
    return start_save(
        state,
        path,
        stripe_dirs,
        guard,
        engine,
        staging_bytes=staging_bytes,
        coordinator=coordinator,
    )


def start_save(
    state: object,
    path: PathLike,
    stripe_dirs: Sequence[PathLike] | None,
    guard: Guard | None,
    engine: Engine | None,
    *,
    staging_bytes: int | None = None,
    after: Callable[[], None] | None = None,
    memory: KeptMemory | None = None,
    on_committed: Callable[[Manifest], None] | None = None,
    coordinator: Coordinator | None = None,
    before: int = 0,
) -> PendingSave:
    """`save_async`, with something to do on its thread `after` it has succeeded, and with `memory`
    for its copies that is kept for the next one. `on_committed` is given the manifest of a save by
    one process. `before` is as in `save_after`.
    """
    started = time.perf_counter()
    if guard is not None:
        check_guard(guard)
    ranks = coordinator or SingleProcess()
    ranks.begin()
    early = None
    try:
        plan = plan_save(state, path, stripe_dirs, ranks, staging_bytes or STAGING_BYTES, before)
        sharing = _settle(plan.path, ranks)
        if guard is None:
            early = EarlyStage(plan.fillers, _budget(plan, staging_bytes, sharing), memory)
        else:
            plan = _with_large_slots(plan, staging_bytes or STAGING_BYTES)
    except BaseException:
        ranks.end()
        raise
    pending = begin(plan.path, after)
    if guard is not None:
        hold_back(guard, pending)

    def run() -> None:
        outcome: SaveInfo | BaseException
        try:
            outcome = _run(plan, engine, started, ranks, pending.set_staged, early, on_committed)
        except BaseException as error:
            outcome = error
        ranks.end()
        if early is not None:
            early.close()
        pending.finish(outcome)

    writing = threading.Thread(target=run, name="checkpoint-save")
    if early is None:
        writing.start()
        return pending
    if early.is_whole:
        # Nobody waits for the writing yet; it would take cores and bandwidth from the copy.
        try:
            early.copy()
        finally:
            writing.start()
    else:
        writing.start()
        early.copy()
    pending.set_staged()
    return pending


def _settle(path: Path, ranks: Coordinator) -> int:
    """`settle`; an error that one rank has not been told yet ends the save on all of them. Returns
    how many ranks are on this machine.
    """
    try:
        settle(path)
    except Exception as error:
        ranks.exchange(error)
        raise
    return ranks.exchange(machine()).count(machine())


def _budget(plan: SavePlan, staging_bytes: int | None, sharing: int) -> int:
    """Memory for a copy of the state: what was given, else what it needs if this rank's part of
    the memory that so many share has that much.
    """
    if staging_bytes is not None:
        return staging_bytes
    needed = sum(filler.plan.layout.nbytes + 2 * COPY_SLOT_BYTES for filler in plan.fillers)
    return min(needed, max(available_bytes() // 2 // sharing, STAGING_BYTES))


def _run(
    plan: SavePlan,
    engine: Engine | None,
    started: float,
    coordinator: Coordinator,
    on_staged: Callable[[], None] | None = None,
    early: EarlyStage | None = None,
    on_committed: Callable[[Manifest], None] | None = None,
) -> SaveInfo:
    with ExitStack() as stack:
        if engine is None:
            engine = stack.enter_context(Engine(lanes=plan.destination.num_stripes))
        if plan.ranks is None:
            manifest = commit(plan, engine, on_staged, early)
            if on_committed is not None:
                on_committed(manifest)
            numbers = numbers_of(manifest)
        else:
            numbers = commit_ranks(plan, engine, coordinator, on_staged, early)
    return SaveInfo(
        path=plan.path,
        uuid=plan.destination.uuid,
        **numbers,
        seconds=time.perf_counter() - started,
    )


@paused_collector()
def plan_save(
    state: object,
    path: PathLike,
    stripe_dirs: Sequence[PathLike] | None,
    coordinator: Coordinator,
    staging_bytes: int,
    before: int = 0,
) -> SavePlan:
    """Decides everything about a save and touches nothing; raises what `save` does before that."""
    saved = max(time.time_ns(), before + 1)
    if coordinator.world_size == 1:
        target, stripes, state_plan = _checked(state, path, stripe_dirs)
        check_whole(state_plan)
        uuid, weights = _new_uuid(target), [1.0] * max(len(stripes), 1)
        files = plan_files(state_plan, uuid=uuid, rank=0, weights=weights)
        sources = [state_plan.sources_of(file) for file in files]
        return _save_plan(
            Destination(target, uuid, stripes), state_plan, files, sources, staging_bytes, saved
        )
    found: list[tuple[Path, tuple[Path, ...], StatePlan]] = []

    def check() -> str:
        found.append(_checked(state, path, stripe_dirs))
        return found[0][0].name

    check_same_place(together(coordinator, check))
    target, stripes, state_plan = found[0]
    uuid = coordinator.broadcast(_new_uuid(target))
    ranks = plan_rank(state_plan, coordinator, uuid=uuid, stripes=stripes)
    destination = Destination(target, uuid, ranks.stripes, ranks.own)
    sources = [ranks.sources_of(file) for file in ranks.files]
    plan = _save_plan(destination, state_plan, ranks.files, sources, staging_bytes, saved)
    return replace(plan, ranks=ranks)


def _checked(
    state: object, path: PathLike, stripe_dirs: Sequence[PathLike] | None
) -> tuple[Path, tuple[Path, ...], StatePlan]:
    target = Path(path).resolve()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(
            errno.ENOTDIR, "a checkpoint is a directory, this is not", str(target)
        )
    stripes = stripe_paths(stripe_dirs)
    state_plan = plan_state(state)
    check_limits(state_plan.tree_text.encode("ascii"))
    return target, stripes, state_plan


def _save_plan(
    destination: Destination,
    state_plan: StatePlan,
    files: Sequence[FilePlan],
    sources: Sequence[Sequence[Source]],
    staging_bytes: int,
    saved: int,
) -> SavePlan:
    share = staging_bytes // len(files)
    return SavePlan(
        destination=destination,
        state=state_plan,
        fillers=tuple(Filler(file, own) for file, own in zip(files, sources, strict=True)),
        slots=tuple(plan_slots(file.layout.nbytes, share) for file in files),
        saved=saved,
    )


def _with_large_slots(plan: SavePlan, staging_bytes: int) -> SavePlan:
    share = staging_bytes // len(plan.fillers)
    slots = [
        plan_slots(filler.plan.layout.nbytes, share, LARGE_SLOTS, LARGE_SLOT_BYTES)
        for filler in plan.fillers
    ]
    return replace(plan, slots=tuple(slots))


def stripe_paths(stripe_dirs: Sequence[PathLike] | None) -> tuple[Path, ...]:
    """Checks the directories that are to take the data. Raises TypeError, ValueError, OSError."""
    if stripe_dirs is None:
        return ()
    if isinstance(stripe_dirs, str | os.PathLike):
        raise TypeError(f"stripe_dirs={stripe_dirs!r} is one path; give a list of directories")
    stripes = tuple(Path(stripe).resolve() for stripe in stripe_dirs)
    if len(set(stripes)) != len(stripes):
        raise ValueError(f"stripe_dirs names a directory twice: {[str(s) for s in stripes]}")
    for stripe in stripes:
        if not stripe.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "a stripe directory must exist", str(stripe))
    return stripes


def _new_uuid(target: Path) -> str:
    while (target / (uuid := secrets.token_hex(4))).exists():
        continue
    return uuid
