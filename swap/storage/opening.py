"""Swap files on several directories, opened with an engine of their own."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from aio import Engine
from swap.interruptions.undo import Undo
from swap.storage.drives.directory import SwapDirectory
from swap.storage.extents import ExtentStore


def open_extents(
    undo: Undo,
    directories: Sequence[str | os.PathLike[str]],
    shares: Sequence[float] | None,
    *,
    verify: bool = False,
    **options: Any,
) -> tuple[Engine, ExtentStore]:
    """Extents on ``directories``, which share the load as ``shares`` says, and their engine, made
    with ``options``; ``undo`` gets what closes both. ``verify`` as of ``ExtentStore``.

    Raises ``OSError`` subclasses naming a directory that cannot be used.
    """
    lanes = ExtentStore.LANES_PER_DIRECTORY * len(directories)
    engine = undo.enter_context(Engine(lanes=lanes, **options))
    opened = []
    for directory in directories:
        opened.append(SwapDirectory(directory, engine, undo))
    extents = ExtentStore(opened, engine, shares=shares, verify=verify)
    undo.callback(extents.close_adopted)
    return engine, extents
