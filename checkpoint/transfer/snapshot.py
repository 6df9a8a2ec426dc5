"""Copies a state into staging memory ahead of its writing, so that its owner can go on.

The thread that wants its tensors back copies, with helpers; the writer sums and writes behind it.
Where the state is larger than the memory, buffers come back from the writer and the copying goes on
in waves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue

from aio import File, Slab
from aio.process.cgroups import num_processors
from aio.process.threads import LOOK_SECONDS
from checkpoint.format.datafile import ALIGNMENT
from checkpoint.plan.write_runs import Run, Slots
from checkpoint.sheltered import Cancellation, StoppedError
from checkpoint.tensors.copiers import Buffer
from checkpoint.threads import Outcome, Workers, run_all
from checkpoint.transfer.filling import Filler
from checkpoint.transfer.memory import KeptMemory
from checkpoint.transfer.writer import Reap, Runs

COPY_SLOT_BYTES = 8 << 20
"""Of a buffer: large, because nothing has to wait for it to be full."""

_MAX_COPY_THREADS = 4


@dataclass(frozen=True, slots=True)
class _Copy:
    """A run on its way into a buffer."""

    run: Run
    buffer: Buffer
    done: Outcome[None]


class SnapshotSupply:
    """The runs of one file, copied by `copy_all` and taken by the writer."""

    def __init__(
        self, filler: Filler, slots: Slots, slab: Slab, cancellation: Cancellation
    ) -> None:
        self.filler = filler
        self._cancellation = cancellation
        self._slots = slots
        self._free: SimpleQueue[Buffer | None] = SimpleQueue()
        self._copies: SimpleQueue[_Copy | StoppedError | None] = SimpleQueue()
        self._has_ended = False
        buffers = [slab.allocate(slots.nbytes) for _ in range(slots.count)]
        if filler.has_to_copy:
            filler.copier.register(buffers)
        for buffer in buffers:
            self._free.put(buffer)

    def copy_all(self, workers: Workers) -> None:
        """Copies every run as buffers become free. Raises StoppedError after `stop`."""
        copies: list[Outcome[None]] = []
        try:
            for run in self.filler.runs(self._slots.nbytes, memory_alignment=0):
                self._cancellation.check()
                buffer = self._free.get()
                if buffer is None:
                    raise StoppedError
                done = workers.submit(partial(self.filler.copy, run, buffer))
                copies.append(done)
                self._copies.put(_Copy(run, buffer, done))
            self._copies.put(None)
        except BaseException:
            self._copies.put(StoppedError("the copy of the tensors was given up"))
            raise
        finally:
            self._has_ended = True
        for done in copies:
            done.wait()  # what a source raised is the writer's to tell

    def runs(self, file: File, reap: Reap) -> Runs:
        while (copy := self._next(reap)) is not None:
            copy.done.result()
            self.filler.sum(copy.run, copy.buffer)
            yield copy.run, copy.buffer

    def _next(self, reap: Reap) -> _Copy | None:
        """The next copy; while there is none, buffers are brought back for it."""
        copy: _Copy | StoppedError | None
        while True:
            try:
                copy = self._copies.get_nowait()
            except Empty:
                if reap():
                    continue
                copy = self._wait_for_copy()
            if isinstance(copy, StoppedError):
                raise copy
            return copy

    def _wait_for_copy(self) -> _Copy | StoppedError | None:
        """There may have been no memory to say that no other one follows."""
        while True:
            has_ended = self._has_ended
            try:
                return self._copies.get(timeout=LOOK_SECONDS)
            except Empty:
                if has_ended:
                    return StoppedError("the copy of the tensors ended without a word")

    def take_back(self, buffer: Buffer) -> None:
        self._free.put(buffer)

    def stop(self) -> None:
        self._has_ended = True  # also where `copy_all` had no thread to begin on
        self._free.put(None)


class Snapshot:
    """Staging memory for a state, at most `budget_bytes` of it, with a supply per file.

    `memory` is where it is taken from, if it is to be kept for the next one. `check` is called when
    everything has been copied; what it raises is the copy's error.
    """

    def __init__(
        self,
        fillers: Sequence[Filler],
        budget_bytes: int,
        memory: KeptMemory | None,
        check: Callable[[], None],
        cancellation: Cancellation,
    ) -> None:
        self._check = check
        self._copied: Outcome[None] = Outcome()
        shares = _shares([filler.plan.layout.nbytes for filler in fillers], budget_bytes)
        slots = [
            filler.slots(share, None, COPY_SLOT_BYTES)
            for filler, share in zip(fillers, shares, strict=True)
        ]
        self.is_whole = all(
            each.count * each.nbytes >= filler.plan.layout.nbytes
            for filler, each in zip(fillers, slots, strict=True)
        )
        """The memory takes all of the state, so that copying it does not have to wait."""
        # Ranges of a slab end on pages, and so do buffers.
        kept = memory or KeptMemory()
        slab = kept.take(sum(each.count * each.nbytes for each in slots))
        self.supplies = [
            SnapshotSupply(filler, each, slab, cancellation)
            for filler, each in zip(fillers, slots, strict=True)
        ]
        kept.keep(slab)

    def copy(self) -> bool:
        """Copies the state; gives whether its tensors may change. Errors are the writer's. To be
        called again where there was no memory to tell of its end.
        """
        if self._copied.of(self._copy):
            return True
        self.stop()
        return False

    def _copy(self) -> None:
        threads = min(_MAX_COPY_THREADS, num_processors())
        with Workers(threads, "checkpoint-copy") as workers:
            tasks = [partial(supply.copy_all, workers) for supply in self.supplies]
            run_all(tasks, self.stop, "checkpoint-stage")
        self._check()

    def check_copied(self) -> None:
        """Waits until everything has been copied. Raises the copy's error."""
        self._copied.result()

    def stop(self) -> None:
        """Nothing will be taken any more."""
        for supply in self.supplies:
            supply.stop()

    def close(self) -> None:
        """Stops, and lets go of the memory. Idempotent."""
        self.stop()
        self.supplies = []
        self._copied.forget()


@contextmanager
def copy_errors(snapshot: Snapshot | None) -> Iterator[None]:
    """Of a writer that was stopped because the copy failed: what the copy failed of."""
    try:
        yield
    except StoppedError:
        if snapshot is not None:
            snapshot.check_copied()
        raise


def _shares(sizes: Sequence[int], budget_bytes: int) -> list[int]:
    """Of the budget for each file, by size; also a small one gets two buffers, if there is room."""
    least = 2 * ALIGNMENT if budget_bytes >= 2 * ALIGNMENT * len(sizes) else 0
    rest = budget_bytes - least * len(sizes)
    return [least + rest * nbytes // sum(sizes) for nbytes in sizes]
