"""The place of one process on one SSD: a folder with a swap file and a lock.

``<nvme>/.infinity/<uuid>/lock`` is held with flock(2) for as long as the process lives; the kernel
drops it when the process dies, however it dies. A folder whose lock can be taken, or that has none
yet, is therefore a leftover, and the next process that opens the same SSD removes it.

Processes that come and go at once (the ranks of one job) take turns: folders are made, reclaimed
and removed with ``<nvme>`` itself locked. So nobody takes a folder that is still being made for a
leftover, and nobody removes what another is removing.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aio import Engine, File

FOLDER = ".infinity"
"""Where everything of ours is, in each directory."""
_LOCK = "lock"
_NAME = re.compile(r"[0-9a-f]{12}")
_log = logging.getLogger(__name__)


class SwapDirectory:
    """One process's folder on one SSD; ``close`` removes it.

    Raises ``FileNotFoundError``, ``NotADirectoryError`` or ``PermissionError`` naming ``nvme`` when
    it cannot be used, before anything is changed.
    """

    def __init__(self, nvme: str | os.PathLike[str], engine: Engine) -> None:
        self.root = Path(nvme)
        check_usable(self.root)
        with _locked(self.root):
            (self.root / FOLDER).mkdir(exist_ok=True)
            _reclaim(self.root)
            self.path = self.root / FOLDER / uuid.uuid4().hex[:12]
            self._lock = _create_locked(self.path)
        try:
            self.file: File = engine.open(self.path / "state.swap", "x")
        except BaseException:
            self._remove()
            raise

    def close(self) -> None:
        """Close the swap file and remove the folder. Idempotent."""
        if self._lock < 0:
            return
        self.file.close()
        self._remove()

    def _remove(self) -> None:
        with _locked(self.root):
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1
            _remove_if_empty(self.path.parent)


def reclaim(nvme: str | os.PathLike[str]) -> list[Path]:
    """Remove what dead processes left in ``nvme``; return the folders that were removed."""
    with _locked(Path(nvme)):
        return _reclaim(Path(nvme))


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Only one process at a time is inside, for each ``root``."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _reclaim(root: Path) -> list[Path]:
    removed = []
    for folder in sorted((root / FOLDER).glob("*")):
        if _NAME.fullmatch(folder.name) and _is_abandoned(folder):
            nbytes = sum(entry.stat().st_blocks * 512 for entry in folder.iterdir())
            shutil.rmtree(folder)
            _log.info("reclaimed %d bytes that a dead process left in %s", nbytes, folder)
            removed.append(folder)
    return removed


def check_usable(root: Path) -> None:
    """Raises as ``SwapDirectory`` where ``root`` cannot be used."""
    if not root.exists():
        raise FileNotFoundError(
            f"nvme directory {root} does not exist; create it on the SSD that should take the state"
        )
    if not root.is_dir():
        raise NotADirectoryError(f"nvme={root} is not a directory")
    usable = os.access(root, os.R_OK | os.W_OK | os.X_OK)
    if not usable or os.statvfs(root).f_flag & os.ST_RDONLY:
        raise PermissionError(f"nvme directory {root} is not writable for this process")


def _create_locked(path: Path) -> int:
    """Make the folder of this process; returns the descriptor that holds its lock."""
    path.mkdir()
    lock = os.open(path / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # its process died before it had made the lock
    except PermissionError:
        return False  # another user's
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(lock)
    return True


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        _log.debug("%s stays: %s", folder, error)
