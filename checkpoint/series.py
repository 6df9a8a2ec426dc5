"""The order in which checkpoints of one folder were saved: `<root>/step-<step>` each, by `saved` of
their manifests.

Clocks are set back, and other hosts have others. So whatever saves, the time that a manifest says
is decided here: beside other steps it is later than that of each of them, whatever the clock says.

Invariants: of two saves to steps of one root, one after the other, the second has the later time;
what this process saved last in a root is never older than what is kept there.
"""

from __future__ import annotations

import logging
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from checkpoint.directory.generations import owns_stripes
from checkpoint.directory.locate import peek_saved, peek_uuid, read_manifest
from checkpoint.errors import CorruptCheckpointError, IncompleteCheckpointError
from checkpoint.format.manifest import MANIFEST_NAME
from checkpoint.format.records import MAX_SIZE
from checkpoint.format.rules import is_uuid

logger = logging.getLogger(__name__)

_MAX_DIGITS = 19
"""Of a step: nanoseconds since 1970 are one too."""
_NAME = re.compile(rf"step-(0|[1-9][0-9]{{0,{_MAX_DIGITS - 1}}})")
_MAX_SAVES = 1024
"""So many saves of this process are remembered."""
_TOLERANCE = 10**9
"""Nanoseconds that clocks may differ by without a word."""


def step_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is or would be. Raises ValueError for what is no step."""
    if type(step) is not int or step < 0:
        raise ValueError(f"step={step!r} is not a number of steps; give an int, 0 or more")
    if step >= 10**_MAX_DIGITS:
        raise ValueError(f"step={step} has more than {_MAX_DIGITS} digits")
    return root / f"step-{step}"


def steps_in(root: Path) -> list[int]:
    """Every step there is something of, ascending. Raises OSError for what cannot be listed."""
    matches = [_NAME.fullmatch(entry.name) for entry in root.iterdir()]
    return sorted(int(match[1]) for match in matches if match is not None)


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """The time that a save of this process was given, beside the steps of these roots."""

    saved: int
    uuid: str
    roots: tuple[Path, ...]


_given: list[_Given] = []
"""The last ones, in order, those too that still run and that no manifest speaks of. Only what is
one step is done to it: without a lock, nobody is kept waiting by what a collector calls.
"""
_told: dict[Path, object] = {}
"""Roots whose clocks somebody was told of."""


def _take(saved: int, uuid: str, roots: tuple[Path, ...]) -> int:
    """The time for a save: this one, or one behind all that were given in these roots before."""
    while True:
        mine = _Given(saved, uuid, roots)
        _given.append(mine)
        last = max(_times_before(mine), default=-1)
        del _given[:-_MAX_SAVES]
        if last < saved:
            return saved
        saved = last + 1


def _times_before(mine: _Given) -> Iterator[int]:
    for one in takewhile(lambda one: one is not mine, list(_given)):
        # A clock that went to the end of time and was set right again is to be forgotten.
        if one.saved < MAX_SIZE and not set(one.roots).isdisjoint(mine.roots):
            yield one.saved


def time_of_save(path: str | os.PathLike[str], uuid: str) -> int:
    """When save `uuid` to `path` is said to be: now, in nanoseconds since 1970, or, where that is
    not later than all steps beside it, just behind the last of them. One process of a save decides.

    Raises ValueError for a time that no manifest can say.
    """
    now = time.time_ns()
    places = _places(Path(path))
    roots = tuple(place.parent for place in places if _NAME.fullmatch(place.name))
    beside = max((_last_in(root, now) for root in roots), default=0)
    saved = _take(max(now, beside + 1), uuid, roots)
    if saved > MAX_SIZE:
        raise ValueError(
            f"saved {saved} ns after 1970 is more than the {MAX_SIZE} that a manifest can say; set "
            "the clock, and remove checkpoints of the series that were saved while it was wrong"
        )
    return saved


def _places(path: Path) -> Iterator[Path]:
    """Where a checkpoint is a step: a series may have a link to it, and it be one of another."""
    absolute = path.absolute()
    listed = absolute.parent.resolve() / absolute.name
    yield listed
    if (resolved := path.resolve()) != listed:
        yield resolved


def _last_in(root: Path, now: int) -> int:
    """When the newest step was saved, where that is not before `now`; else 0 or any before."""
    paths = [step_path(root, step) for step in _listed(root)]
    # Twice, of one that says nothing: it may be that it could not be read for a moment.
    claimed = [(peek_saved(path) or peek_saved(path) or 0, path) for path in paths]
    own = {one.saved for one in list(_given) if root in one.roots}
    for saved, path in sorted(claimed, reverse=True):
        if saved < now or saved in own:  # what this process wrote need not be read
            return saved
        # A damaged manifest may claim any time, and what is saved next has to be later.
        for _ in range(2):
            with suppress(OSError, CorruptCheckpointError, IncompleteCheckpointError):
                saved = read_manifest(path).saved
                warn_if_ahead(path, saved)
                return saved
    return 0


def _listed(root: Path) -> list[int]:
    """`steps_in`; none where it is missing, or not to be listed: nobody can order it either then.
    That is asked twice, for it may be so for a moment.
    """
    for _ in range(2):
        with suppress(OSError):
            return steps_in(root)
    return []


def warn_if_ahead(path: Path, saved: int) -> None:
    """Tells, once for each root, of a checkpoint of a time that has not come yet."""
    mine, now = object(), time.time_ns()
    if saved > now + _TOLERANCE and _told.setdefault(path.parent, mine) is mine:
        logger.warning(
            "%s says that it was saved %.0f s after what the clock says now: the clock was set "
            "back, or that of another host is ahead. Until then saves beside it get times just "
            "behind it, by which they are in order",
            path,
            (saved - now) / 1e9,
        )


@dataclass(frozen=True, slots=True, order=True)
class Finished:
    """A checkpoint that is whole, ordered by when it says it was saved."""

    saved: int
    step: int
    uuid: str
    changed: int
    """When its manifest came to be here, by the clock of the file system."""


def changed(checkpoint: Path) -> int:
    """`Finished.changed`. Raises OSError."""
    return (checkpoint / MANIFEST_NAME).stat().st_ctime_ns


def outdated(
    root: Path, finished: Sequence[Finished], keep: int, keep_every: int | None
) -> list[Finished]:
    """What is to be removed: neither among the `keep` that were saved last nor a step that is a
    multiple of `keep_every`. What is known to be newer than its time says stays, with a warning.
    Copies of a step are one save together: those without data of their own need those of the step.
    What a step that is a link leads to is one of them, for links stay and are to be loaded; and so
    is what a step reads that is damaged, or cannot be read, for those stay as well.
    Of copies those come first that are nothing without the others, see `_needed`.
    """
    ordered = sorted(finished)
    last = list(dict.fromkeys(one.uuid for one in reversed(ordered)))[:keep]
    kept = [one for one in ordered if one.uuid in last]
    old = [one for one in ordered if one.uuid not in last]
    staying = _newer_than_said(old, kept)
    apart = {one.uuid for one in old if keep_every and one.step % keep_every == 0}
    apart.update(_held(root, finished) if old else ())
    for one in staying:
        if one.uuid in apart:
            continue
        logger.warning(
            "%s stays: by its manifest it was saved before the %d that are kept, and it came after "
            "some of them: it was saved beside them, or the clocks of hosts, or of now and then, "
            "disagree. The next save is later than all of these",
            step_path(root, one.step),
            keep,
        )
    apart.update(one.uuid for one in staying)
    removed = [one for one in old if one.uuid not in apart]
    saves = Counter(one.uuid for one in removed)
    return sorted(removed, key=lambda one: saves[one.uuid] > 1 and _needed(root, one))


def _needed(root: Path, one: Finished) -> int:
    """How much other copies of a step need this one: what they are would not be told any more
    without the manifest that theirs is a link to, nor without the data on stripes that they read.
    """
    path = step_path(root, one.step)
    if (path / MANIFEST_NAME).is_symlink():
        return 0
    with suppress(OSError):
        return 1 + owns_stripes(path, one.uuid)
    return 2


def _held(root: Path, finished: Sequence[Finished]) -> set[str]:
    """The saves that steps have, or lead to, which stay whatever they are: links, and steps that
    are damaged or cannot be read, be it for a moment. The names of what lies there tell as well.
    """
    root = root.resolve()
    judged = {step_path(root, one.step): one.uuid for one in finished}
    found = set[str]()
    for path in (step_path(root, step) for step in steps_in(root)):
        if path not in judged:
            leads_to = judged.get(Path(os.path.realpath(path)))
            found.update(filter(None, (leads_to, peek_uuid(path))))
            with suppress(OSError):
                found.update(entry.name for entry in path.iterdir() if is_uuid(entry.name))
    return found


def _newer_than_said(old: Sequence[Finished], kept: Sequence[Finished]) -> list[Finished]:
    """Of what is `old` by its time: what this process saved after one that is kept, and what came
    to be here last of all. Others that are kept for a time that has not come yet do not count.
    """
    given = list(_given)
    turns = {one.uuid: turn for turn, one in enumerate(given)}
    now = time.time_ns() + _TOLERANCE
    told = [one for one in kept if one.saved <= now or one.uuid in turns]
    first = min((turns[one.uuid] for one in told if one.uuid in turns), default=len(given))
    newest = max((one.changed for one in told), default=0)
    last = sorted(old, key=lambda one: (one.changed, one.saved))[-1:]
    staying = [one for one in old if turns.get(one.uuid, -1) > first]
    return staying + [one for one in last if one.changed > newest]


def check_kept(keep: int | None, keep_every: int | None) -> None:
    """Raises TypeError or ValueError for numbers that say nothing of what is to be kept."""
    for name, value in (("keep", keep), ("keep_every", keep_every)):
        if value is not None and type(value) is not int:
            raise TypeError(f"{name}={value!r} is no int; give int({value!r})")
    if keep is not None and keep < 1:
        raise ValueError(f"keep={keep} would remove what was just saved; give 1 or more")
    if keep_every is not None and keep_every < 1:
        raise ValueError(f"keep_every={keep_every} is not a number of steps")
