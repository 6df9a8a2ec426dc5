"""The bounds of a step from the seconds of its parts, and the formulas of the papers.

ZeRO-Infinity (arXiv 2104.07857), section 4: state that is moved at ``bandwidth`` for each use lets
a device work at ``ait * bandwidth / (ait * bandwidth + peak)`` of its speed, if nothing overlaps;
``ait`` are the operations for each byte moved. FastPersist (arXiv 2406.13768), section 4.2: a
checkpoint is cut evenly over writers, and takes what the slowest SSD takes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBounds:
    """A step of which each part works for so many ``seconds`` when nothing else does.

    ``together_seconds`` are what several parts take that share something: reads and writes an SSD.
    """

    seconds: Mapping[str, float]
    together_seconds: float = 0.0

    @property
    def least_seconds(self) -> float:
        """If everything overlaps."""
        return max(*self.seconds.values(), self.together_seconds)

    @property
    def most_seconds(self) -> float:
        """If nothing does."""
        return sum(self.seconds.values())

    @property
    def limit(self) -> str:
        """The part that works longest."""
        return max(self.seconds, key=lambda part: self.seconds[part])


def disk_seconds(
    read: float, written: float, *, ssd_read: float, ssd_write: float, ssd_together: float
) -> tuple[dict[str, float], float]:
    """Seconds of reads and of writes, one after the other, and of both at once."""
    parts = {"reads": read / ssd_read, "writes": written / ssd_write}
    return parts, max(*parts.values(), (read + written) / ssd_together)


@dataclass(frozen=True, slots=True, kw_only=True)
class Intensity:
    """Operations for each byte moved, of the three kinds of state (section 4.1)."""

    parameters: float
    optimizer: float
    activations: float


def intensity(*, tokens: int, batch: float, hidden: int, interval: int = 1) -> Intensity:
    """``batch`` sequences of ``tokens`` on a rank; activations are kept every ``interval`` layers.

    Parameters and gradients: seq x bsz. Optimizer states: seq x bsz / 4. Activation checkpoints:
    24 x hidden x interval.
    """
    return Intensity(
        parameters=tokens * batch,
        optimizer=tokens * batch / 4,
        activations=24.0 * hidden * interval,
    )


def efficiency(ait: float, bandwidth: float, peak: float) -> float:
    """Part of ``peak`` operations a second that is reached, with ``bandwidth`` bytes a second."""
    work = ait * bandwidth
    return 1.0 if work == float("inf") else work / (work + peak)


def save_seconds(
    num_bytes: int,
    *,
    writers: Sequence[int],
    ssd_write: float,
    writer_limit: float = float("inf"),
) -> float:
    """Until a checkpoint is written by ``writers[k]`` ranks of node ``k``, whose SSDs write so
    much a second together; one rank writes ``writer_limit`` at most.

    The checkpoint is cut evenly over all writers, so a node's part goes by how many it has.
    """
    total = sum(writers)
    slowest = 0.0
    for count in writers:
        if count:
            part = -(-num_bytes * count // total)
            slowest = max(slowest, part / min(ssd_write, count * writer_limit))
    return slowest
