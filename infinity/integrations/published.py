"""Folders that are written under another name and get theirs by a rename.

Invariant: a folder under its own name is complete and durable. What a killed process leaves has a
name that nothing takes for a saved state, and is removed, or put back, by the next save or load.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aio import sync_directory


def staged_of(final: Path) -> Path:
    """Where a folder is written before it is published."""
    return final.with_name(f".saving-{final.name}")


def replaced_of(final: Path) -> Path:
    """What a folder is called while another takes its place."""
    return final.with_name(f".replaced-{final.name}")


@contextmanager
def replacing(final: Path, *, keeps_others: bool = True) -> Iterator[Path]:
    """A new folder to write to, which is ``final`` after. With ``keeps_others`` what else is in
    ``final`` stays there; after an error all of it is as it was.
    """
    recover(final)
    staged = staged_of(final)
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        yield staged
        if keeps_others:
            _take_along(final, staged)
        publish(staged, final)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def publish(staged: Path, final: Path) -> None:
    """Let the durable ``final`` be what is in ``staged``. Raises ``OSError``."""
    sync_tree(staged)
    replaced = replaced_of(final)
    if final.exists():
        remove(replaced)
        final.rename(replaced)
    staged.rename(final)
    sync_directory(final.parent)
    remove(replaced)


def recover(final: Path) -> None:
    """Put back what a killed process was replacing."""
    replaced = replaced_of(final)
    if not replaced.exists():
        return
    if final.exists():
        remove(replaced)
    else:
        replaced.rename(final)


def remove(path: Path) -> None:
    """A folder or a file, if there is one."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Have all that is in ``folder`` on the disk."""
    for root, _, names in os.walk(folder):
        for name in names:
            descriptor = os.open(Path(root, name), os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        sync_directory(root)


def _take_along(final: Path, staged: Path) -> None:
    """Files of others in ``final``, as links: they are in both until one of the two goes."""
    if not final.is_dir():
        return
    for entry in final.iterdir():
        if (staged / entry.name).exists():
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.copytree(entry, staged / entry.name, symlinks=True, copy_function=_link)
        else:
            _link(entry, staged / entry.name)


def _link(source: str | Path, target: str | Path) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)
