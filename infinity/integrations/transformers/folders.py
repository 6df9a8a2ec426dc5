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
from infinity.integrations import published
from infinity.integrations.published import sync_tree

_REPLACED = re.compile(r"\.replaced-(checkpoint-[0-9]+)")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = re.compile(
    r"(model|pytorch_model|adapter_model)(-[0-9]+-of-[0-9]+)?\.(safetensors|bin)(\.index\.json)?"
)


def recover(run: Path) -> None:
    """Remove what killed processes were saving to ``run``; put back what they were replacing. What
    others are saving there at the same time stays.
    """
    if not run.is_dir():
        return
    published.remove_abandoned(run)
    for entry in list(run.iterdir()):
        if found := _REPLACED.fullmatch(entry.name):
            published.recover(run / found[1])


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A new folder to write a model to, whose files are those of ``folder`` after: each by a
    rename, indexes last. Weights of a model that was there before are removed, and of adapters
    those of adapters.
    """
    with published.staging(folder) as own:
        staged = own / "new"
        staged.mkdir()
        yield staged
        sync_tree(staged)
        names = [entry.name for entry in staged.iterdir()]
        names.sort(key=lambda name: (name in _INDEXES, name))
        for name in names:
            _move(staged / name, folder / name)
        written = {kind for name in names if (kind := _kind_of(name))}
        for entry in folder.iterdir():
            if _kind_of(entry.name) in written and entry.name not in names:
                entry.unlink()
        sync_directory(folder)


def _kind_of(name: str) -> str | None:
    """What a file has weights of: a model, or adapters, which may be beside it."""
    found = _WEIGHTS.fullmatch(name)
    return found and ("adapters" if found[1] == "adapter_model" else "model")


def _move(source: Path, target: Path) -> None:
    if source.is_dir() and target.is_dir():
        shutil.rmtree(target)
    source.replace(target)
