"""`save`: from a state tree to a durable checkpoint."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from aio import Engine
from checkpoint.commit import SavePlan, commit
from checkpoint.coordinator import Coordinator, SingleProcess
from checkpoint.manifest import check_limits
from checkpoint.planning import plan_files, plan_state

STAGING_BYTES = 256 << 20
"""Host memory that a save or a load may take beyond the tensors themselves."""

PathLike = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SaveInfo:
    """What a finished save did. `nbytes` are the tensors' bytes, `file_nbytes` the data files'."""

    path: Path
    uuid: str
    nbytes: int
    file_nbytes: int
    num_tensors: int
    num_files: int
    seconds: float


def save(
    state: object,
    path: PathLike,
    stripe_dirs: Sequence[PathLike] | None = None,
    engine: Engine | None = None,
    *,
    staging_bytes: int = STAGING_BYTES,
) -> SaveInfo:
    """Saves a state tree at `path`, a directory, and returns when it is durable.

    A checkpoint that is there already stays whole until the new one takes its place at once. With
    `stripe_dirs` (which must exist, one per SSD) the data goes there, evenly by bytes. `engine` is
    used and left open; without one, an engine with a lane per stripe lives for the call.

    The tensors must not change during the call. Beyond them it takes `staging_bytes` of memory.

    Raises TypeError naming the path of a leaf that cannot be saved and ValueError for a tree that
    holds itself, both before anything is touched; BlockingIOError if another save to the same
    path is running; OSError naming the file if writing fails, after removing all it had written.
    """
    started = time.perf_counter()
    plan = plan_save(state, path, stripe_dirs, SingleProcess(), staging_bytes)
    with ExitStack() as stack:
        if engine is None:
            engine = stack.enter_context(Engine(lanes=max(len(plan.stripes), 1)))
        manifest = commit(plan, engine, SingleProcess())
    return SaveInfo(
        path=plan.path,
        uuid=manifest.uuid,
        nbytes=manifest.nbytes,
        file_nbytes=sum(file.nbytes for file in manifest.files),
        num_tensors=len(manifest.tensors),
        num_files=len(manifest.files),
        seconds=time.perf_counter() - started,
    )


def plan_save(
    state: object,
    path: PathLike,
    stripe_dirs: Sequence[PathLike] | None,
    coordinator: Coordinator,
    staging_bytes: int,
) -> SavePlan:
    """Decides everything about a save and touches nothing; raises what `save` does before that."""
    target = Path(path).resolve()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(20, "a checkpoint is a directory, this is not", str(target))
    stripes = _stripes(stripe_dirs)
    state_plan = plan_state(state)
    check_limits(state_plan.tree_text.encode("ascii"))
    uuid = coordinator.broadcast(_new_uuid(target))
    weights = [1.0] * max(len(stripes), 1)
    files = plan_files(state_plan, uuid=uuid, rank=coordinator.rank, weights=weights)
    return SavePlan(target, uuid, stripes, state_plan, tuple(files), staging_bytes)


def _stripes(stripe_dirs: Sequence[PathLike] | None) -> tuple[Path, ...]:
    if stripe_dirs is None:
        return ()
    if isinstance(stripe_dirs, str | os.PathLike):
        raise TypeError(f"stripe_dirs={stripe_dirs!r} is one path; give a list of directories")
    stripes = tuple(Path(stripe).resolve() for stripe in stripe_dirs)
    if len(set(stripes)) != len(stripes):
        raise ValueError(f"stripe_dirs names a directory twice: {[str(s) for s in stripes]}")
    for stripe in stripes:
        if not stripe.is_dir():
            raise NotADirectoryError(20, "a stripe directory must exist", str(stripe))
    return stripes


def _new_uuid(target: Path) -> str:
    while (target / (uuid := secrets.token_hex(4))).exists():
        continue
    return uuid
