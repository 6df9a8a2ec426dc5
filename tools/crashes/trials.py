"""Puts states of a disk into a folder, and looks whether what a scenario promises holds of them."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from crashes.disk import Disk, History, State, Tree
from crashes.promises import Promise, Scenario
from crashes.recording import record
from crashes.scenarios import PROGRAM
from crashes.states import Window, states, windows

_OWNER_NAME = "owner.json"


@dataclass
class Counts:
    """What was tried of a scenario, and what did not hold."""

    effects: int = 0
    syncs: int = 0
    states: int = 0
    """That were enumerated."""
    different: int = 0
    """Of these, by what a reader finds and what it was promised: those that were tried."""
    faults: list[str] = field(default_factory=list)


def recorded(scenario: Scenario, top: Path) -> History:
    """Runs a scenario in a process of its own below `top`, which is made. Raises RuntimeError."""
    for name in ("", *scenario.directories):
        (top / name).mkdir()
    command = [sys.executable, str(PROGRAM), "--record", str(top), "--scenario", scenario.name]
    with tempfile.NamedTemporaryFile() as output:
        return record(command, top, Path(output.name))


def try_out(scenario: Scenario, top: Path, *, count: int, seed: int) -> Counts:
    """Records a scenario below `top` and tries about `count` states of the disk there."""
    history = recorded(scenario, top)
    counts = Counts(effects=len(history.effects), syncs=history.num_syncs)
    disk, seen = Disk(history), set[tuple[bytes, Promise]]()
    for window, state in _states(history, count, seed):
        counts.states += 1
        promise, tree = Promise.of(window.said), disk.tree(state)
        key = tree.digest(), promise
        if key in seen:
            continue
        seen.add(key)
        _put(tree, history, top)
        faults = scenario.faults(top, promise)
        if faults:
            counts.faults.append(f"{'; '.join(faults)}: {_described(history, window, state)}")
    counts.different = len(seen)
    return counts


def _states(history: History, count: int, seed: int) -> Iterator[tuple[Window, State]]:
    """Those of all windows, as many of each; what few-state windows leave goes to the later."""
    found = list(windows(history))
    for number, window in enumerate(found):
        share = count // (len(found) - number)
        for state in states(history, window, share, seed + number):
            count -= 1
            yield window, state


def _put(tree: Tree, history: History, top: Path) -> None:
    """Makes what is below `top` this tree. The directories that were there before are the same, by
    their inodes.
    """
    _clear(top, set(history.directories))
    made: dict[int, Path] = {}
    for name, content in tree.contents.items():
        path, inode = top / name, tree.inodes[name]
        if content is None:
            path.mkdir(exist_ok=name in history.directories)
        elif inode in made:
            path.hardlink_to(made[inode])
        else:
            path.write_bytes(content.data)
            made[inode] = path
    for name in tree.contents:
        if Path(name).name == _OWNER_NAME:
            _tell_owner(top / name)


def _clear(top: Path, kept: set[str]) -> None:
    for entry in top.iterdir():
        if entry.name in kept:
            _clear(entry, set())
        elif entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _tell_owner(path: Path) -> None:
    """A list of stripes is known by its inode and the time of its last change, which nobody can
    put back: the new ones take the place of those that were recorded.
    """
    try:
        owner = json.loads(path.read_text())
        status = Path(owner["stripes"]).stat()
    except (ValueError, FileNotFoundError):
        return
    owner |= {"inode": status.st_ino, "changed": status.st_ctime_ns}
    path.write_text(json.dumps(owner))


def _described(history: History, window: Window, state: State) -> str:
    names = [history.effects[number].what for number in window.open]
    there = [
        f"{name} (torn)" if state[number] is not None else name
        for number, name in zip(window.open, names, strict=True)
        if number in state
    ]
    missing = [name for number, name in zip(window.open, names, strict=True) if number not in state]
    return (
        f"behind {window.said[-1] if window.said else 'the beginning'}, "
        f"{len(window.certain)} effects certain, there: {there}, not there: {missing}"
    )
