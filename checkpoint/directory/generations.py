"""Generations: the data of one save, found and removed by its id alone.

Every save makes `<checkpoint>/<uuid>/`. It holds the data files, or, where stripes go to other
directories, `stripes.json`, which names the directories made there. It is durable before they are
made and removed after them, so that nothing that a killed save leaves, or that is on a disk which
is not mounted, is ever lost from sight.

Invariants: only files with names of data files are deleted, and only in directories that end in the
id of their generation; elsewhere only in those that say that this generation is their owner. What
says so is durable before any data are there, and until they are gone. Links are not followed.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from aio import sync_directory
from aio.process.absence import is_directory
from aio.process.descriptors import Descriptor
from checkpoint.directory.files.attributes import PRIVATE, Attributes, give_attributes
from checkpoint.directory.locate import is_finished, read_head, read_manifest
from checkpoint.directory.lock import Lock
from checkpoint.directory.owners import OWNER_NAME, opened_directory, owner_at, read_owner
from checkpoint.directory.relocation import folders_of
from checkpoint.directory.stripe_list import STRIPES_NAME, encode_stripes, listed_stripes
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.rules import is_data_file_name, is_uuid

logger = logging.getLogger(__name__)


def temporary_manifest(checkpoint: Path, uuid: str) -> Path:
    """The name that a manifest is written under before it counts."""
    return checkpoint / f"{MANIFEST_NAME}.{uuid}.tmp"


def create_generation(checkpoint: Path, uuid: str, stripes: Sequence[Path]) -> list[Path]:
    """Makes the directories of a save and gives those whose entries are new and not yet durable.

    `stripes` are the directories to make elsewhere; their parents must exist. Raises OSError.
    """
    home = checkpoint / uuid
    home.mkdir()
    if not stripes:
        return [home, checkpoint]
    write_durably(home / STRIPES_NAME, encode_stripes(stripes))
    sync_directory(home)
    sync_directory(checkpoint)
    mark = owner_at(home / STRIPES_NAME).encode()
    for stripe in stripes:
        stripe.mkdir()
        write_durably(stripe / OWNER_NAME, mark)
        sync_directory(stripe)  # data without a mark would be nobody's to remove
    return [*stripes, *sorted({stripe.parent for stripe in stripes})]


def write_durably(path: Path, data: bytes, replaced: Attributes | None = None) -> None:
    """Creates a file with this content and syncs it; its name is the caller's to sync. It has the
    attributes of the file that it is going to replace, if there is one.

    Raises OSError that names the file.
    """
    flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if replaced is None else PRIVATE
    try:
        with (
            Descriptor(path, flags, mode) as made,
            open(made.number, "wb", closefd=False) as file,
        ):
            give_attributes(made.number, replaced, path)
            file.write(data)
            file.flush()
            os.fsync(made.number)
    except OSError as error:
        raise OSError(error.errno, f"cannot write: {error.strerror}", str(path)) from error


def remove_generation(checkpoint: Path, uuid: str, stripes: Sequence[Path] = ()) -> None:
    """Removes the data of one save, whole or in part. Raises OSError for what will not go, when all
    else is gone.

    `stripes` are searched for its data too: they may be somewhere else than where they were made.
    What is on a disk that is not mounted stays, with a warning, and so does the list of stripes, by
    which a later call finds it.
    What another checkpoint owns stays, with a warning: this one is a copy of that, or was moved to
    another file system.
    """
    home = checkpoint / uuid
    listed = listed_stripes(home, uuid)
    moved = [folder for stripe in stripes for folder in folders_of(stripe, uuid)] if listed else []
    folders = [stripe.path for stripe in listed]
    away = [stripe.path for stripe in listed if stripe.is_away()]
    is_away = len(set(moved) - set(folders)) < len(away)
    if is_away:
        what = "%s: data of save %s are not removed, as nothing is mounted there: %s"
        logger.warning(what, checkpoint, uuid, ", ".join(map(str, away)))
    failures = []
    for folder in dict.fromkeys([*folders, *moved]):
        try:
            _remove_stripe(folder, home / STRIPES_NAME)
        except OSError as error:  # the others are on other disks, as a rule
            failures.append(error)
    # The list stays as long as there may be something to find by it: other file systems, or others
    # of their journals, may be behind this one when the power goes.
    for parent in dict.fromkeys(folder.parent for folder in [*folders, *moved]):
        if is_directory(parent):
            sync_directory(parent)
    if failures:
        raise failures[0]  # the list stays, and a later call finds what is left
    if is_directory(home) and not home.is_symlink() and not is_away:
        (home / STRIPES_NAME).unlink(missing_ok=True)
        _remove_data_directory(home)
    temporary_manifest(checkpoint, uuid).unlink(missing_ok=True)


def discard_generation(checkpoint: Path, uuid: str) -> None:
    """Removes what a failed save made; what will not go is a warning, for its error counts more.

    A save may fail after its manifest took its place, or not know whether it did: what the manifest
    that is there belongs to, or may belong to, stays.
    """
    try:
        if is_published(checkpoint, uuid):
            logger.warning("%s: the save failed after it had taken its place", checkpoint)
        else:
            remove_generation(checkpoint, uuid)
    except OSError as error:
        logger.warning("%s: cannot remove what a failed save left: %s", checkpoint, error)


def is_published(checkpoint: Path, uuid: str) -> bool:
    """Whether the manifest that is there is that of this save, damaged or not.

    Raises OSError if that cannot be found out.
    """
    try:
        return f'"uuid":"{uuid}"'.encode() in read_head(checkpoint / MANIFEST_NAME)
    except (FileNotFoundError, CorruptCheckpointError):  # none, or a pipe, or a device
        return False


def prune(
    checkpoint: Path,
    keep: str | None,
    stripes: Sequence[Path] = (),
    told: Collection[str] = (),
) -> set[str]:
    """Removes every generation but one, or all of them; see `remove_generation`.

    Gives those that cannot be removed, each with a warning unless that was `told` before: the save
    itself is done.
    """
    left = set()
    for uuid in generations(checkpoint):
        if uuid == keep:
            continue
        try:
            remove_generation(checkpoint, uuid, stripes)
        except OSError as error:
            left.add(uuid)
            if uuid not in told:
                logger.warning("%s: cannot remove what save %s left: %s", checkpoint, uuid, error)
    return left


def clear_orphans(checkpoint: Path, stripes: Sequence[Path] = ()) -> set[str]:
    """Removes what killed saves left; nothing where a damaged manifest hides what counts. Gives
    what cannot be removed, see `prune`.
    """
    found = generations(checkpoint)
    if not found or (len(found) == 1 and is_finished(checkpoint)):
        return set()  # the usual case, in which no manifest has to be read
    try:
        return prune(checkpoint, read_manifest(checkpoint).uuid, stripes)
    except IncompleteCheckpointError:
        return prune(checkpoint, None, stripes)
    except CorruptCheckpointError as error:
        logger.warning("%s is damaged and will be replaced: %s", checkpoint, error)
        return set()


def generations(checkpoint: Path) -> list[str]:
    """Ids of all saves of which there is anything in a checkpoint's directory."""
    found = set()
    for entry in os.scandir(checkpoint):
        if (
            entry.is_dir(follow_symlinks=False)
            and is_uuid(entry.name)
            and not _is_anothers(entry.path)
        ):
            found.add(entry.name)
        parts = entry.name.split(".")
        if entry.name.startswith(f"{MANIFEST_NAME}.") and parts[-1] == "tmp" and is_uuid(parts[-2]):
            found.add(parts[-2])
    return sorted(found)


def _is_anothers(directory: str) -> bool:
    """Whether a directory with a name like an id, 20261122 for one, holds other things and nothing
    that a save makes, or nothing yet where no id is like it.
    """
    try:
        with os.scandir(directory) as entries:
            names = [entry.name for entry in entries]
    except OSError:  # whoever uses it is told
        return False
    if not names:
        return Path(directory).name.isdecimal()
    return not any(name == STRIPES_NAME or is_data_file_name(name) for name in names)


def _remove_stripe(folder: Path, stripes: Path) -> None:
    """Removes a directory elsewhere if the list at `stripes` is its owner."""
    with opened_directory(folder) as descriptor:
        if descriptor is None:
            if os.path.lexists(folder):
                logger.warning("%s: %s is no directory; it stays", stripes.parent.parent, folder)
            return
        owner = read_owner(descriptor)
        has_data = any(is_data_file_name(name) for name in _names(descriptor))
        # Another's, also one without data: it may be that of a save that has just begun.
        if has_data if owner is None else not owner.is_at(stripes):
            logger.warning(
                "%s does not own the data in %s and leaves them: %s",
                stripes.parent.parent,
                folder,
                "nothing says whose they are" if owner is None else f"{owner.checkpoint} made them",
            )
            return
    _remove_data_directory(folder)


def owns_stripes(checkpoint: Path, uuid: str) -> bool:
    """Whether data of this save elsewhere are this checkpoint's, and not read by it as by a copy.
    Raises OSError where that cannot be found out.
    """
    home = checkpoint / uuid
    for stripe in listed_stripes(home, uuid):
        with opened_directory(stripe.path) as descriptor:
            owner = None if descriptor is None else read_owner(descriptor)
            if owner is not None and owner.is_at(home / STRIPES_NAME):
                return True
    return False


def _names(directory: int) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries]


def _remove_data_directory(directory: Path) -> None:
    with opened_directory(directory) as descriptor:
        if descriptor is None:
            return
        for name in _names(descriptor):
            if is_data_file_name(name):
                os.unlink(name, dir_fd=descriptor)
        if _names(descriptor) == [OWNER_NAME]:
            os.fsync(descriptor)  # the mark goes when no power cut brings the data back
            os.unlink(OWNER_NAME, dir_fd=descriptor)
    directory.rmdir()


def remove_checkpoint(checkpoint: Path, uuid: str | None, stripes: Sequence[Path] = ()) -> bool:
    """Removes the checkpoint of this id (None: what saves that never finished left), its data
    wherever they are, and its directory if nothing else is there. Gives whether it did. `stripes`
    are searched for data, see `remove_generation`.

    What is there is looked at under the lock: where a save has put something else in the meantime,
    nothing is removed. The manifest goes first, durably: what is left of an interrupted removal is
    no checkpoint. Raises BlockingIOError if a save to it is running, FileNotFoundError if it is
    gone, CorruptCheckpointError if its manifest is damaged by now, OSError for what will not go.
    """
    with Lock(checkpoint):
        if _uuid_of(checkpoint) != uuid:
            return False
        (checkpoint / MANIFEST_NAME).unlink(missing_ok=True)
        found = generations(checkpoint)
        if found or uuid is not None:  # not again and again for what others keep there
            sync_directory(checkpoint)
        failures = []
        for generation in found:
            try:
                remove_generation(checkpoint, generation, stripes)
            except OSError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        if not any(checkpoint.iterdir()):
            checkpoint.rmdir()
    return True


def _uuid_of(checkpoint: Path) -> str | None:
    try:
        return read_manifest(checkpoint).uuid
    except IncompleteCheckpointError:
        return None
