"""Finding what is on disk: manifests, data files, and what saves that never finished left."""

from __future__ import annotations

import errno
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar

import aio
from aio.process.absence import is_there, status_of
from checkpoint.directory.relocation import AS_SAVED, Relocation
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.manifest import FORMAT, MANIFEST_NAME, MAX_MANIFEST_BYTES, decode_manifest
from checkpoint.format.records import FileRecord, Manifest

T = TypeVar("T")
_HEAD_BYTES = 4096
_SECTOR_BYTES = 512
"""The least that a disk loses."""
_ZIP = b"PK\x03\x04"
_STEP = re.compile(r"step-[0-9]+")
_MAX_RETRIES = 20
"""Saves in a row that may each take the place of the checkpoint between a look at its manifest and
the opening of its files. On a busy machine a few of them did."""
_SAVED = re.compile(rb'^"saved":([0-9]{1,19}),$', re.MULTILINE)
_UUID = re.compile(rb'"uuid":"([0-9a-f]{1,64})"')
_in_doubt: dict[tuple[int, int], None] = {}
"""Manifests, by device and inode number, that this process could not read, or found damaged, when
it read them last."""
_MOST_IN_DOUBT = 10_000


def read_manifest(checkpoint: Path, moved: Relocation = AS_SAVED) -> Manifest:
    """Reads and checks the manifest of the checkpoint at a path; its files are where `moved` says.

    Raises FileNotFoundError if the path is missing, NotADirectoryError if it is a file,
    IncompleteCheckpointError if it holds no manifest, CorruptCheckpointError if the manifest is not
    to be trusted, other OSErrors as they come.
    """
    try:
        manifest = _read_manifest(checkpoint)
    except (OSError, CorruptCheckpointError):
        if (place := _place_of_manifest(checkpoint)) is not None:
            _in_doubt[place] = None
            for oldest in list(_in_doubt)[:-_MOST_IN_DOUBT]:  # a copy: other threads read, too
                _in_doubt.pop(oldest, None)
        raise
    if _in_doubt and (place := _place_of_manifest(checkpoint)) is not None:
        _in_doubt.pop(place, None)
    return moved.apply(manifest)


def is_in_doubt(manifest: tuple[int, int]) -> bool:
    """Whether the manifest of this device and inode number could not be read, or was damaged, when
    anything of this process read it last: what was known of it before says nothing any more, be the
    file the same or not.
    """
    return manifest in _in_doubt


def _place_of_manifest(checkpoint: Path) -> tuple[int, int] | None:
    try:
        status = (checkpoint / MANIFEST_NAME).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _read_manifest(checkpoint: Path) -> Manifest:
    path = checkpoint / MANIFEST_NAME
    try:
        raw = _read_regular_file(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        if not is_there(checkpoint):
            raise FileNotFoundError(
                errno.ENOENT, "there is no checkpoint", str(checkpoint)
            ) from None
        if path.is_symlink():  # to what may be there again: a disk that is not mounted
            raise CorruptCheckpointError("is a link to what is not there", path=path) from None
        raise IncompleteCheckpointError(
            f"{checkpoint} holds no {MANIFEST_NAME}: {_instead(checkpoint)}"
        ) from None
    except NotADirectoryError:
        what = f"a checkpoint is a directory, and this is {_kind_of_file(checkpoint)}"
        raise NotADirectoryError(errno.ENOTDIR, what, str(checkpoint)) from None
    return decode_manifest(raw, path)


def _instead(folder: Path) -> str:
    """What a folder without a manifest may be."""
    try:
        names = [entry.name for entry in folder.iterdir()]
    except OSError:
        names = []
    if ".metadata" in names:
        return "it is a checkpoint of torch.distributed.checkpoint; load it with that"
    if (folder.parent / MANIFEST_NAME).exists():
        return f"it has data of the checkpoint {folder.parent}; give that path"
    if any(name.endswith(".safetensors") for name in names):
        return (
            "it is a folder of safetensors files; read them with safetensors.torch.load_file, or "
            "give it to infinity.offload as weights="
        )
    if any(_STEP.fullmatch(name) for name in names):
        return "it is the root of a Manager; use Manager(path).load(), or give the path of a step"
    return "no save to it has finished"


def _kind_of_file(path: Path) -> str:
    """What a file may be that is given for a checkpoint."""
    if path.name == MANIFEST_NAME:
        return f"a manifest; give the directory that it is in, {path.parent}"
    if path.suffix == ".safetensors":
        return "a safetensors file; read it with safetensors.torch.load_file"
    with open_regular_file(path) as (file, _):
        head = file.read(len(_ZIP))
    if head == _ZIP:
        return "a zip file, as torch.save makes them; read it with torch.load"
    return "a file"


def with_current_manifest(
    checkpoint: Path, attempt: Callable[[Manifest], T], moved: Relocation = AS_SAVED
) -> T:
    """What `attempt` gives for the manifest; it is read again, and tried again, if a save took the
    checkpoint's place, and its files, meanwhile. Raises BlockingIOError if that goes on.
    """
    manifest = read_manifest(checkpoint, moved)
    for remaining in reversed(range(_MAX_RETRIES)):
        try:
            return attempt(manifest)
        except (CorruptCheckpointError, FileNotFoundError) as error:
            newer = read_manifest(checkpoint, moved)
            if newer.uuid != manifest.uuid:
                if not remaining:
                    what = f"was saved over {_MAX_RETRIES} times before it could be read"
                    raise BlockingIOError(errno.EAGAIN, what, str(checkpoint)) from error
                manifest = newer
            elif isinstance(error, CorruptCheckpointError) and error.path is None:
                raise error.in_file(checkpoint / MANIFEST_NAME) from error
            elif isinstance(error, FileNotFoundError):
                _check_none_of(manifest, checkpoint, error)
                raise
            else:
                raise
    raise AssertionError("the last attempt returns or raises")


def _check_none_of(manifest: Manifest, checkpoint: Path, error: FileNotFoundError) -> None:
    """Raises CorruptCheckpointError for a data file that is missing where its manifest is there: it
    went between a look at it and its opening. What is removed loses its manifest first.
    """
    for file in manifest.files:
        if str(path := manifest.file_path(checkpoint, file)) == error.filename:
            raise CorruptCheckpointError(_missing(file), path=path) from error


def check_still_there(manifest: Manifest, checkpoint: Path) -> None:
    """Raises FileNotFoundError where another save than that of a manifest, or none, is at a path by
    now: what is missing went with it, and is no damage.
    """
    try:
        found = read_manifest(checkpoint).uuid
    except (FileNotFoundError, NotADirectoryError, IncompleteCheckpointError):
        raise replaced(manifest.uuid, None, checkpoint) from None
    except (OSError, CorruptCheckpointError):
        return
    if found != manifest.uuid:
        raise replaced(manifest.uuid, found, checkpoint)


def replaced(uuid: str, by: str | None, checkpoint: Path) -> FileNotFoundError:
    """The error of a save that was opened and is not there any more, but perhaps another."""
    what = f"save {uuid}, which was opened, is not there any more"
    if by is not None:
        what = (
            f"save {uuid}, which was opened, has been replaced by {by}; open the checkpoint again"
        )
    return FileNotFoundError(errno.ENOENT, what, str(checkpoint))


def peek_saved(checkpoint: Path) -> int | None:
    """When the checkpoint at a path was saved, from the beginning of its manifest, unchecked.

    None where nothing of the kind can be read.
    """
    try:
        with open_regular_file(checkpoint / MANIFEST_NAME) as (file, _):
            match = _SAVED.search(file.read(_HEAD_BYTES))
    except (OSError, CorruptCheckpointError):
        return None
    return None if match is None else int(match[1])


def peek_uuid(checkpoint: Path) -> str | None:
    """The id of the save at a path, from the beginning of its manifest, unchecked.

    None where nothing of the kind can be read.
    """
    try:
        match = _UUID.search(read_head(checkpoint / MANIFEST_NAME))
    except (OSError, CorruptCheckpointError):
        return None
    return None if match is None else match[1].decode()


def _read_regular_file(path: Path, limit: int) -> bytes:
    with open_regular_file(path) as (file, nbytes):
        if nbytes > limit:
            raise CorruptCheckpointError(
                f"{nbytes} bytes, more than the {limit} that a manifest may have", path=path
            )
        return file.read(nbytes + 1)  # not the limit: so much memory is asked for at once


@contextmanager
def open_regular_file(path: Path, *, follow: bool = True) -> Iterator[tuple[BinaryIO, int]]:
    """`aio.open_regular_file`, of a checkpoint: raises CorruptCheckpointError for what is none."""
    try:
        with aio.open_regular_file(path, follow=follow) as found:
            yield found
    except aio.NotRegularFileError as error:
        raise CorruptCheckpointError("not a regular file", path=path) from error


def is_finished(checkpoint: Path) -> bool:
    """Whether some save to this path has finished, whatever has become of it since."""
    return status_of(checkpoint / MANIFEST_NAME, follow=False) is not None


def is_own_manifest(path: Path) -> bool:
    """Whether a file that may be damaged began its life as the manifest of a checkpoint. One that
    is empty, or begins with zeros, as disks leave what they lost, is no other program's either.
    """
    try:
        head = read_head(path)
    except CorruptCheckpointError:
        return False
    if not head[:_SECTOR_BYTES].strip(b"\0"):
        return True
    return head.startswith(b'{"sha256":"') or f'"format":"{FORMAT}"'.encode() in head


def read_head(path: Path) -> bytes:
    """The first bytes of a manifest: its checksum, format and id.

    Raises CorruptCheckpointError for what is no regular file, and OSError.
    """
    with open_regular_file(path) as (file, _):
        return file.read(_HEAD_BYTES)


def check_data_file(manifest: Manifest, checkpoint: Path, file: FileRecord) -> Path:
    """The path of a data file whose kind and size are what the manifest says.

    Raises CorruptCheckpointError if it is missing, not a regular file, or of another size.
    """
    path = manifest.file_path(checkpoint, file)
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CorruptCheckpointError(_missing(file), path=path) from error
    if not stat.S_ISREG(status.st_mode):
        raise CorruptCheckpointError("the data file is not a regular file", path=path)
    if status.st_size != file.nbytes:
        raise CorruptCheckpointError(
            f"the data file has {status.st_size} bytes, the manifest says {file.nbytes}", path=path
        )
    return path


def _missing(file: FileRecord) -> str:
    what = "the data file is missing"
    if file.root is not None:
        what += "; if its directory was moved, say where to with stripe_dirs= (or --stripe-dir)"
    return what
