"""The formulas of the papers, as a check beside the replay.

ZeRO-Infinity (arXiv 2104.07857), section 4: state that is moved at ``bandwidth`` for each use lets
a device work at ``ait * bandwidth / (ait * bandwidth + peak)`` of its speed, if nothing overlaps;
``ait`` are the operations for each byte moved. FastPersist (arXiv 2406.13768),
section 4.2: a checkpoint is cut evenly over writers, and takes what the slowest SSD takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


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


def needed_bandwidth(ait: float, peak: float, wanted: float) -> float:
    """Bytes a second for each device that an efficiency of ``wanted`` (below 1) takes."""
    return wanted * peak / (ait * (1 - wanted))


def shares_of(num_bytes: int, num_writers: int) -> list[int]:
    """Bytes of each writer; they differ by one at most."""
    least, more = divmod(num_bytes, num_writers)
    return [least + (index < more) for index in range(num_writers)]


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
