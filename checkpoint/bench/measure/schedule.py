"""From options to contestants: systems, each with its directories, state and setting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from checkpoint.bench.conditions.arguments import Options, UsageError
from checkpoint.bench.conditions.settings import Setting
from checkpoint.bench.systems.fastpersist import DeepSpeed
from checkpoint.bench.systems.fio import Fio
from checkpoint.bench.systems.peers import Dcp, OneFolder, Safetensors, TorchSave, Zarr
from checkpoint.bench.systems.raw import Raw
from checkpoint.bench.systems.system import Infinity, InfinityAsync, System

Role = Literal["limit", "raw", "infinity", "peer"]

PEERS: dict[str, type[OneFolder]] = {
    peer.name: peer for peer in (TorchSave, Safetensors, Dcp, Zarr, DeepSpeed)
}


@dataclass(frozen=True, slots=True)
class Contestant:
    """A system with all it is given. `workload` counts in the options' workloads.

    Roles: "limit" is raw I/O in one directory alone, of which the disks' limit is made up; "raw"
    other raw I/O; "infinity" this library; "peer" another one, whose failure ends nothing.
    """

    role: Role
    system: System
    directories: tuple[Path, ...]
    workload: int
    setting: Setting | None = None


@dataclass(frozen=True, slots=True)
class Schedule:
    """All that take part, and the systems of "all" that do not, each with the reason."""

    contestants: tuple[Contestant, ...]
    skipped: tuple[tuple[str, str], ...]


def plan_schedule(options: Options) -> Schedule:
    """Raises UsageError for a system that was asked for by name and cannot run here."""
    skipped = tuple(_unavailable(options))
    wanted = [name for name in options.compare if name not in dict(skipped)]
    contestants = [
        *_limits(options),
        *_raw(options, wanted),
        *_infinity(options, wanted),
        *_peers(options, wanted),
    ]
    return Schedule(tuple(contestants), skipped)


def limit_directories(directories: Sequence[Path]) -> list[Path]:
    """One directory of each file system: those share a disk that share a file system."""
    by_device: dict[int, Path] = {}
    for directory in directories:
        by_device.setdefault(directory.stat().st_dev, directory)
    return list(by_device.values())


def _unavailable(options: Options) -> Iterator[tuple[str, str]]:
    for name in options.compare:
        reason = None
        if name in PEERS:
            reason = PEERS[name].unavailable_reason()
        elif name == "fio":
            reason = Fio.unavailable_reason()
        if reason is not None and not options.compare_all:
            raise UsageError(f"--compare {name}: {reason}")
        if reason is not None:
            yield name, reason


def _limits(options: Options) -> Iterator[Contestant]:
    """Each disk alone, with its share of the bytes."""
    used = options.directories[: max(options.stripes)]
    for directory in limit_directories(used):
        raw = Raw(Setting(), num_shares=len(used))
        yield Contestant("limit", raw, (directory,), 0, Setting())


def _raw(options: Options, wanted: Sequence[str]) -> Iterator[Contestant]:
    """All disks at once; with every setting if that is asked for."""
    settings = options.settings if "raw" in wanted or "fio" in wanted else (Setting(),)
    for num_directories in options.stripes:
        directories = options.directories[:num_directories]
        for setting in settings:
            if num_directories > 1 or "raw" in wanted or "fio" in wanted:
                yield Contestant("raw", Raw(setting), directories, 0, setting)
            if "fio" in wanted:
                yield Contestant("peer", Fio(setting), directories, 0, setting)


def _infinity(options: Options, wanted: Sequence[str]) -> Iterator[Contestant]:
    for workload in range(len(options.workloads)):
        for num_directories in options.stripes:
            directories = options.directories[:num_directories]
            for setting in options.settings:
                system = Infinity(setting, verify=options.verify, live=options.live)
                yield Contestant("infinity", system, directories, workload, setting)
            if "async" in wanted:
                late = InfinityAsync(Setting(), verify=options.verify, live=options.live)
                yield Contestant("peer", late, directories, workload)


def _peers(options: Options, wanted: Sequence[str]) -> Iterator[Contestant]:
    for workload in range(len(options.workloads)):
        for name in wanted:
            if name in PEERS:
                yield Contestant("peer", PEERS[name](), options.directories[:1], workload)
