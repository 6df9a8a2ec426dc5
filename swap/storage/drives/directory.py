"""The place of one process on one SSD: a folder with a swap file and a lock.

``<nvme>/.infinity/<uuid>/lock`` is held with flock(2) for as long as the process lives; the kernel
drops it when the process dies, however it dies. A folder whose lock can be taken, or that has none
yet, is therefore an orphan, and the next process that opens the same SSD removes it.

Processes that come and go at once (the ranks of one job) take turns: folders are made, reclaimed
and removed with ``<nvme>`` itself locked. So no process takes a folder that is still being made for
an orphan, and none removes what another is removing.

Folders are for their user alone (0700, files 0600, whatever the umask), for they hold weights; file
systems without permissions are used all the same, with a warning. ``.infinity`` itself is for all
users who may write to ``<nvme>``, and sticky: any of them may have made it, the others put their
folders beside, and only the owner of ``.infinity`` can move or remove another's. Symbolic links are
not followed: any user who may write to ``<nvme>`` could have one lead to folders elsewhere.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from aio import Engine, File
from aio.errors import let_go
from aio.process.absence import is_directory, is_there
from aio.process.descriptors import Descriptor
from swap.interruptions.forks import note
from swap.interruptions.undo import Undo, close_gone

FOLDER = ".infinity"
"""Where everything of ours is, in each directory."""
BANDWIDTH = "bandwidth.json"
"""In it, what `infinity tune` measured; while it is written, under this name with a dot before and
random digits behind.
"""
_LOCK = "lock"
_FILE = "state.swap"
_NAME = re.compile(r"[0-9a-f]{12}")
_TURN_SECONDS = 120.0
"""How long others may take with ``<nvme>`` locked; it takes milliseconds, and longer with orphans
of many terabytes."""
_POLL_SECONDS = 0.01
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
_SAY_AFTER_SECONDS = 5.0
_log = logging.getLogger(__name__)


class Turn(Descriptor):
    """Open on a directory while that is ``locked``; a forked child does not keep it locked."""

    def __init__(self) -> None:
        super().__init__()
        note(self)

    def after_fork(self) -> None:
        self.close()


class SwapDirectory:
    """One process's folder on one SSD; ``close`` removes it, which ``undo`` is told to do before
    anything is made: an interrupt may come before the caller has this object.

    One that nobody closes runs nothing as it goes, for that may be anywhere. Its lock goes with it,
    so the next process that opens the same SSD removes the folder; a ``ResourceWarning`` names the
    file.

    Raises ``FileNotFoundError``, ``NotADirectoryError`` or ``PermissionError`` naming ``nvme`` when
    it cannot be used, before anything is changed, and ``TimeoutError`` when another process keeps
    it locked.
    """

    def __init__(
        self, nvme: str | os.PathLike[str], engine: Engine, undo: Undo | None = None
    ) -> None:
        self.root = Path(nvme)
        self.path = self.root / FOLDER / uuid.uuid4().hex[:12]
        self._lock: Descriptor | None = None
        self._turn = Turn()
        """Of ``root`` while it is locked here: an interrupt may keep ``locked`` from closing it."""
        self._is_open = True
        self._makes_shared = False
        note(self)
        if undo is not None:
            undo.callback(self.close)
        try:
            self._make(engine)
        except BaseException as cause:
            try:
                self.close()
            except OSError as failure:
                cause.add_note(f"{self.path / _FILE} cannot be closed: {let_go(failure)}")
            raise

    def _make(self, engine: Engine) -> None:
        check_usable(self.root)
        with locked(self.root, self._turn):
            self._makes_shared = not is_there(self.path.parent)
            make_shared(self.path.parent)
            _reclaim(self.root)
            self.path.mkdir(mode=0o700)
            self._lock = Descriptor(
                self.path / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, exact=True
            )
            try_to_lock(self._lock, self.path / _LOCK)
        self.file: File = engine.open(self.path / _FILE, "x")
        _close_to_others(self.file.path)

    def after_fork(self) -> None:
        """The child keeps neither the lock nor the file, and removes nothing."""
        self._is_open = False
        file: File | None = vars(self).get("file")
        if file is not None:
            file.close()
        self._unlock()

    def close(self) -> None:
        """Close the swap file and remove the folder. Idempotent; called again after an interrupt,
        it does the rest.

        Where ``nvme`` is gone, unmounted or removed, there is nothing to remove, and one warning.
        """
        if not self._is_open:
            return
        failures: list[OSError] = []
        file: File | None = vars(self).get("file")
        if file is not None:
            try:
                file.close()
            except OSError as error:
                failures.append(let_go(error))
        self._remove()
        if failures:
            raise failures.pop()

    def _remove(self) -> None:
        """Of a folder that is not there, or whose turn does not come, the lock alone."""
        self._turn.close()
        try:
            if self._lock is not None or self._makes_shared or is_there(self.path):
                with locked(self.root, self._turn):
                    _remove_tree(self.path)
                    self._unlock()
                    _remove_if_empty(self.path.parent)
        except OSError as error:
            _log.warning(
                "cannot remove the swap files in %s: %s; if they are still there, the next process "
                "that offloads to it removes them",
                self.path,
                error,
            )
        self._unlock()
        self._is_open = False

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()


def reclaim(nvme: str | os.PathLike[str]) -> list[Path]:
    """Remove what dead processes left in ``nvme``; return the folders that were removed.

    What this one let go of without closing it is closed before.
    """
    close_gone()
    root = Path(nvme)
    with locked(root):
        removed = _reclaim(root)
        _remove_if_empty(root / FOLDER)  # which one that was killed may have left
    return removed


@contextmanager
def locked(root: Path, turn: Turn | None = None) -> Iterator[None]:
    """Only one process at a time is inside, for each ``root``, which ``turn`` is open on meanwhile.

    Raises ``TimeoutError`` when another one does not leave: ``flock DIR python train.py`` holds it
    for as long as the training that waits for it.
    """
    turn = Turn() if turn is None else turn
    try:
        try:
            turn.open(root, os.O_RDONLY | os.O_DIRECTORY)
            _wait_for(turn, root)
            yield
        finally:
            turn.close()
    finally:  # once more, where an interrupt kept it from that
        turn.close()


def _wait_for(turn: Descriptor, root: Path) -> None:
    started = time.monotonic()
    is_said = False
    while not try_to_lock(turn, root):
        waited = time.monotonic() - started
        if waited > _SAY_AFTER_SECONDS and not is_said:
            is_said = True
            _log.warning(
                "waiting for another process that has the directory %s locked (flock), for at "
                "most %.0f s",
                root,
                _TURN_SECONDS,
            )
        if waited > _TURN_SECONDS:
            raise TimeoutError(
                errno.ETIMEDOUT,
                f"another process has held a lock (flock) on the directory itself for more "
                f"than {_TURN_SECONDS:.0f} s; end it, or if this was started by `flock "
                f"{root} ...`, lock a file beside the directory instead",
                os.fspath(root),
            )
        time.sleep(_POLL_SECONDS)


def try_to_lock(lock: Descriptor, path: Path) -> bool:
    """Whether this process has the lock now. Raises ``OSError`` naming ``path`` where that cannot
    be found out.
    """
    try:
        fcntl.flock(lock.number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        what = f"cannot be locked (flock): {error.strerror}"
        if error.errno in _NO_LOCKS:
            what += "; swap files need a file system that has locks"
        raise OSError(error.errno, what, os.fspath(path)) from error
    return True


def check_folder(folder: Path) -> None:
    """Raises ``NotADirectoryError`` for what only leads to a folder, or is another thing."""
    if not stat.S_ISDIR(folder.lstat().st_mode):
        raise NotADirectoryError(
            errno.ENOTDIR,
            "not a folder itself, and swap files are not put where a link leads; remove it",
            os.fspath(folder),
        )


def make_shared(folder: Path) -> None:
    """Make ``FOLDER`` if there is none, for everybody that its parent is for.

    Raises ``PermissionError`` for one of another user that is not for this one.
    """
    parent = folder.parent.stat()
    try:
        folder.mkdir()
    except FileExistsError:
        check_folder(folder)
        if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(
                errno.EACCES,
                f"made by user {folder.lstat().st_uid}, and not for others to write to; have it "
                f"removed while nobody offloads, or opened: chmod 1777 {folder}",
                os.fspath(folder),
            ) from None
        return
    # By a descriptor: somebody may have put a link in its place.
    with Descriptor(folder, os.O_RDONLY | os.O_DIRECTORY, exact=True) as made:
        status = os.fstat(made.number)
        if status.st_uid == os.geteuid():
            shared = parent.st_mode & (stat.S_IRWXU | stat.S_IRWXG | stat.S_IRWXO)
            open_to_others(made, shared | (status.st_mode & stat.S_ISGID) | stat.S_ISVTX)


def open_to_others(made: Descriptor, mode: int) -> None:
    """Whatever the umask, as far as the file system has permissions: some (FAT, shares of a
    network) refuse any change of theirs. What is there serves its user in any case.
    """
    with suppress(OSError):
        os.fchmod(made.number, mode)


def _close_to_others(file: Path) -> None:
    """As far as the file system has permissions; its folder, made for its user alone, does that,
    too.
    """
    try:
        file.chmod(0o600)
    except OSError as error:
        if file.stat().st_mode & 0o066 and file.parent.stat().st_mode & 0o011:
            _log.warning(
                "other users of this machine may read %s: the file system refuses to change "
                "permissions (%s); mount it for its user alone, or use another one",
                file,
                error,
            )


def _reclaim(root: Path) -> list[Path]:
    removed: list[Path] = []
    parent = root / FOLDER
    try:
        check_folder(parent)
    except (FileNotFoundError, NotADirectoryError):
        return removed  # who wants to use it is told
    for folder in sorted(parent.glob("*")):
        if _NAME.fullmatch(folder.name) and _is_abandoned(folder) and _reclaim_one(folder):
            removed.append(folder)
    for part in parent.glob(f".{BANDWIDTH}.*"):  # of the dead: they are written while locked
        with suppress(OSError):  # another user's
            part.unlink()
    return removed


def _reclaim_one(folder: Path) -> bool:
    """Whether it is gone: one that cannot be removed takes space, and stops nobody."""
    try:
        nbytes = sum(entry.lstat().st_blocks * 512 for entry in folder.iterdir())
        shutil.rmtree(folder)
    except OSError as error:
        _log.warning(
            "cannot remove what a dead process left in %s: %s; it takes space on the disk until "
            "it is removed by hand",
            folder,
            error,
        )
        return False
    _log.info("reclaimed %d bytes that a dead process left in %s", nbytes, folder)
    return True


def check_usable(root: Path) -> None:
    """Raises as ``SwapDirectory`` where ``root`` cannot be used."""
    if not is_there(root):
        raise FileNotFoundError(
            f"nvme directory {root} does not exist; create it on the SSD that should take the state"
        )
    if not is_directory(root):
        raise NotADirectoryError(f"nvme={root} is not a directory")
    usable = os.access(root, os.R_OK | os.W_OK | os.X_OK)
    if not usable or os.statvfs(root).f_flag & os.ST_RDONLY:
        raise PermissionError(f"nvme directory {root} is not writable for this process")


def _is_abandoned(folder: Path) -> bool:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or os.geteuid() not in (0, status.st_uid):
        return False  # none of ours
    try:
        # Without waiting for whoever would write to a pipe of that name.
        lock = Descriptor(folder / _LOCK, os.O_RDWR | os.O_NONBLOCK, exact=True)
    except FileNotFoundError:
        return True  # its process died before it had made the lock
    except OSError:
        return False  # another user's, or none of ours
    with lock:
        return stat.S_ISREG(os.fstat(lock.number).st_mode) and try_to_lock(lock, folder / _LOCK)


def _remove_tree(folder: Path) -> None:
    with suppress(FileNotFoundError):
        shutil.rmtree(folder)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError as error:
        _log.debug("%s stays: %s", folder, error)
