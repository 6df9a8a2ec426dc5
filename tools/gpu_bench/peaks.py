"""The most memory that a process had, on the device and on the host."""

from __future__ import annotations

from pathlib import Path

import torch


def reset_peaks(device: str) -> None:
    """From now on peaks of the device count, and of the host where the kernel lets them."""
    if device != "cpu":
        torch.cuda.reset_peak_memory_stats()
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return  # the peak is that of the whole life then, which is no less


def device_peaks(device: str) -> dict[str, int]:
    """Bytes since the last reset: ``allocated`` in tensors, ``reserved`` by torch; ``driver``, what
    the driver has in use on the device now, that of other processes too. Of a CPU nothing.
    """
    if device == "cpu":
        return {}
    free, total = torch.cuda.mem_get_info()
    return {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "driver": total - free,
    }


def host_peak_bytes() -> int:
    """The most that was resident at once (``VmHWM``)."""
    return _status("VmHWM")


def host_bytes() -> int:
    """What is resident now."""
    return _status("VmRSS")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {name}")
