"""Lets the contestants take turns: save, forget the page cache, load, check, remove.

Invariants: one contestant has files at a time, and they are gone before the next one starts; the
order is reversed from run to run, so that no system always comes after the same one; what was
loaded is compared with what was saved before a time counts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from checkpoint.bench.conditions.pagecache import PageCache
from checkpoint.bench.conditions.scratch import DiskSpaceError, Scratch
from checkpoint.bench.conditions.workload import State, gpt_workload
from checkpoint.bench.measure.schedule import Contestant

REHEARSAL_BYTES = 4 << 20
_PAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Sample:
    """One save and one load. The bytes are those that were moved, which may be rounded."""

    saved_bytes: int
    returned_seconds: float
    durable_seconds: float
    loaded_bytes: int
    load_seconds: float


@dataclass(slots=True)
class Row:
    """A contestant and its samples, one a run. `failure` says why there are no more."""

    contestant: Contestant
    samples: list[Sample] = field(default_factory=list)
    failure: str | None = None


OnStep = Callable[[str, int], None]
"""Called with the contestant at work, and with the bytes that it has saved and loaded since. What
it raises ends the measurement.
"""


class Measurement:
    """All runs of all contestants. `rows` grow as it goes on, and are worth reading at any time."""

    def __init__(
        self,
        contestants: Sequence[Contestant],
        states: Sequence[State],
        scratch: Scratch,
        cache: PageCache,
    ) -> None:
        self.rows = [Row(contestant) for contestant in contestants]
        self._states = states
        self._scratch = scratch
        self._cache = cache

    def rehearse(self, on_step: OnStep) -> None:
        """Lets everybody save and load a small state once, and throws the times away.

        What cannot work shows before minutes have gone by, and what takes time once (imports,
        compilers) has taken it. Raises what `run` raises.
        """
        try:
            self._take_turns(self.rows, [State(gpt_workload(REHEARSAL_BYTES))], on_step)
        finally:
            for row in self.rows:
                row.samples.clear()

    def run(self, runs: int, on_step: OnStep) -> None:
        """Adds one sample per run to every row.

        A peer that fails has that written in its row and is left out from then on. Raises what
        anybody else raises: OSError, CheckError for bytes that did not come back, DiskSpaceError.
        """
        limits = [row for row in self.rows if row.contestant.role == "limit"]
        others = [row for row in self.rows if row.contestant.role != "limit"]
        for number in range(runs):
            turn = others if number % 2 == 0 else others[::-1]
            self._take_turns([*limits, *turn], self._states, on_step)

    def _take_turns(self, rows: Sequence[Row], states: Sequence[State], on_step: OnStep) -> None:
        for row in rows:
            state = states[row.contestant.workload % len(states)]
            on_step(row.contestant.system.name, 0)
            if row.failure is None:
                self._try(row, state, on_step)
            on_step(row.contestant.system.name, 2 * state.nbytes)

    def _try(self, row: Row, state: State, on_step: OnStep) -> None:
        try:
            row.samples.append(self._measure(row.contestant, state))
        except DiskSpaceError:
            raise
        except Exception as error:  # of whatever kind: a peer is a library of others
            if row.contestant.role != "peer":
                raise
            # An interrupt may be what a peer has made an error of.
            on_step(row.contestant.system.name, 0)
            row.failure = f"{type(error).__name__}: {error}"
            state.fill()

    def _measure(self, contestant: Contestant, state: State) -> Sample:
        gc.collect()  # what others left would be collected on this one's time
        system, directories = contestant.system, contestant.directories
        needed = needed_bytes(contestant, state.nbytes, len(state.tensors))
        with self._scratch.place(directories, needed) as place:
            saved = system.save(state, place)
            self._cache.forget(place.folders)
            if system.loads_live:
                state.clear()
            loaded = system.load(state, place)
            if loaded.tensors is not None:
                state.check(loaded.tensors)
        return Sample(
            saved.nbytes,
            saved.returned_seconds,
            saved.durable_seconds,
            loaded.nbytes,
            loaded.seconds,
        )


@contextmanager
def old_objects_set_aside() -> Iterator[None]:
    """The garbage collector passes over what exists now; else that would take time every time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def needed_bytes(contestant: Contestant, nbytes: int, num_tensors: int) -> int:
    """Room that a contestant takes in each of its directories: its share and what goes with it."""
    share = -(-nbytes // len(contestant.directories))
    return share + share // 50 + num_tensors * _PAGE_BYTES + (4 << 20)
