"""The machine that was measured on: processors, versions, disks."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from aio import Engine

_PACKAGES = ("infinity-offload", "torch", "safetensors", "zarr", "deepspeed")


def describe_machine() -> dict[str, Any]:
    """Processor, memory, kernel and versions, for JSON. No name of the machine."""
    return {
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.machine()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_directory(directory: Path, scratch_folder: Path) -> dict[str, Any]:
    """Its file system and how it takes direct I/O, found out with a file in `scratch_folder`."""
    mounts = [
        partition
        for partition in psutil.disk_partitions(all=True)
        if directory.is_relative_to(partition.mountpoint)
    ]
    usage = psutil.disk_usage(str(directory))
    probe = scratch_folder / "probe"
    with Engine(queue_depth=1) as engine, engine.open(probe, "w") as file:
        direct = {
            "direct_io": file.direct,
            "memory_alignment": file.memory_alignment,
            "offset_alignment": file.offset_alignment,
        }
        backend = engine.describe().backend
    probe.unlink()
    inner = max(mounts, key=lambda mount: len(mount.mountpoint), default=None)
    return {
        "path": str(directory),
        "file_system": inner.fstype if inner else "unknown",
        "total_bytes": usage.total,
        "free_bytes": usage.free,
        "auto_backend": backend,
        **direct,
    }
