"""One SSD of the rig: an ext4 file system on a loop device over a file in memory.

A device is found again by the name of its image, so nothing has to be written down to remove what
a killed process left. What is made here is not limited yet (byte_limit.py).
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from byte_limit import mounts, retry

logger = logging.getLogger(__name__)

PROGRAMS = ("mkfs.ext4", "losetup", "mount", "umount")


@dataclass(frozen=True, slots=True)
class Ssd:
    """Where it is mounted, and its loop device."""

    directory: Path
    device: str

    @property
    def number(self) -> str:
        """The device as "major:minor"."""
        status = Path(self.device).stat()
        return f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"


def make_ssd(image: Path, directory: Path, size_bytes: int, *, preallocate: bool) -> Ssd:
    """Makes the image, a file system in it, and mounts that at `directory`, which must be new.

    Raises OSError naming the step that failed; what was made until then is there, to be found.
    """
    with image.open("xb") as file:
        if preallocate:
            _write_zeros(file, size_bytes)
        file.truncate(size_bytes)
    # Nothing is left for the kernel to initialise behind a measurement's back.
    options = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
    run_program("mkfs.ext4", "-q", "-F", "-m", "0", "-i", "65536", "-E", options, str(image))
    device = run_program("losetup", "--find", "--show", str(image)).strip()
    directory.mkdir(parents=True)
    run_program("mount", "-o", "noatime", device, str(directory))
    return Ssd(directory, device)


def _write_zeros(file: BinaryIO, nbytes: int) -> None:
    """Writes every page. `fallocate` alone takes pages and leaves clearing them, and on a virtual
    machine the host's finding memory for them, to the first write: one that is measured.
    """
    zeros = bytes(4 << 20)
    while file.tell() < nbytes:
        file.write(zeros[: nbytes - file.tell()])


def loop_devices(images: Path) -> list[str]:
    """Loop devices over files in a folder, also over such as have been deleted since."""
    listed = json.loads(run_program("losetup", "--json", "--list") or "{}")
    return [
        entry["name"]
        for entry in listed.get("loopdevices", [])
        if str(entry["back-file"]).startswith(f"{images}/")
    ]


def find_ssds(images: Path) -> list[Ssd]:
    """What is mounted from images in a folder, by the names of the mount points."""
    devices = loop_devices(images)
    found = [Ssd(mount.path, mount.source) for mount in mounts() if mount.source in devices]
    return sorted(found, key=lambda ssd: (len(ssd.directory.name), ssd.directory.name))


def remove_device(device: str) -> None:
    """Unmounts a loop device wherever it is mounted and detaches it.

    What is still in use disappears with its last user, with a warning. Raises OSError.
    """
    for mount in mounts():
        if mount.source == device:
            _unmount(mount.path)
    run_program("losetup", "--detach", device)


def _unmount(directory: Path) -> None:
    def unmount() -> None:
        run_program("umount", str(directory))

    try:
        retry(unmount, times=10)
    except OSError as error:
        logger.warning("%s; detached, it is gone when nothing uses it any more", error)
        run_program("umount", "--lazy", str(directory))


def run_program(*command: str) -> str:
    """What a program printed; OSError with what it complained of if it failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split()) or f"it ended with {done.returncode}"
        raise OSError(f"`{' '.join(command)}` failed: {said}")
    return done.stdout
