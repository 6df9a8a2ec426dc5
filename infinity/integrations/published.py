"""Folders that are written under another name and get theirs by a rename.

Invariants: a folder under its own name is complete and durable, once ``recover`` has looked at it.
Each writer has a folder of its own to write to, with a lock on it for as long as it lives, so what
killed processes left can be told and is removed; it gives names to what it wrote in turn with
others.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from aio import naming, sync_directory
from aio.process.absence import is_directory, is_there, status_of
from checkpoint.directory.files.making import made_directory, make_directory
from checkpoint.directory.lock import Lock

_WRITING = re.compile(r"\.saving-[0-9a-f]{8}")
_WRITTEN = ".saved"
"""What is complete, and goes into the folder that it is in."""
_TURN_SECONDS = 60.0
_POLL_SECONDS = 0.02


def replaced_of(final: Path) -> Path:
    """What a folder is called while another takes its place."""
    return final.with_name(f".replaced-{final.name}")


@contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A new folder in ``folder`` that is nobody else's until the end, when it is removed."""
    with made_directory(folder):
        remove_abandoned(folder)
        with ExitStack() as stack:
            yield _staged_in(folder, stack)


def _staged_in(folder: Path, stack: ExitStack) -> Path:
    while True:
        staged = folder / f".saving-{secrets.token_hex(4)}"
        stack.callback(_remove_staged, staged)  # before there is something to remove
        # Another writer that failed may have removed the folder, which was empty.
        make_directory(staged)
        # Until it is locked another process may take it for abandoned.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            stack.enter_context(Lock(staged))
            return staged


def _remove_staged(staged: Path) -> None:
    """An interrupt comes after."""
    try:
        shutil.rmtree(staged, ignore_errors=True)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise


def remove_abandoned(folder: Path) -> None:
    """Remove what killed processes were writing in ``folder``."""
    entries: list[Path] = []
    # Where files may be made and not listed; or another writer that failed has removed it.
    with contextlib.suppress(PermissionError, FileNotFoundError):
        entries.extend(folder.iterdir())
    for entry in entries:
        if _WRITING.fullmatch(entry.name):
            with contextlib.suppress(BlockingIOError, FileNotFoundError), Lock(entry):
                shutil.rmtree(entry, ignore_errors=True)


@contextmanager
def replacing(final: Path, *, keeps_others: bool = True) -> Iterator[Path]:
    """A new folder to write to, which is ``final`` after. With ``keeps_others`` what else is in
    ``final`` stays there; after an error all of it is as it was.

    A folder that can be no other one (a disk, the current directory) gets what was written moved
    into it. Raises ``OSError`` for such a one without ``keeps_others``.
    """
    recover(final)
    is_filled = _stays(final)
    if is_filled and not keeps_others:
        what = "another folder cannot take its place; name one within it"
        raise OSError(errno.EBUSY, what, str(final))
    with staging(final if is_filled else final.parent) as folder:
        staged = folder / "new"
        staged.mkdir()
        yield staged
        if is_filled:
            _fill(staged, final)
        else:
            if keeps_others:
                _take_along(final, staged)
            publish(staged, final)


def publish(staged: Path, final: Path) -> None:
    """Let the durable ``final`` be what is in ``staged``. Raises ``OSError``."""
    sync_tree(staged)
    replaced = replaced_of(final)
    with _turn(final.parent):
        if is_there(final):
            remove(replaced)
            final.rename(replaced)
        staged.rename(final)
        sync_directory(final.parent)
        remove(replaced)


def recover(final: Path) -> None:
    """Finish what a killed process was replacing, or put it back."""
    replaced = replaced_of(final)
    if status_of(replaced, follow=False) is not None:
        with _turn(final.parent):
            if is_there(final):
                remove(replaced)
            elif is_there(replaced):
                replaced.rename(final)
    if is_directory(final / _WRITTEN):
        with _turn(final):
            _move_in(final)


def _fill(staged: Path, final: Path) -> None:
    """Durably, and all of it from the first rename on, see ``recover``."""
    sync_tree(staged)
    with _turn(final):
        _move_in(final)
        staged.rename(final / _WRITTEN)
        sync_directory(final)
        _move_in(final)


def _move_in(final: Path) -> None:
    written = final / _WRITTEN
    if not is_directory(written):
        return
    for entry in written.iterdir():
        target = final / entry.name
        if is_directory(entry) or is_directory(target):
            remove(target)
        entry.rename(target)
    sync_directory(final)
    written.rmdir()
    sync_directory(final)


def _stays(final: Path) -> bool:
    """Whether a folder can be given no other name: a mounted one, one that this process is in, one
    in a folder that it may not change.
    """
    if not is_directory(final):
        return False
    whole, current = final.resolve(), Path(os.path.realpath("."))
    is_in_it = whole == current or whole in current.parents
    return os.path.ismount(whole) or is_in_it or not os.access(whole.parent, os.W_OK | os.X_OK)


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """Only one writer at a time gives names in ``folder``. Raises ``BlockingIOError`` when another
    one does not leave for a minute.
    """
    end = time.monotonic() + _TURN_SECONDS
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(Lock(folder, by="save that gives names in this folder"))
                break
            except BlockingIOError:
                if time.monotonic() > end:
                    raise
            time.sleep(_POLL_SECONDS)
        yield


def remove(path: Path) -> None:
    """A folder or a file, if there is one."""
    if not is_directory(path) or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    try:
        shutil.rmtree(path)
    except OSError as error:
        name = error.filename if isinstance(error.filename, str) else ""
        error.filename = str(path / name)  # it was told by its name in there
        raise


def sync_tree(folder: Path) -> None:
    """Have all that is in ``folder`` on the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root, name), os.O_RDONLY)
            try:
                with naming(Path(root, name)):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(root)


def _take_along(final: Path, staged: Path) -> None:
    """Files of others in ``final``, as links: they are in both until one of the two goes."""
    if not is_directory(final):
        return
    for entry in final.iterdir():
        if is_there(staged / entry.name):
            continue
        if is_directory(entry) and not entry.is_symlink():
            shutil.copytree(entry, staged / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, staged / entry.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)
