"""The generation that a save makes, from the lock on its checkpoint to the manifest that counts:
what rank 0 does of a commit, see `checkpoint.saving.commit` for the order.
"""

from __future__ import annotations

import errno
import os
from contextlib import ExitStack
from pathlib import Path

from aio import read_regular_file, sync_directory
from aio.process.absence import is_there
from checkpoint.directory.destination import Destination
from checkpoint.directory.files.attributes import attributes_at
from checkpoint.directory.generations import (
    clear_orphans,
    create_generation,
    discard_generation,
    prune,
    temporary_manifest,
    write_durably,
)
from checkpoint.directory.locate import is_own_manifest
from checkpoint.directory.lock import Holder, Lock, hold
from checkpoint.errors import CorruptCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME


class Generation:
    """Used in a `with`, or until `end`: whatever was made and not published is removed then, and
    the lock let go of. Other ranks than the first do none of it.
    """

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self.unsynced: list[Path] = []
        """Directories with names that are not durable yet."""
        self._process = os.getpid()
        self._made: Lock | None = None
        """With the directories that were made for this save, until it counts."""
        self._left: set[str] = set()
        """Saves of which a warning has said that what they left cannot be removed."""
        self._lock = ExitStack()
        self._undo = ExitStack()

    def claim(self, holder: Holder | None = None) -> None:
        """Makes the checkpoint's directory, locks it, and removes what killed saves left.

        Raises BlockingIOError while another save has the lock, FileExistsError for a manifest.json
        that no save wrote, and OSError. `holder` is asked by the next save of this process whether
        this one was given up.
        """
        path = self.destination.path
        lock = Lock(path, make=True)
        self._lock.enter_context(lock)
        self._made = lock
        if holder is not None:
            hold(path, holder)
        check_replaceable(path)
        self._left = clear_orphans(path, self.destination.stripes)

    def make(self) -> None:
        """Makes the directories of the data. Raises OSError."""
        path, uuid = self.destination.path, self.destination.uuid
        self._undo.callback(discard_generation, path, uuid)
        self.unsynced = create_generation(path, uuid, self.destination.stripe_directories)

    def publish(self, raw: bytes) -> None:
        """The end of a commit: makes the manifest count. From the rename on nothing is undone.

        Raises OSError, and CorruptCheckpointError if the manifest that is read back is another one;
        what it replaced is there still.
        """
        path, uuid = self.destination.path, self.destination.uuid
        # 8. The manifest, durable, under a name that nobody reads.
        temporary = temporary_manifest(path, uuid)
        write_durably(temporary, raw, attributes_at(path / MANIFEST_NAME))
        # 9. The switch.
        temporary.replace(path / MANIFEST_NAME)
        self._undo.pop_all()
        self._made = None
        # 10. The switch durable.
        sync_directory(path)
        if read_regular_file(path / MANIFEST_NAME) != raw:
            raise CorruptCheckpointError("reads back as other bytes", path=path / MANIFEST_NAME)
        # 11. Only now what it replaced.
        prune(path, uuid, self.destination.stripes, told=self._left)

    def end(self) -> None:
        """Idempotent. In a forked child it does nothing: what is to be undone is the parent's."""
        if self._process != os.getpid():
            self._undo.pop_all()
            self._lock.pop_all()
            return
        try:
            self._undo.close()
        finally:
            lock, self._made = self._made, None
            try:
                if lock is not None:
                    lock.remove_made()
            finally:
                self._lock.close()

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


def check_replaceable(checkpoint: Path) -> None:
    """Raises FileExistsError for a manifest.json that no save wrote: it is not ours to replace."""
    manifest = checkpoint / MANIFEST_NAME
    if is_there(manifest) and not is_own_manifest(manifest):
        raise FileExistsError(
            errno.EEXIST,
            "there is a file of this name that is not the manifest of a checkpoint",
            str(manifest),
        )
