"""Folders of checkpoints: written under another name, published by a rename.

Invariant: a folder ``checkpoint-<step>`` is complete and durable from its first moment on. What a
killed process leaves has a name that no trainer takes for a checkpoint, and is removed, or put
back, by the next one.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from aio import sync_directory
from infinity.integrations.published import sync_tree

SAVING = ".saving"
_REPLACED = ".replaced-"
_CHECKPOINT = re.compile(r"checkpoint-[0-9]+")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = re.compile(
    r"(model|pytorch_model|adapter_model)(-[0-9]+-of-[0-9]+)?\.(safetensors|bin)(\.index\.json)?"
)


def recover(run: Path) -> None:
    """Remove what a killed process was saving to ``run``; put back what it was replacing."""
    if not run.is_dir():
        return
    shutil.rmtree(run / SAVING, ignore_errors=True)
    for replaced in run.glob(f"{_REPLACED}checkpoint-*"):
        name = replaced.name.removeprefix(_REPLACED)
        if not _CHECKPOINT.fullmatch(name):
            continue
        if (run / name).exists():
            shutil.rmtree(replaced, ignore_errors=True)
        else:
            replaced.rename(run / name)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write a model to, whose files are those of ``folder`` after: each by a
    rename, indexes last. Weights of a model that was there before are removed.
    """
    staged = folder / SAVING
    shutil.rmtree(staged, ignore_errors=True)
    staged.mkdir(parents=True)
    try:
        yield staged
        sync_tree(staged)
        names = [entry.name for entry in staged.iterdir()]
        names.sort(key=lambda name: (name in _INDEXES, name))
        for name in names:
            _move(staged / name, folder / name)
        for entry in folder.iterdir():
            if _WEIGHTS.fullmatch(entry.name) and entry.name not in names:
                entry.unlink()
        sync_directory(folder)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _move(source: Path, target: Path) -> None:
    if source.is_dir() and target.is_dir():
        shutil.rmtree(target)
    source.replace(target)
