"""A small ext4 of its own, on a loop device over a file in memory: disks that are really full."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def unavailable_reason() -> str | None:
    """Why no loop file system can be made here; None when one can."""
    if os.geteuid() != 0:
        return "needs root, to mount a loop device"
    for program in ("mkfs.ext4", "losetup", "mount", "umount"):
        if shutil.which(program) is None:
            return f"needs {program}"
    try:
        with loop_mount(4 << 20):
            return None
    except subprocess.CalledProcessError as error:
        return f"needs loop devices: {error.stderr.strip()}"


@contextmanager
def loop_mount(nbytes: int) -> Iterator[Path]:
    """An empty ext4 of `nbytes`, all of it for users; gone with all it holds at the end."""
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    with (
        tempfile.TemporaryDirectory(dir=memory, prefix="aio-loop-") as images,
        tempfile.TemporaryDirectory(prefix="aio-mount-") as mount_point,
    ):
        image = Path(images, "image")
        image.touch()
        os.truncate(image, nbytes)
        _run("mkfs.ext4", "-q", "-F", "-m", "0", "-O", "^has_journal", str(image))
        device = _run("losetup", "--find", "--show", str(image)).strip()
        try:
            _run("mount", device, mount_point)
            try:
                yield Path(mount_point)
            finally:
                _run("umount", mount_point)
        finally:
            _run("losetup", "--detach", device)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
