"""The folders that snapshots keep files in, one on each SSD, and who may change them.

``<nvme>/.infinity/snapshots-<uid>/<store>/`` holds, for each swap file that a snapshot needs a part
of, a hard link ``<id>.swap`` to it, where ``<id>`` is the name of the folder that its process had
in ``.infinity``. So the bytes stay when that folder goes, and none is copied. ``<store>`` is the
same name on all SSDs of a run; on the first of them, the *primary*, the folder also has ``lock``
and ``points``, where the snapshots themselves are.

Who changes anything holds ``lock`` with flock(2): a block from its first use of snapshots to its
end, or a process that enters a block, for as long as it gives back what killed ones left. What is
reclaimed of swap files (``swap.storage.drives.directory``) is never in here.

Folders are for their user alone, as those of swap files are, and links are not followed.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from aio import AioError, sync_directory
from aio.process.absence import is_file, is_there
from aio.process.descriptors import Descriptor
from swap.interruptions.forks import note
from swap.snapshots.contents import FileRange
from swap.storage.drives.directory import FOLDER, check_folder, locked, make_shared, try_to_lock
from swap.storage.volumes import SharedFile

_STORE = re.compile(r"[0-9a-f]{12}")
_FILE = re.compile(r"([0-9a-f]{12})\.swap")
_LOCK, _POINTS = "lock", "points"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_TURN_SECONDS = 10.0
"""How long another process may take to give back what killed ones left."""
_POLL_SECONDS = 0.01
_log = logging.getLogger(__name__)


class Folders:
    """The folders of one run, on ``roots``; made, found and locked by ``acquire``."""

    def __init__(self, roots: Sequence[str | os.PathLike[str]]) -> None:
        self._roots = [Path(root).absolute() for root in roots]
        self._devices = [_device_of(root) for root in self._roots]
        self._lock: Descriptor | None = None
        self._place: tuple[Path, str] | None = None
        """The primary and the name of the store, once it is locked."""
        self._is_durable = False
        note(self)

    def after_fork(self) -> None:
        """The child does not keep the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    @property
    def _held(self) -> tuple[Path, str]:
        """The root with the lock, and the name of the store."""
        assert self._place is not None
        return self._place

    @property
    def is_held(self) -> bool:
        return self._lock is not None

    def find(self) -> Path | None:
        """The folder of snapshots, if there is one; it may be gone at any time without the lock."""
        place = self._place or self._find()
        return None if place is None else _folder(*place) / _POINTS

    def acquire(self, *, make: bool, waits: bool = True) -> Path | None:
        """Lock the folders and return that of snapshots; None where there are none, without
        ``make``.

        Raises ``BlockingIOError`` where another block has them, and ``OSError`` for a directory in
        which they cannot be.
        """
        if make:
            self._check_there()
        deadline = time.monotonic() + (_TURN_SECONDS if waits else 0.0)
        while self._lock is None:
            place = self._find()
            if place is None and not make:
                return None
            root = self._roots[0] if place is None else place[0]
            with locked(root):
                place = self._find() or self._make()
                if self._try_to_lock(place):
                    self._renew_points()
                    break
            if time.monotonic() > deadline:
                raise _in_use(_folder(*place))
            time.sleep(_POLL_SECONDS)
        return _folder(*self._held) / _POINTS

    def keep(self, swap_files: Iterable[Path]) -> None:
        """Let swap files outlive their folders, durably. Raises ``OSError``."""
        self._check_there()
        if not self._is_durable:  # who made it may have been killed before it was
            sync_directory(_folder(*self._held))
            self._is_durable = True
        for path in swap_files:
            root = path.parents[2]
            folder = _folder(root, self._held[1])
            kept = folder / f"{path.parent.name}.swap"
            if is_there(kept):
                sync_directory(folder)  # which may be what failed the last time
                continue
            try:
                with locked(root):  # or an empty folder would be taken for what a killed one left
                    _make_folder(folder)
                    os.link(path, kept, follow_symlinks=False)
            except FileNotFoundError as error:
                raise _gone(path) from error
            except OSError as error:
                if error.errno not in _NO_LINKS:
                    raise
                raise OSError(
                    error.errno,
                    f"{error.strerror}: a snapshot gives the swap file a second name (a hard "
                    "link), which this file system refuses; use offloaded.save, or nvme "
                    "directories on another one",
                    str(kept),
                ) from error
            sync_directory(folder)

    def _check_there(self) -> None:
        """Raises ``FileNotFoundError`` where a directory, or the folder in it, is not what it was:
        a snapshot in what has its name now would be lost with it, or not be found beside the rest.
        """
        for root, device in zip(self._roots, self._devices, strict=True):
            if device is not None and _device_of(root) != device:
                raise _gone(root)
        if self._lock is not None:
            path = _folder(*self._held) / _LOCK
            try:
                is_same = os.path.samestat(path.lstat(), os.fstat(self._lock.number))
            except (FileNotFoundError, NotADirectoryError):
                is_same = False
            if not is_same:
                raise _gone(path)

    def file(self, name: str) -> tuple[int, Path] | None:
        """(number of the directory, path) of the kept swap file of that name, if it is there."""
        for number, root in enumerate(self._roots):
            path = _folder(root, self._held[1]) / f"{name}.swap"
            if is_file(path):
                return number, path
        return None

    def give_back(self, needed: Mapping[str, Sequence[FileRange]]) -> int:
        """Remove kept files of processes that are gone, but for what is ``needed`` of each.

        Returns the bytes of files that were removed. What cannot be is a warning.
        """
        removed = 0
        for root in self._roots:
            for name, path in _kept_files(_folder(root, self._held[1])):
                try:
                    if is_there(root / FOLDER / name):
                        continue  # its process lives
                    if name in needed:
                        _punch_others(path, needed[name])
                    else:
                        removed += path.lstat().st_blocks * 512
                        path.unlink()
                except OSError as error:
                    _log.warning("%s takes more space than snapshots need: %s", path, error)
        return removed

    def remove_unfinished(self) -> None:
        """Remove folders that a killed process had begun to make, or had all but removed: they
        have no lock, and nothing in them; and the one that they are in, where there are none.
        """
        for root in self._roots:
            base = _base(root)
            if any(_unlocked(root)) or (is_there(base) and not any(_stores(root))):
                with locked(root):
                    for folder in _unlocked(root):
                        _remove_empty(folder / _POINTS, folder)
                    _remove_empty(base, base.parent)

    def others(self) -> list[Path]:
        """Folders on these roots of stores that are not the one which is used: of runs with other
        directories, or with these in another order.
        """
        used = self._place or self._find()
        stores = [folder for root in self._roots for folder in _stores(root)]
        return [folder for folder in stores if used is None or folder.name != used[1]]

    def release(self, *, is_empty: bool) -> None:
        """Unlock; ``is_empty``: nothing is left to keep, and folders go. Idempotent."""
        if self._lock is None or self._place is None:
            return
        try:
            with locked(self._place[0]):
                if is_empty:
                    self._remove()
        finally:
            self._lock.close()
            self._lock = self._place = None
            self._is_durable = False

    def _find(self) -> tuple[Path, str] | None:
        for root in self._roots:
            for folder in _stores(root):
                if is_file(folder / _LOCK):
                    return root, folder.name
        return None

    def _make(self) -> tuple[Path, str]:
        """Of what fails nothing stays. The first root is locked."""
        root, name = self._roots[0], uuid.uuid4().hex[:12]
        folder = _folder(root, name)
        try:
            _make_folder(folder)
            (folder / _POINTS).mkdir(mode=0o700)
            with Descriptor(folder / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600, exact=True):
                pass
            sync_directory(folder)
        except BaseException:
            with suppress(OSError):  # it was not made, or is found as an empty store
                (folder / _LOCK).unlink()
            _remove_empty(folder / _POINTS, folder, folder.parent, folder.parent.parent)
            raise
        return root, name

    def _renew_points(self) -> None:
        """A killed process may have removed all but the lock. Where files are kept, some snapshot
        is lost from sight, and the folder that is missing is an error to who looks into it.
        """
        points = _folder(*self._held) / _POINTS
        if not is_there(points) and not self._keeps_files():
            points.mkdir(mode=0o700)

    def _keeps_files(self) -> bool:
        return any(
            name for root in self._roots for name in _kept_files(_folder(root, self._held[1]))
        )

    def _try_to_lock(self, place: tuple[Path, str]) -> bool:
        path = _folder(*place) / _LOCK
        lock = Descriptor(path, os.O_RDWR, exact=True)
        if not try_to_lock(lock, path):
            lock.close()
            return False
        self._place = place
        self._lock = lock
        return True

    def _remove(self) -> None:
        """While a file is kept anywhere, what the primary has stays, by which it will be found."""
        primary, name = self._held
        for root in self._roots:
            folder = _folder(root, name)
            with suppress(OSError):  # files of a process that lives, or other things
                if root == primary and not self._keeps_files():
                    with suppress(FileNotFoundError):  # which a killed process may have removed
                        (folder / _POINTS).rmdir()
                    (folder / _LOCK).unlink()
                _remove_empty(folder, folder.parent, folder.parent.parent)


def _base(root: Path) -> Path:
    return root / FOLDER / f"snapshots-{os.geteuid()}"


def _folder(root: Path, store: str) -> Path:
    return _base(root) / store


def _stores(root: Path) -> Iterator[Path]:
    """Of this user; of other owners, or behind links, there are none."""
    base = _base(root)
    with suppress(FileNotFoundError, NotADirectoryError):
        if _is_own(base):
            yield from (f for f in sorted(base.iterdir()) if _STORE.fullmatch(f.name))


def _unlocked(root: Path) -> list[Path]:
    return [folder for folder in _stores(root) if not is_there(folder / _LOCK)]


def _remove_empty(*folders: Path) -> None:
    """One after the other, up to the first that has something in it."""
    for folder in folders:
        try:
            folder.rmdir()
        except FileNotFoundError:
            continue
        except OSError:
            return


def _is_own(folder: Path) -> bool:
    check_folder(folder)
    return folder.lstat().st_uid == os.geteuid()


def _make_folder(folder: Path) -> None:
    """Make the folder of a store, durably, if it is not there. Raises ``OSError``."""
    base = folder.parent
    make_shared(base.parent)
    for made in (base, folder):
        with suppress(FileExistsError):
            made.mkdir(mode=0o700)
        if not _is_own(made):
            raise PermissionError(
                errno.EACCES, "belongs to another user, and snapshots are not put there", str(made)
            )
    for parent in (base.parents[1], base.parent, base):
        sync_directory(parent)


def _kept_files(folder: Path) -> Iterator[tuple[str, Path]]:
    with suppress(FileNotFoundError, NotADirectoryError):
        for path in sorted(folder.iterdir()):
            match = _FILE.fullmatch(path.name)
            if match and is_file(path) and not path.is_symlink():
                yield match[1], path


def _punch_others(path: Path, needed: Sequence[FileRange]) -> None:
    """Give all of a file back but for some ranges, unless somebody else reads it."""
    with SharedFile(path) as file:
        at = 0
        ends = [(path.stat().st_size, 0)]
        for offset, nbytes in sorted([*((r.offset, r.nbytes) for r in needed), *ends]):
            if offset > at and not file.punch(at, offset - at):
                return
            at = max(at, offset + nbytes)


def _device_of(root: Path) -> int | None:
    """The number of the file system that it is on; None where there is no such directory."""
    try:
        return root.stat().st_dev
    except (FileNotFoundError, NotADirectoryError):
        return None


def _gone(path: Path) -> FileNotFoundError:
    return FileNotFoundError(
        errno.ENOENT,
        "gone, or another one now (its directory was removed, moved or unmounted), and a snapshot "
        "cannot be kept there; training can go on with what is open: use offloaded.save to another "
        "place",
        str(path),
    )


def _in_use(folder: Path) -> BlockingIOError:
    return BlockingIOError(
        errno.EAGAIN,
        "another offload block, of this process or another, has the snapshots of these nvme "
        "directories; end it first, or give each run directories of its own",
        str(folder),
    )


def check_length(path: Path, size: int, ranges: Iterable[FileRange]) -> None:
    """Raises ``AioError`` for a file of ``size`` bytes that ends before what is in it."""
    end = max((part.offset + part.nbytes for part in ranges), default=0)
    if size < end:
        raise AioError(
            f"{path} has {size} bytes, and a snapshot needs the first {end}: the file is damaged",
            errno=errno.EIO,
            filename=os.fspath(path),
        )
