"""The programs that are recorded: each saves again and again, in its way."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from local_ranks import run_ranks
from safetensors.torch import load_file

import checkpoint
from aio import naming
from crashes.promises import (
    KIB,
    Promise,
    Scenario,
    checkpoint_at,
    number_of,
    other_than,
    say_begun,
    say_reported,
    state_of,
)

PROGRAM = Path(__file__).parents[1] / "crash_states.py"
"""Runs a scenario, and each rank of one."""


class Saves(Scenario):
    """Saves to one path, of directories that are not there, over one another. `stripes` are the
    numbers of stripe directories, save by save."""

    def __init__(self, name: str, stripes: Sequence[int] = (0,)) -> None:
        super().__init__(name)
        self._stripes = stripes
        self.directories = _stripe_names(max(stripes))

    def path(self, top: Path) -> Path:
        return top / "runs" / "step"

    def stripes(self, top: Path, number: int) -> list[Path] | None:
        count = self._stripes[(number - 1) % len(self._stripes)]
        return [top / name for name in _stripe_names(count)] or None

    def save(self, top: Path, number: int) -> None:
        checkpoint.save(state_of(number), self.path(top), self.stripes(top, number))

    def found(self, top: Path) -> int:
        return checkpoint_at(self.path(top))

    def left_over(self, top: Path, number: int) -> list[str]:
        faults = other_than(self.path(top), 2) + other_than(top / "runs", 1)
        used = self.stripes(top, number) or []
        for name in self.directories:
            faults += other_than(top / name, int(top / name in used))
        return faults


class AsyncSaves(Saves):
    """Saves in the background; every other one is guarded."""

    def save(self, top: Path, number: int) -> None:
        state = state_of(number)
        guard = None
        if number % 2:
            weight = torch.nn.Parameter(state["large"].view(torch.float64))
            guard = torch.optim.SGD([weight])
        stripes = self.stripes(top, number)
        checkpoint.save_async(state, self.path(top), stripes, guard=guard).result()


class DcpSaves(Saves):
    """Saves of torch.distributed.checkpoint."""

    def save(self, top: Path, number: int) -> None:
        from torch.distributed.checkpoint.state_dict_saver import save

        writer = checkpoint.dcp.StorageWriter(self.path(top), self.stripes(top, number))
        save(state_of(number), storage_writer=writer, no_dist=True)


class RankSaves(Saves):
    """Saves of two ranks, each of which writes a part; what is saved next is of one process."""

    def run(self, top: Path) -> None:
        with tempfile.TemporaryDirectory() as meeting:
            folder = Path(meeting) / "ranks"
            run_ranks(PROGRAM, 2, folder, scenario=self.name, top=str(top))

    def run_rank(self, top: Path) -> None:
        coordinator = checkpoint.GroupCoordinator(torch.distributed.group.WORLD)
        for number in range(1, self.count + 1):
            say_begun(number)
            stripes = self.stripes(top, number)
            checkpoint.save(state_of(number), self.path(top), stripes, coordinator=coordinator)
            say_reported(number)


class KilledSaves(Saves):
    """Every other save is killed in the middle, so the next one has to clean up."""

    count = 4

    def run(self, top: Path) -> None:
        for number in range(1, self.count + 1):
            say_begun(number)
            if number % 2:
                self._be_killed(top, number)
            else:
                self.save(top, number)
                say_reported(number)

    def _be_killed(self, top: Path, number: int) -> None:
        child = os.fork()
        if child == 0:
            try:
                state = {**state_of(number), "killer": _Killer()}
                checkpoint.save(state, self.path(top), self.stripes(top, number))
            finally:
                os._exit(1)
        os.waitpid(child, 0)


class _Killer:
    """A source that ends the process that reads it."""

    dtype = torch.uint8
    shape = (512 * KIB,)

    def read(self, start: int, out: memoryview) -> None:
        if start:
            os._exit(0)


class ManagedSaves(Scenario):
    """A series, of which the last ones are kept: each of these has to be there."""

    count = 4
    keep = 2

    def __init__(self, name: str, *, num_stripes: int = 0, is_async: bool = False) -> None:
        super().__init__(name)
        self.directories = _stripe_names(num_stripes)
        self._is_async = is_async
        self._managers: dict[Path, checkpoint.Manager] = {}

    def manager(self, top: Path) -> checkpoint.Manager:
        stripes = [top / name for name in self.directories] or None
        return checkpoint.Manager(top / "runs", stripes, keep=self.keep)

    def run(self, top: Path) -> None:
        self._managers[top] = self.manager(top)
        super().run(top)

    def save(self, top: Path, number: int) -> None:
        manager = self._managers.get(top) or self.manager(top)
        if self._is_async:
            manager.save_async(number, state_of(number)).result()
        else:
            manager.save(number, state_of(number))

    def found(self, top: Path) -> int:
        manager = self.manager(top)
        try:
            number = number_of(manager.load())
        except FileNotFoundError as error:
            if str(top) not in str(error):
                raise ValueError(f"an error that names nothing: {error!r}") from error
            return 0
        if manager.loaded is None or manager.loaded.step != number or manager.loaded.passed_over:
            raise ValueError(f"{manager.loaded} is said to be loaded, not {number}")
        return number

    def lost(self, top: Path, promise: Promise) -> list[str]:
        faults = super().lost(top, promise)
        for step in range(max(1, promise.begun - self.keep + 1), promise.reported + 1):
            found = checkpoint_at(top / "runs" / f"step-{step}")
            faults += [] if found == step else [f"step {step} is to be kept; {found} is there"]
        return faults

    def left_over(self, top: Path, number: int) -> list[str]:
        steps = self.manager(top).steps()
        faults = [] if len(steps) <= self.keep else [f"steps {steps} are kept"]
        faults += other_than(top / "runs", len(steps))
        for name in self.directories:
            faults += other_than(top / name, len(steps))
        for step in steps:
            faults += other_than(top / "runs" / f"step-{step}", 2)
        return faults


class Exports(Scenario):
    """Exports to one folder, of two shards and of one by turns."""

    def save(self, top: Path, number: int) -> None:
        size = 16 * KIB if number % 2 else 1 << 30
        tensors = {"large": state_of(number)["large"], "more": torch.full((KIB,), number)}
        checkpoint.write_safetensors(tensors, top / "model", max_shard_bytes=size)

    def found(self, top: Path) -> int:
        """By the index, or the single file where there is none."""
        whole, index = (top / "model" / name for name in _EXPORTED)
        files = []
        if index.exists():
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        elif whole.exists():
            files = [whole.name]
        return self._number(top, files) if files else 0

    def _number(self, top: Path, files: Sequence[str]) -> int:
        tensors: dict[str, torch.Tensor] = {}
        for file in files:
            tensors |= load_file(top / "model" / file)
        number = int(tensors["more"][0])
        if not torch.equal(tensors["large"], state_of(number)["large"]):
            raise ValueError(f"the shards {files} are of several exports")
        if not bool((tensors["more"] == number).all()) or len(tensors) != 2:
            raise ValueError(f"what loads of {files} is not what was exported")
        return number

    def lost(self, top: Path, promise: Promise) -> list[str]:
        faults = super().lost(top, promise)
        if (top / "model" / _EXPORTED[0]).exists():  # some readers look for nothing else
            faults += promise.faults(self._number(top, _EXPORTED[:1]))
        return faults

    def left_over(self, top: Path, number: int) -> list[str]:
        return other_than(top / "model", 3 if number % 2 else 2)


_EXPORTED = ("model.safetensors", "model.safetensors.index.json")


class Streams(Scenario):
    """Files that are written as streams."""

    def save(self, top: Path, number: int) -> None:
        with checkpoint.open_stream(top / "state.pt", "wb") as stream:
            torch.save(state_of(number), stream)

    def found(self, top: Path) -> int:
        path = top / "state.pt"
        if not path.exists():
            return 0
        with checkpoint.open_stream(path, "rb") as stream:
            return number_of(torch.load(stream, weights_only=True))

    def left_over(self, top: Path, number: int) -> list[str]:
        return other_than(top, 1)


class Folders(Scenario):
    """Folders of a trainer's files that take one another's place, beside a file of somebody else's.

    Who reads them asks for `recover` first.
    """

    def save(self, top: Path, number: int) -> None:
        from infinity.integrations.published import replacing

        with replacing(top / "trainer" / "model") as folder:
            for name in ("weights", "state"):
                with naming(folder / name):
                    (folder / name).write_bytes(number.to_bytes(4, "little") * KIB)

    def found(self, top: Path) -> int:
        from infinity.integrations.published import recover

        folder = top / "trainer" / "model"
        if folder.parent.exists():
            recover(folder)
        if not folder.exists():
            return 0
        contents = {file.read_bytes() for file in folder.iterdir()}
        number = int.from_bytes(next(iter(contents))[:4], "little")
        if contents != {number.to_bytes(4, "little") * KIB}:
            raise ValueError(f"{folder.name} is no whole folder")
        return number

    def left_over(self, top: Path, number: int) -> list[str]:
        return other_than(top / "trainer", 1) + other_than(top / "trainer" / "model", 2)


class Snapshots(Scenario):
    """Restore points of a model in its block, each in the place of the one before."""

    directories = ("nvme",)

    def run(self, top: Path) -> None:
        model = torch.nn.Linear(40, 40)
        with self._block(model, top) as offloaded:
            for number in range(1, self.count + 1):
                say_begun(number)
                self._take(model, offloaded, number)
                say_reported(number)

    def save(self, top: Path, number: int) -> None:
        model = torch.nn.Linear(40, 40)
        with self._block(model, top) as offloaded:
            self._take(model, offloaded, number)

    def found(self, top: Path) -> int:
        model = torch.nn.Linear(40, 40)
        with self._block(model, top) as offloaded:
            try:
                extra = offloaded.restore("point")
            except FileNotFoundError as error:
                if "point" not in str(error):
                    raise ValueError(f"an error that names nothing: {error!r}") from error
                return 0
        if not all(bool((p == extra).all()) for p in model.parameters()):
            raise ValueError(f"what is restored as {extra} is not what was taken")
        return int(extra)

    def left_over(self, top: Path, number: int) -> list[str]:
        with self._block(torch.nn.Linear(40, 40), top) as offloaded:
            names = [snapshot.name for snapshot in offloaded.snapshots()]
        return [] if names == ["point"] else [f"there are snapshots {names}"]

    @staticmethod
    def _block(model: torch.nn.Module, top: Path) -> Any:
        import infinity

        return infinity.offload(model, top / "nvme", host_memory="64MiB", device="cpu")

    def _take(self, model: torch.nn.Module, offloaded: Any, number: int) -> None:
        with offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(number)
        self._snapshot(offloaded, number)

    def _snapshot(self, offloaded: Any, number: int) -> None:
        offloaded.snapshot("point", extra=number)


class SnapshotsBehind(Snapshots):
    """The same behind training; each is reported when it is known to be durable."""

    def _snapshot(self, offloaded: Any, number: int) -> None:
        offloaded.snapshot("point", extra=number, block=False).result()


def _stripe_names(count: int) -> tuple[str, ...]:
    return tuple(f"ssd{number}" for number in range(count))


SCENARIOS: dict[str, Scenario] = {
    scenario.name: scenario
    for scenario in (
        Saves("save"),
        Saves("striped", [2]),
        Saves("restriped", [2, 0, 1]),
        AsyncSaves("async", [0, 2]),
        KilledSaves("killed", [2]),
        ManagedSaves("manager"),
        ManagedSaves("manager-async", num_stripes=2, is_async=True),
        DcpSaves("dcp", [0, 2]),
        RankSaves("ranks", [2, 0]),
        Exports("export"),
        Streams("stream"),
        Folders("folder"),
        Snapshots("snapshot"),
        SnapshotsBehind("snapshot-behind"),
    )
}
