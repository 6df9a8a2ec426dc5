"""Who has weights in place: running forwards and operations, and the parameters that they hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from types import FrameType

from torch import nn

number_of_next = count().__next__
"""Numbers of frames, of all of the process, in the order in which they begin."""


@dataclass(slots=True, eq=False)
class Hold:
    """Parameters that have their weights in place until it is given up."""

    indices: Sequence[int]
    nbytes: int = 0
    """What it takes of the room for parameters accessed outside their modules."""


@dataclass(slots=True, eq=False)
class Frame:
    """A forward of ``module``, or an operation, that runs in ``call``."""

    module: nn.Module | None
    own: Hold
    call: FrameType
    is_compiled: bool = False
    """Its own parameters have the class that they came with."""
    outside: dict[int, Hold] = field(default_factory=dict)
    """The oldest first."""
    number: int = field(default_factory=number_of_next)


def numbers_of(
    has_ended: Callable[[FrameType], bool],
    *stacks: Mapping[int, Sequence[Frame]],
    but: Collection[int] = (),
) -> set[int]:
    """Of the frames that have not ended, of stacks by thread, and of all threads ``but`` these."""
    return {
        frame.number
        for frames_of in stacks
        for thread, frames in [*frames_of.items()]
        if thread not in but
        for frame in [*frames]
        if not has_ended(frame.call)
    }
