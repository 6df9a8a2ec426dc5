"""Plain safetensors shards with an index, as Hugging Face keeps models, of tensors or checkpoints.

The files hold the tensors one after the other, those of whole pages first and the others by item
size, and nothing else. They are written under temporary names and synced before any of them counts.

Invariant: one export at a time writes to a folder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from aio import Engine
from checkpoint.directory.destination import PathLike, checkpoint_path
from checkpoint.directory.files.attributes import Attributes
from checkpoint.directory.files.replacing import open_new
from checkpoint.directory.lock import Lock
from checkpoint.directory.relocation import StripeDirs, relocation
from checkpoint.format import elements
from checkpoint.format.datafile import ALIGNMENT, Entry, plan_packed_file
from checkpoint.format.names import METADATA_KEY, ROOT_NAME, natural_name
from checkpoint.format.tree import data_nodes
from checkpoint.interop.shard_folder import ShardFolder
from checkpoint.loading.opened import open_current
from checkpoint.plan.selection import Selection
from checkpoint.plan.state_plan import FilePlan
from checkpoint.plan.striping import Shard
from checkpoint.plan.write_runs import STAGING_BYTES, check_staging_bytes
from checkpoint.saving.rank_plan import check_held
from checkpoint.sheltered import Cancellation, sheltered
from checkpoint.tensors.assembly import array_dtype, view_of
from checkpoint.tensors.changes import Versions
from checkpoint.tensors.copiers import NO_DEVICES, Copier, begin_reading
from checkpoint.tensors.sources import Source, is_data_leaf, source_of
from checkpoint.transfer.cuda import copier_of_caller
from checkpoint.transfer.filling import Filler
from checkpoint.transfer.memory import staging_slab
from checkpoint.transfer.writer import FileJob, FillingSupply, Writer

MAX_SHARD_BYTES = 5_000_000_000
_THREAD = "checkpoint-export"
_REMEDY = "convert it, or leave it out"
_MOST_KEPT_BYTES = 256 << 20
"""Of checksum blocks: of a tensor that so many ranks saved in columns, one of each at once."""


def export_safetensors(
    path: PathLike,
    folder: PathLike,
    *,
    only: str | Sequence[str] | None = None,
    prefix: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
    stripe_dirs: StripeDirs | None = None,
) -> list[Path]:
    """Writes the tensors of a checkpoint to `folder` as Hugging Face shards; gives the files.

    `only` and `stripe_dirs` are as in `load`. `prefix` selects the names that begin with it and is
    taken off them: `prefix="model."` gives what the model itself calls its weights. Every byte is
    verified on the way.

    Raises what `load` and `write_safetensors` raise, TypeError for a prefix that is no
    str, ValueError if nothing is left to write.
    """
    checkpoint, target = checkpoint_path(path), checkpoint_path(folder, "folder")
    if not isinstance(prefix, str):
        raise TypeError(f"prefix={prefix!r} is no text; leave it out for all names")
    _check_shard_bytes(max_shard_bytes)
    selection = Selection(only)
    moved = relocation(stripe_dirs)

    def work(cancellation: Cancellation) -> list[Path]:
        with open_current(checkpoint, moved, most_kept_bytes=_MOST_KEPT_BYTES) as opened:
            manifest = opened.manifest
            sources = {}
            for name, (where, node) in data_nodes(manifest.tree).items():
                if selection.wants(name) and name.startswith(prefix):
                    source = opened.source(view_of(manifest, where, node))
                    _check_array(name, array_dtype(node))
                    sources[name.removeprefix(prefix)] = _source(name, source)
            selection.check_matched()
            if not sources:
                what = (
                    f"prefix={prefix!r} is the beginning of no name" if prefix else "no tensor is"
                )
                raise ValueError(f"{what} in {checkpoint}")
            sizes = max_shard_bytes, STAGING_BYTES
            return _write(sources, target, *sizes, NO_DEVICES, cancellation)

    return sheltered(work, _THREAD)


def write_safetensors(
    tensors: Mapping[str, Any],
    folder: PathLike,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    staging_bytes: int = STAGING_BYTES,
) -> list[Path]:
    """Writes tensors, arrays and byte sources to `folder` as Hugging Face shards; gives the files.

    The shards are `model-00001-of-00003.safetensors` and so on, or `model.safetensors` if one is
    enough, and `model.safetensors.index.json` says which holds what. A shard has at most
    `max_shard_bytes` of tensors behind its header, or a single one that is longer. Files of these
    names are replaced, and other files of an earlier export to this folder are removed, when the
    new ones are durable: the folder holds the old tensors or the new ones, to readers that go by
    the index and to those that take `model.safetensors` where it is, also if the process is killed.
    A file that takes the place of another one has its permissions, and its owner as far as that may
    be; a shard of a new name those that all have that it may have something of.
    Where the file system has no hard links, the index may then name files that are missing until
    the next export.

    Raises, before anything is written, TypeError for a value that cannot be saved, for one of a
    dtype that safetensors would not give back (complex128, uint4, an array of texts), for what is
    no path and for a size that is no int, ValueError for an empty path and a URL, for a size below
    1, for a source that does not have all of its bytes (`PartialSource`) and for a name that
    safetensors cannot hold (`__metadata__`, half a surrogate pair), IsADirectoryError for a
    directory where a file is to be, FileExistsError where there are several shards and a
    `model.safetensors` of somebody else, which readers would take instead, and BlockingIOError
    while another export to this folder runs: of several ranks, one makes it. Raises OSError naming
    the file, and ChangedTensorError naming a tensor that was changed meanwhile; the files of a call
    that fails before the new tensors count are removed, as they are after an interrupt, and so is
    a folder that was made for them.
    """
    target = checkpoint_path(folder, "folder")
    check_staging_bytes(staging_bytes)
    _check_shard_bytes(max_shard_bytes)
    _check_names(tensors)

    def sources_of(_: Cancellation) -> dict[str, Source]:
        return {name: _source(name, value) for name, value in tensors.items()}

    sources = sheltered(sources_of, _THREAD)  # modes of the caller's thread make tensors of theirs
    copier = copier_of_caller()
    begin_reading(copier, sources.values())

    def write(cancellation: Cancellation) -> list[Path]:
        with closing(copier):
            return _write(sources, target, max_shard_bytes, staging_bytes, copier, cancellation)

    return sheltered(write, _THREAD)


def _check_names(tensors: Any) -> None:
    """Raises TypeError or ValueError for a name that no reader of safetensors would give back."""
    if not isinstance(tensors, Mapping):
        does = callable(getattr(tensors, "state_dict", None))
        remedy = "give what its state_dict() returns" if does else "give a dict of tensors by name"
        raise TypeError(f"tensors is a {type(tensors).__name__}, not a mapping; {remedy}")
    for name in tensors:
        if not isinstance(name, str):
            raise TypeError(f"cannot write {name!r}: the name of a tensor is a string")
        if name == METADATA_KEY:
            raise ValueError(
                f"cannot write {name!r}: safetensors keeps this name for itself; give the tensor "
                "another one (of a checkpoint, export it with another prefix=)"
            )
        if natural_name((name,)) != (name or ROOT_NAME):
            raise ValueError(
                f"cannot write {name!r}: half of a surrogate pair is no text that files can hold"
            )


def _write(
    sources: Mapping[str, Source],
    folder: Path,
    max_shard_bytes: int,
    staging_bytes: int,
    copier: Copier,
    cancellation: Cancellation,
) -> list[Path]:
    _check_names(sources)
    shards = _plan_shards(sources, max_shard_bytes)
    shard_of = {name: number for number, names in enumerate(shards) for name in names}
    total_bytes = sum(source.nbytes for source in sources.values())
    versions = Versions(sources.items())
    lock = Lock(folder, make=True, by="export to this folder")
    with lock, _removing_made(lock):
        target = ShardFolder(folder, len(shards))
        try:
            with Engine() as engine:
                places = zip(target.temporaries, target.replaced, strict=True)
                for place, names in zip(places, shards, strict=True):
                    own = _in_order({name: sources[name] for name in names})
                    _write_shard(engine, place, own, staging_bytes, copier, cancellation)
            versions.check()
            versions.check_ended()
            cancellation.check()
            return target.publish({name: shard_of[name] for name in sources}, total_bytes)
        except BaseException:
            target.discard()
            raise


@contextmanager
def _removing_made(lock: Lock) -> Iterator[None]:
    """After an error, while the lock is had: another export may have it next."""
    try:
        yield
    except BaseException:
        lock.remove_made()
        raise


def _check_shard_bytes(max_shard_bytes: object) -> None:
    """Raises TypeError for what is no number of bytes, ValueError for one below 1."""
    if not isinstance(max_shard_bytes, int):
        raise TypeError(f"max_shard_bytes={max_shard_bytes!r} is no number of bytes; give an int")
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes={max_shard_bytes} is less than 1")


def _source(name: str, value: Any) -> Source:
    if not is_data_leaf(value):
        kind = type(value).__qualname__
        raise TypeError(
            f"cannot write {name!r}: a value of type {kind} is no tensor, array or byte source; "
            f"{getattr(type(value), 'instead_of_itself', 'leave it out')}"
        )
    try:
        source = source_of(value)
    except TypeError as error:
        raise TypeError(f"cannot write {name!r}: {error}") from error
    _check_array(name, value.dtype if isinstance(value, np.ndarray) else None)
    _check_element(name, source)
    check_held(name, source)
    return source


def _check_array(name: str, dtype: np.dtype[Any] | None) -> None:
    """Raises TypeError for an array that a file could hold as bytes only, which nobody could tell
    from bytes.
    """
    if dtype is not None and elements.of_numpy(dtype)[1]:
        raise TypeError(f"cannot write {name!r}: safetensors has no arrays of {dtype!r}; {_REMEDY}")


def _check_element(name: str, source: Source) -> None:
    """Raises TypeError for a dtype that would come back as another one."""
    element, remedy = source.element, _REMEDY
    if element.export_code is not None and (element.export_packed == 1 or source.shape):
        return
    what = f"{element.torch}" if source.shape else f"{element.torch} without dimensions"
    if element.torch.is_complex:
        remedy = f"write torch.complex64, or the pairs of torch.view_as_real; {remedy}"
    raise TypeError(f"cannot write {name!r}: safetensors has no tensors of {what}; {remedy}")


def _entry(name: str, source: Source) -> Entry:
    element, shape = source.element, source.shape
    assert element.export_code is not None, "`_check_element` has looked"
    if element.export_packed > 1:
        shape = (*shape[:-1], shape[-1] * element.export_packed)
    return Entry(name, element.export_code, shape, (0,) * len(shape), source.nbytes)


def _plan_shards(sources: Mapping[str, Source], max_shard_bytes: int) -> list[list[str]]:
    """Names by shard, in order; a new shard begins where the last one would grow too long."""
    shards: list[list[str]] = [[]]
    nbytes = 0
    for name, source in sources.items():
        if shards[-1] and nbytes + source.nbytes > max_shard_bytes:
            shards.append([])
            nbytes = 0
        shards[-1].append(name)
        nbytes += source.nbytes
    return shards


def _in_order(sources: Mapping[str, Source]) -> dict[str, Source]:
    """Those of whole pages first: each then begins at a page, where it is moved without a copy.
    Then the largest items first, as safetensors itself orders tensors: without gaps, each then
    begins at a multiple of its item size, so that no buffer ends within an element.
    """

    def place(item: tuple[str, Source]) -> tuple[bool, int]:
        source = item[1]
        return source.nbytes % ALIGNMENT != 0, -source.element.itemsize

    return dict(sorted(sources.items(), key=place))


def _write_shard(
    engine: Engine,
    place: tuple[Path, Attributes | None],
    sources: Mapping[str, Source],
    staging_bytes: int,
    copier: Copier,
    cancellation: Cancellation,
) -> None:
    entries = [_entry(name, source) for name, source in sources.items()]
    layout = plan_packed_file(entries, metadata={"format": "pt"})
    shards = [
        Shard(index, (0,) * len(source.shape), source.shape, 0, source.nbytes)
        for index, source in enumerate(sources.values())
    ]
    path, replaced = place
    with open_new(engine, path, layout.nbytes, replaced) as file:
        plan = FilePlan(0, tuple(shards), layout, tuple(sources))
        filler = Filler(plan, list(sources.values()), copier)
        slots = filler.slots(staging_bytes)
        with staging_slab(slots.count * slots.nbytes) as slab:
            supply = FillingSupply(filler, slots, slab)
            Writer(engine, [FileJob(supply, file, 0)], None, cancellation).run()
        file.sync()
