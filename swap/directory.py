"""The place of one process on one SSD: a folder with a swap file and a lock.

``<nvme>/.infinity/<uuid>/lock`` is held with flock(2) for as long as the process lives; the kernel
drops it when the process dies, however it dies. A folder whose lock can be taken is therefore a
leftover, and the next process that opens the same SSD removes it.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import uuid
from pathlib import Path

from aio import Engine, File

_FOLDER = ".infinity"
_LOCK = "lock"
_log = logging.getLogger(__name__)


class SwapDirectory:
    """One process's folder on one SSD; ``close`` removes it.

    Raises ``FileNotFoundError``, ``NotADirectoryError`` or ``PermissionError`` naming ``nvme`` when
    it cannot be used, before anything is changed.
    """

    def __init__(self, nvme: str | os.PathLike[str], engine: Engine) -> None:
        self.root = Path(nvme)
        _check_usable(self.root)
        base = self.root / _FOLDER
        base.mkdir(exist_ok=True)
        reclaim(self.root)
        self.path, self._lock = _create_locked(base)
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
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1
        _remove_if_empty(self.path.parent)


def reclaim(nvme: str | os.PathLike[str]) -> list[Path]:
    """Remove what dead processes left in ``nvme``; return the folders that were removed."""
    removed = []
    for folder in sorted(Path(nvme, _FOLDER).glob("*")):
        if _is_abandoned(folder):
            nbytes = sum(entry.stat().st_blocks * 512 for entry in folder.iterdir())
            shutil.rmtree(folder)
            _log.info("reclaimed %d bytes that a dead process left in %s", nbytes, folder)
            removed.append(folder)
    return removed


def _check_usable(root: Path) -> None:
    if not root.exists():
        raise FileNotFoundError(
            f"nvme directory {root} does not exist; create it on the SSD that should take the state"
        )
    if not root.is_dir():
        raise NotADirectoryError(f"nvme={root} is not a directory")
    if not os.access(root, os.W_OK | os.X_OK) or os.statvfs(root).f_flag & os.ST_RDONLY:
        raise PermissionError(f"nvme directory {root} is not writable for this process")


def _create_locked(base: Path) -> tuple[Path, int]:
    """A new folder whose lock is held before it has the name under which others look for it."""
    name = uuid.uuid4().hex[:12]
    hidden, path = base / f".{name}", base / name
    hidden.mkdir()
    lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    hidden.rename(path)
    return path, lock


def _is_abandoned(folder: Path) -> bool:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
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
