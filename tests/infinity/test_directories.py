"""Directories for ``offload``: missing, full, read-only, in memory, several, in any form."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import infinity
from aio import AioError
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_values, values_of

SHM = Path("/dev/shm")


def test_a_missing_directory_is_named(stack: Stack, tmp_path: Path) -> None:
    for host_memory in (WHOLE, "12MB"):
        for wrong in (tmp_path / "missing", tmp_path / "missing" / "deeper"):
            with (
                pytest.raises(FileNotFoundError, match=f"{wrong} does not exist; create it"),
                infinity.offload(stack, wrong, host_memory=host_memory),
            ):
                pass
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_place_of_a_directory_is_named(stack: Stack, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(NotADirectoryError, match="file is not a directory"),
        infinity.offload(stack, tmp_path / "file"),
    ):
        pass


def test_a_directory_given_twice_is_refused(stack: Stack, nvme: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(nvme)
    for twice in ([nvme, nvme], [nvme, tmp_path / "link"], [nvme, nvme / ".." / "nvme"]):
        with (
            pytest.raises(ValueError, match="names a directory twice"),
            infinity.offload(stack, twice),
        ):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_may_not_be_written_is_named(stack: Stack, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with (
        pytest.raises(PermissionError, match="not writable"),
        infinity.offload(stack, tmp_path),
    ):
        pass
    tmp_path.chmod(0o700)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 8 MiB on a loop device, unmounted afterwards."""
    image, directory = tmp_path / "image", tmp_path / "disk"
    directory.mkdir()
    with ExitStack() as stack:
        with image.open("wb") as file:
            file.truncate(8 << 20)
        for command in (
            ["mkfs.ext4", "-q", "-m0", str(image)],
            ["mount", "-o", "loop", str(image), str(directory)],
        ):
            if shutil.which(command[0]) is None:
                pytest.skip(f"{command[0]} is not installed")
            made = subprocess.run(command, capture_output=True, text=True, check=False)
            if made.returncode:
                pytest.skip(f"cannot {command[0]} here: {made.stderr.strip()}")
        stack.callback(subprocess.run, ["umount", str(directory)], check=True)
        yield directory


@pytest.mark.root
def test_a_read_only_disk_is_named(stack: Stack, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with (
        pytest.raises(PermissionError, match=f"{small_disk} is not writable"),
        infinity.offload(stack, small_disk),
    ):
        pass


@pytest.mark.root
def test_a_full_disk_is_an_error_before_anything_changes(stack: Stack, small_disk: Path) -> None:
    before = sorted(small_disk.rglob("*"))
    with (
        pytest.raises(OSError, match="No space left on device") as error,
        infinity.offload(stack, small_disk, host_memory=least_budget(Stack, small_disk)),
    ):
        pass
    assert error.value.errno == errno.ENOSPC
    assert str(small_disk) in str(error.value.filename)
    assert sorted(small_disk.rglob("*")) == before


def test_a_limit_on_file_sizes_is_an_error_before_anything_changes(
    stack: Stack, nvme: Path
) -> None:
    least = least_budget(Stack, nvme)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with (
            pytest.raises(AioError, match="File too large") as error,
            infinity.offload(stack, nvme, host_memory=least),
        ):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.errno == errno.EFBIG


@pytest.mark.skipif(not SHM.is_dir(), reason="there is no /dev/shm")
def test_a_file_system_in_memory_works(tmp_path: Path) -> None:
    """tmpfs has no direct I/O, or takes the flag and ignores it."""
    directory = SHM / f"infinity-test-{os.getpid()}"
    directory.mkdir()
    try:
        results = []
        for host_memory in (WHOLE, least_budget(Stack, directory)):
            model = seeded(Stack)
            with infinity.offload(model, directory, host_memory=host_memory) as offloaded:
                for step in range(3):
                    vector_loss(model, step).backward()
                    offloaded.step()
            results.append(values_of(model))
        assert same_values(results[0], results[1])
        assert list(directory.iterdir()) == []
    finally:
        shutil.rmtree(directory)


def test_several_directories_share_the_state(tmp_path: Path) -> None:
    directories = [tmp_path / name for name in ("one", "two", "three")]
    for directory in directories:
        directory.mkdir()
    results = []
    for host_memory in (WHOLE, least_budget(Stack, directories)):
        model = seeded(Stack)
        with infinity.offload(model, directories, host_memory=host_memory) as offloaded:
            for step in range(3):
                vector_loss(model, step).backward()
                offloaded.step()
            files = [sum(1 for _ in directory.rglob("*.swap")) for directory in directories]
            assert files == ([0, 0, 0] if host_memory == WHOLE else [1, 1, 1])
        results.append(values_of(model))
    assert same_values(results[0], results[1])
    assert [path for directory in directories for path in directory.rglob("*")] == []


def test_paths_may_be_text_paths_or_relative(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(nvme.parent)
    for form in (str(nvme), nvme, [nvme], (str(nvme),), "nvme", Path("nvme")):
        with infinity.offload(Stack(), form, host_memory=least_budget(Stack, nvme)):
            monkeypatch.chdir("/")
        monkeypatch.chdir(nvme.parent)
