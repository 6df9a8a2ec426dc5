"""`load` and `list_tensors`: from a checkpoint back to a state tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from aio import Engine
from aio.errors import check_flag
from checkpoint.collector import paused_collector
from checkpoint.directory.destination import PathLike, checkpoint_path
from checkpoint.directory.locate import with_current_manifest
from checkpoint.directory.relocation import Relocation, StripeDirs, relocation
from checkpoint.format.records import Manifest
from checkpoint.format.tree import MISSING, DataNode, data_nodes, decode_tree, empty_tree
from checkpoint.known.damage import Read, damage_noted
from checkpoint.loading.attempts import Attempts
from checkpoint.loading.into import IntoPlan, count_whole_targets, plan_into
from checkpoint.loading.reading import TensorRead, read_tensors, read_while_assembling
from checkpoint.outside import entrance
from checkpoint.plan.selection import Selection
from checkpoint.plan.write_runs import STAGING_BYTES, check_staging_bytes
from checkpoint.sheltered import Cancellation, sheltered
from checkpoint.tensors.assembly import Assembler, converts, view_of
from checkpoint.tensors.parts import PartsTarget, Window, targets_of, windows_of
from checkpoint.tensors.targets import Target, takes_all
from checkpoint.transfer.cuda import copier_of_caller
from checkpoint.transfer.memory import check_engine
from checkpoint.transfer.reader import ReadOptions


@entrance
def load(
    path: PathLike,
    only: str | Sequence[str] | None = None,
    into: Any = None,
    map_location: str | torch.device | None = "cpu",
    verify: bool = True,
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    stripe_dirs: StripeDirs | None = None,
    engine: Engine | None = None,
    staging_bytes: int = STAGING_BYTES,
) -> Any:
    """Loads the state tree that was saved at `path`, equal in every type and value; scalars and
    dtypes of numpy come back as plain ones, without subclasses, alignment flags and metadata.

    `only`: shell patterns over the names of leaves; the tree then holds what matched, and lists
    close up over what did not. `into`: a tree whose tensors, arrays and byte sinks are written in
    place, found by their keys; it is returned, its other values replaced by the saved ones; what
    the checkpoint holds beyond it is not read (what is empty in it has to be so there). One tensor
    at several keys takes the value of the first of them that is asked for (and saved, if not
    `strict`); targets that overlap in another way hold the value of either where they do. A counter
    (`collections.Counter`) in `into` is one value. `map_location`: device of new tensors; None for
    the one that each was saved from. Arrays are in host memory. `verify=False` skips checksums.

    `dtype`: tensors of floating-point numbers come in this dtype, rounded as `Tensor.to` rounds,
    and those of `into` must have it; arrays, and all other tensors, come as they were saved.
    `strict=False`: what of `into` is empty, or the checkpoint lacks, stays as it is, and patterns
    may match nothing.

    `stripe_dirs`: where data on stripes are, if not where they were saved: directories that are
    searched for them first, or a mapping from each that moved to where it is now.

    Beyond the tensors themselves it takes `staging_bytes` of memory. Of views of a tensor that is
    not asked for itself, new tensors take the range of it from the first to the last of them. Into
    a live tensor a view whose elements lie apart (columns of a matrix) is copied out of memory for
    all of the tensor that it lies in, and so are views into a sink that are not row-major, and new
    views of another `dtype` bring all of theirs. `engine` is used and left open; without one, an
    engine with a lane per data file lives for the call.

    Raises FileNotFoundError for a missing path, IncompleteCheckpointError for one without manifest,
    CorruptCheckpointError naming file, tensor and extent for damage, ValueError for a pattern that
    matches nothing, for no pattern at all, for a device that is not there, for an `into` that does
    not fit or, however `strict`, has nothing of the checkpoint, and for a `dtype` that leaves which
    share memory cannot all have, OSError for what cannot be read, BlockingIOError where saves take
    its place all the time, or, with `strict=False`, one that lacks leaves of `into` that the one
    before had. After an error, or an interrupt, tensors of `into` may hold old and new values.
    """
    checkpoint = checkpoint_path(path)
    check_staging_bytes(staging_bytes)
    check_engine(engine)
    check_flag("verify", verify)
    check_flag("strict", strict)
    _check_dtype(dtype)
    moved = relocation(stripe_dirs)
    wanted = _Wanted(Selection(only, strict=strict), _device(map_location), dtype)
    is_inference = torch.is_inference_mode_enabled()
    attempts = into if isinstance(into, Attempts) else Attempts(into)
    copier = copier_of_caller(follows=True)
    options = ReadOptions(engine=engine, staging_bytes=staging_bytes, verify=verify, copier=copier)

    def work(cancellation: Cancellation) -> Any:
        own = replace(options, cancellation=cancellation)
        kind = _load_new if into is None else partial(_load_into, attempts=attempts)
        attempt = partial(kind, checkpoint=checkpoint, wanted=wanted, options=own)
        with closing(copier), torch.inference_mode(is_inference), copier.as_caller():
            return _noting_damage(checkpoint, attempt, moved)

    copier.finish_caller()
    return sheltered(work, "checkpoint-load")


def _noting_damage(checkpoint: Path, attempt: Callable[..., Any], moved: Relocation) -> Any:
    with damage_noted(checkpoint) as read:
        return with_current_manifest(checkpoint, read.by(partial(attempt, read=read)), moved)


def for_several(options: Mapping[str, Any]) -> dict[str, Any]:
    """`options` of `load` for several loads: of patterns and directories an iterator has a list,
    and `into` is one tree.
    """
    given = dict(options)
    for name in ("only", "stripe_dirs"):
        if isinstance(value := given.get(name), Iterator):
            given[name] = list(value)
    if given.get("into") is not None:
        given["into"] = Attempts(given["into"])
    return given


@entrance
def check_unmixed(options: Mapping[str, Any], damaged: Collection[Path]) -> None:
    """For `options` of several loads, of which the last one has loaded: raises for leaves of `into`
    that the others may have left values in, see `Attempts.check`.
    """
    into = options.get("into")
    if isinstance(into, Attempts) and not options.get("strict", True):
        into.check(damaged, options.get("only"))


def _device(map_location: str | torch.device | None) -> torch.device | None:
    """Of a device without a number, that of this thread: loads have threads of their own."""
    if map_location is None:
        return None
    try:
        device = torch.device(map_location)
        torch.empty(0, device=device)  # raises what the device's module does
    except TypeError as error:
        raise TypeError(
            f"map_location is a {type(map_location).__name__}, not a device; give one, or None for "
            "the device that each tensor was saved from"
        ) from error
    except (RuntimeError, AssertionError, ImportError) as error:
        raise ValueError(
            f"map_location={map_location!r} is no device of this machine: {error}"
        ) from error
    if device == torch.device("cuda"):
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype is a {type(dtype).__name__}; give one of torch's, or leave it out")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(
            f"dtype={dtype} is none of floating-point numbers; load without it, and convert then"
        )
    if dtype is not None and not converts(torch.float32, dtype):
        raise ValueError(f"torch does not convert numbers to dtype={dtype}; load without it")


def list_tensors(path: PathLike) -> list[str]:
    """Names of all tensors and arrays, in the order of the tree. Reads the manifest alone.

    Raises what `load` raises for a missing, incomplete or corrupt checkpoint.
    """
    checkpoint = checkpoint_path(path)
    return with_current_manifest(checkpoint, lambda manifest: list(data_nodes(manifest.tree)))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What of a checkpoint is asked for, and on which device and as what new tensors come."""

    selection: Selection
    device: torch.device | None
    dtype: torch.dtype | None

    def anew(self) -> _Wanted:
        """The same of another save, which is there by now."""
        return replace(self, selection=self.selection.anew())


def _load_new(
    manifest: Manifest, checkpoint: Path, wanted: _Wanted, options: ReadOptions, read: Read
) -> Any:
    wanted = wanted.anew()
    assemble = partial(_assemble, manifest, wanted)
    if wanted.selection.is_everything:
        tree = read_while_assembling(manifest, checkpoint, assemble, options)
        read.is_all = options.verify
        return tree
    tree, targets = assemble()
    reads = [TensorRead(index, target) for index, target in targets.items()]
    read_tensors(manifest, checkpoint, reads, options)
    read.is_all = options.verify and _are_all(reads, manifest)
    return tree


def _are_all(reads: Sequence[TensorRead], manifest: Manifest) -> bool:
    """Whether these are of all that is stored."""
    whole = {read.tensor for read in reads if takes_all(read.target)}
    return all(index in whole or not record.nbytes for index, record in enumerate(manifest.tensors))


@paused_collector()
def _assemble(manifest: Manifest, wanted: _Wanted) -> tuple[Any, dict[int, Target]]:
    """The tree that was asked for, its memory still to be filled, and what of it is to be read."""
    if not wanted.selection.is_everything:
        return _assemble_selected(manifest, wanted)
    assembler = Assembler(manifest, wanted.device, dtype=wanted.dtype)
    assembler.make_all()
    tree = decode_tree(manifest.tree, assembler.build)
    return tree, targets_of(manifest, assembler.tensors, {})


def _assemble_selected(manifest: Manifest, wanted: _Wanted) -> tuple[Any, dict[int, Target]]:
    # By order: keys that are not equal to themselves (NaN) would make no path to find a name by.
    nodes, selection = data_nodes(manifest.tree), wanted.selection
    names = iter(nodes)
    windows: dict[int, Window] = {}
    if wanted.dtype is None:
        places = (place for name, place in nodes.items() if selection.wants(name))
        windows = windows_of(manifest, (view_of(manifest, *place) for place in places))
    assembler = Assembler(manifest, wanted.device, windows, wanted.dtype)

    def data(path: tuple[object, ...], node: DataNode) -> Any:
        return assembler.build(path, node) if selection.wants(next(names)) else MISSING

    tree = decode_tree(manifest.tree, data, selection.wants)
    selection.check_matched()
    if tree is MISSING:
        tree = empty_tree(manifest.tree)
    return tree, targets_of(manifest, assembler.tensors, windows)


def _load_into(
    manifest: Manifest,
    checkpoint: Path,
    attempts: Attempts,
    wanted: _Wanted,
    options: ReadOptions,
    read: Read,
) -> Any:
    wanted = wanted.anew()
    selection, into = wanted.selection, attempts.into
    options = replace(options, begins=partial(attempts.begin, checkpoint, manifest))

    @paused_collector()
    def planned() -> IntoPlan:
        plan = plan_into(manifest, into, selection, wanted.dtype)
        selection.check_matched("into")
        return plan

    if selection.is_everything and count_whole_targets(into) == len(manifest.tensors):
        plan, rest = _read_while_planning(manifest, checkpoint, planned, options)
    else:
        plan = planned()
        rest = plan.reads
    if rest:
        read_tensors(manifest, checkpoint, rest, options)
    read.is_all = options.verify and _are_all(plan.reads, manifest)
    attempts.begin(checkpoint, manifest)
    if not selection.is_strict:
        attempts.check_same_place(checkpoint, manifest, selection)
    attempts.end()
    return plan.finish()


def _read_while_planning(
    manifest: Manifest, checkpoint: Path, planned: Callable[[], IntoPlan], options: ReadOptions
) -> tuple[IntoPlan, list[TensorRead]]:
    """Reads all that the checkpoint holds, beginning before it is known where it goes.

    Gives the plan, and of its reads those of tensors that others take too, and of parts of
    tensors, which remain.
    """
    rest: list[TensorRead] = []

    def assemble() -> tuple[IntoPlan, dict[int, Target]]:
        plan = planned()
        targets: dict[int, Target] = {}
        for read in plan.reads:
            is_part = isinstance(read.target, PartsTarget)
            if is_part or targets.setdefault(read.tensor, read.target) is not read.target:
                rest.append(read)
        return plan, targets

    return read_while_assembling(manifest, checkpoint, assemble, options), rest
