"""Saves that fail: by errors of the disk, of a source, by death. What was there before survives,
and nothing of the attempt does."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import shutil
import signal
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from tests.checkpoint.trees import assert_same
from tests.support.scripts import Script

ROOT = Path(__file__).parents[2]
MIB = 1 << 20


def state(seed: int, mib: int = 24) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    small = [torch.randn(50, generator=generator) for _ in range(20)]
    return {"big": torch.randn(mib * MIB // 4, generator=generator), "small": small, "seed": seed}


def contents(*folders: Path) -> list[str]:
    """Every file and directory below some folders."""
    return sorted(str(entry) for folder in folders for entry in folder.rglob("*"))


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


class Unreadable:
    """A source that fails when half of it has been read."""

    dtype = torch.uint8
    shape = (40 * MIB,)

    def read(self, start: int, out: memoryview) -> None:
        if start > self.shape[0] // 2:
            raise RuntimeError("the source is gone")


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("striped", [True, False])
def test_a_failing_source_leaves_everything_as_it_was(
    tmp_path: Path, stripes: list[Path], existing: bool, striped: bool
) -> None:
    dirs = stripes if striped else None
    path = tmp_path / "runs" / "step"
    if existing:
        checkpoint.save(state(1), path, dirs)
    before, open_before = contents(tmp_path), descriptors()
    with pytest.raises(RuntimeError, match="the source is gone"):
        checkpoint.save({"x": state(2), "y": Unreadable()}, path, dirs)
    assert contents(tmp_path) == before
    assert descriptors() == open_before
    if existing:
        assert_same(state(1), checkpoint.load(path))


def test_saving_over_a_checkpoint_leaves_one_generation(
    tmp_path: Path, stripes: list[Path]
) -> None:
    path = tmp_path / "step"
    for seed, dirs in enumerate([stripes, None, stripes[:1], stripes]):
        checkpoint.save(state(seed), path, dirs)
        assert_same(state(seed), checkpoint.load(path))
    generations = [entry for entry in contents(tmp_path) if entry.endswith(".safetensors")]
    assert len(generations) == 2
    assert len([entry for entry in path.iterdir() if entry.is_dir()]) == 1


def test_two_saves_to_one_path_at_once_are_refused(tmp_path: Path) -> None:
    class Nested:
        dtype = torch.uint8
        shape = (8,)

        def read(self, start: int, out: memoryview) -> None:
            checkpoint.save({"x": 1}, tmp_path / "step")

    with pytest.raises(BlockingIOError, match="another save"):
        checkpoint.save({"x": Nested()}, tmp_path / "step")
    assert contents(tmp_path) == []


SAVE_FOREVER = """
import sys, torch, checkpoint
torch.set_num_threads(1)
path, *stripes = sys.argv[1:]
seed = 0
while True:
    seed += 1
    state = {"x": torch.full((1 << 20,), seed), "seed": seed, "y": [torch.full((9,), seed)] * 9}
    checkpoint.save(state, path, stripes or None)
    print(seed, flush=True)
"""


def _seed_of(path: Path) -> int:
    loaded = checkpoint.load(path)
    assert (loaded["x"] == loaded["seed"]).all()
    assert all((y == loaded["seed"]).all() for y in loaded["y"])
    seed: int = loaded["seed"]
    return seed


@pytest.mark.parametrize("striped", [False, True])
def test_a_killed_save_leaves_the_checkpoint_before_it_and_is_cleaned_up(
    tmp_path: Path, stripes: list[Path], striped: bool
) -> None:
    path = tmp_path / "step"
    dirs = stripes if striped else []
    for kills in range(2):
        process = Script(SAVE_FOREVER, path, *dirs)
        # After this line the next save is on its way; how far it gets is up to the machine.
        reported = [int(process.stdout.readline()) for _ in range(2 + 3 * kills)][-1]
        process.send_signal(signal.SIGKILL)
        reported = max([reported, *map(int, process.end()[0].split())])
        assert _seed_of(path) in (reported, reported + 1)
        assert checkpoint.verify(path).ok
    checkpoint.save({"x": torch.zeros(3)}, path, dirs or None)
    files = [name for name in contents(tmp_path) if name.endswith(".safetensors")]
    assert len(files) == 1
    assert not [name for name in contents(tmp_path) if name.endswith(".tmp")]
    assert sum(entry.is_dir() for entry in path.iterdir()) == 1
    if striped:
        assert [len(list(stripe.iterdir())) for stripe in stripes] == [1, 1]


SAVE_ONCE = """
import resource, signal, sys, torch, checkpoint
torch.set_num_threads(1)
limit, path, *stripes = sys.argv[1:]
if int(limit):
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
import aio
engine = aio.Engine(backend="posix")
state = {"x": torch.full((1 << 20,), 7), "y": [torch.full((9,), 7)] * 9, "seed": 7}
try:
    checkpoint.save(state, path, stripes or None, engine)
except OSError as error:
    print("OSError", error.errno, error.filename, error)
else:
    print("saved")
"""


def _outcome(*arguments: object, inject: str | None = None) -> str:
    script = Script(SAVE_ONCE, *arguments, inject=inject)
    printed, errors = script.end()
    assert script.returncode == 0, errors
    return printed


def _strace_reason() -> str | None:
    if shutil.which("strace") is None:
        return "needs strace"
    command = ["strace", "-f", "-e", "inject=getpid:retval=1", "true"]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    return None if done.returncode == 0 else f"strace cannot inject here: {done.stderr[:80]}"


@pytest.fixture(scope="module")
def strace() -> None:
    if reason := _strace_reason():
        pytest.skip(reason)


FAULTS = [
    ("fallocate:error=ENOSPC", errno.ENOSPC),
    ("pwrite64:error=EIO", errno.EIO),
    ("fsync:error=EIO:when=1", errno.EIO),
    ("fsync:error=ENOSPC:when=4", errno.ENOSPC),
    ("rename:error=EIO", errno.EIO),
]


@pytest.mark.usefixtures("strace")
@pytest.mark.parametrize(("fault", "code"), FAULTS, ids=[fault for fault, _ in FAULTS])
def test_an_injected_error_leaves_the_old_checkpoint_alone(
    tmp_path: Path, fault: str, code: int
) -> None:
    path = tmp_path / "step"
    checkpoint.save(state(1, mib=1), path)
    before = contents(tmp_path)
    outcome = _outcome(0, path, inject=fault)
    assert outcome.startswith(f"OSError {code} "), outcome
    assert str(path) in outcome
    assert contents(tmp_path) == before
    assert_same(state(1, mib=1), checkpoint.load(path))


@pytest.mark.usefixtures("strace")
def test_an_error_of_the_last_sync_loses_neither_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "step"
    checkpoint.save(state(1, mib=1), path)
    old = {name for name in contents(tmp_path) if name.endswith(".safetensors")}
    # File, its folder, the checkpoint's folder, the manifest: the fifth is after the rename.
    outcome = _outcome(0, path, inject="fsync:error=EIO:when=5")
    assert outcome.startswith(f"OSError {errno.EIO} "), outcome
    assert _seed_of(path) == 7
    assert old <= set(contents(tmp_path))
    checkpoint.save({"x": 1}, path)
    assert len([name for name in contents(tmp_path) if name.endswith(".safetensors")]) == 1


@pytest.mark.usefixtures("strace")
def test_short_writes_are_finished(tmp_path: Path) -> None:
    path = tmp_path / "step"
    assert _outcome(0, path, inject="pwrite64:retval=4096:when=1") == "saved\n"


def test_a_file_size_limit_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "step"
    checkpoint.save(state(1, mib=1), path)
    before = contents(tmp_path)
    outcome = _outcome(3 * MIB, path)
    assert outcome.startswith(f"OSError {errno.EFBIG} "), outcome
    assert "r0-0.safetensors" in outcome
    assert contents(tmp_path) == before
    assert_same(state(1, mib=1), checkpoint.load(path))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 of 64 MiB."""
    image, mount = tmp_path / "image", tmp_path / "disk"
    mount.mkdir()
    with image.open("wb") as file:
        file.truncate(64 * MIB)
    steps = [["mkfs.ext4", "-q", str(image)], ["mount", "-o", "loop", str(image), str(mount)]]
    for command in steps:
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            pytest.skip(f"cannot make a small file system: {done.stderr[:100]}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@pytest.mark.root
def test_a_full_disk_leaves_the_old_checkpoint_and_its_free_space(small_disk: Path) -> None:
    path = small_disk / "step"
    checkpoint.save(state(1), path)
    before, free = contents(path), os.statvfs(small_disk).f_bavail
    with pytest.raises(OSError, match="No space left") as caught:
        checkpoint.save(state(2, mib=40), path)
    assert caught.value.errno == errno.ENOSPC
    assert str(path) in str(caught.value.filename)
    assert contents(path) == before
    assert os.statvfs(small_disk).f_bavail == free
    assert_same(state(1), checkpoint.load(path))


_SHUTDOWN = 0x8004587D  # FS_IOC_SHUTDOWN
_NO_LOG_FLUSH = struct.pack("I", 2)


def cut_the_power(mount: Path) -> None:
    """Loses the page cache and what the journal has not committed, and starts again."""
    descriptor = os.open(mount, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, _SHUTDOWN, _NO_LOG_FLUSH)
    except OSError as error:
        pytest.skip(f"this file system cannot be shut down: {error}")
    finally:
        os.close(descriptor)
    image = mount.parent / "image"
    subprocess.run(["umount", str(mount)], check=True)
    subprocess.run(["mount", "-o", "loop", str(image), str(mount)], check=True)


@pytest.mark.root
@pytest.mark.parametrize("background", [False, True])
def test_what_a_save_has_reported_survives_a_power_cut(small_disk: Path, background: bool) -> None:
    path = small_disk / "runs" / "step"
    for seed in (1, 2):
        if background:
            checkpoint.save_async(state(seed, mib=8), path).result()
        else:
            checkpoint.save(state(seed, mib=8), path)
        cut_the_power(small_disk)
        assert_same(state(seed, mib=8), checkpoint.load(path))
        assert checkpoint.verify(path).ok


@pytest.mark.root
def test_a_power_cut_in_the_middle_of_a_save_leaves_the_one_before(small_disk: Path) -> None:
    path = small_disk / "step"
    checkpoint.save(state(1, mib=8), path)

    class Cut:
        dtype = torch.uint8
        shape = (20 * MIB,)

        def read(self, start: int, out: memoryview) -> None:
            if start > 10 * MIB:
                descriptor = os.open(small_disk, os.O_RDONLY)
                fcntl.ioctl(descriptor, _SHUTDOWN, _NO_LOG_FLUSH)
                os.close(descriptor)

    with pytest.raises(OSError, match=r"Input/output error|shut|No such|Structure") as caught:
        checkpoint.save({"x": state(2, mib=8), "y": Cut()}, path)
    assert caught.value.errno
    subprocess.run(["umount", str(small_disk)], check=True)
    image = small_disk.parent / "image"
    subprocess.run(["mount", "-o", "loop", str(image), str(small_disk)], check=True)
    assert_same(state(1, mib=8), checkpoint.load(path))
    checkpoint.save(state(3, mib=8), path)
    assert len(list(path.rglob("*.safetensors"))) == 1


@pytest.mark.root
def test_one_full_stripe_of_two_fails_the_save_and_leaves_neither(
    tmp_path: Path, small_disk: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with pytest.raises(OSError, match="No space left") as caught:
        checkpoint.save(state(1, mib=150), tmp_path / "step", [other, small_disk])
    assert str(small_disk) in str(caught.value.filename)
    assert contents(other) == []
    assert not (tmp_path / "step").exists()


def test_a_missing_stripe_directory_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError, match="ssd9"):
        checkpoint.save({"x": 1}, tmp_path / "step", [tmp_path / "ssd9"])
    assert contents(tmp_path) == []


def test_a_file_where_the_checkpoint_should_go_is_refused(tmp_path: Path) -> None:
    (tmp_path / "step").touch()
    with pytest.raises(NotADirectoryError, match="step"):
        checkpoint.save({"x": 1}, tmp_path / "step")


UNSAVABLE = [
    ({"a": [0, object()]}, "state\\['a'\\]\\[1\\].*builtins.object"),
    ({"a": {1: lambda: 0}}, "state\\['a'\\]\\[1\\].*function"),
    ({(1, object()): 2}, "state: .*key|state.*object"),
    ({"a": torch.empty(3, device="meta")}, "state\\['a'\\].*meta"),
    ({"a": torch.eye(3).to_sparse()}, "state\\['a'\\].*sparse"),
    ([torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)], "state\\[0\\]"),
    ({"a": torch.nn.Linear(2, 2)}, "state\\['a'\\].*Linear"),
]


@pytest.mark.parametrize(("value", "match"), UNSAVABLE, ids=range(len(UNSAVABLE)))
def test_a_leaf_that_cannot_be_saved_is_named_before_anything_is_made(
    tmp_path: Path, value: Any, match: str
) -> None:
    with pytest.raises(TypeError, match=match):
        checkpoint.save(value, tmp_path / "step")
    assert contents(tmp_path) == []


def test_a_tree_that_holds_itself_is_named(tmp_path: Path) -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(ValueError, match=r"state\[1\]\['again'\].*holds itself"):
        checkpoint.save(loop, tmp_path / "step")
    deep: list[Any] = []
    for _ in range(130):
        deep = [deep]
    with pytest.raises(ValueError, match="deeper than 128"):
        checkpoint.save(deep, tmp_path / "step")


@pytest.mark.parametrize("made", [0, 1, 2])
def test_a_save_that_cannot_make_its_directories_leaves_none_of_them(
    made: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mkdir, calls = Path.mkdir, itertools.count()

    def full(path: Path, *arguments: Any, **options: Any) -> None:
        if tmp_path in path.parents and next(calls) >= made:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        mkdir(path, *arguments, **options)

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save({"w": torch.ones(4)}, tmp_path / "new" / "series" / "step")
    assert [*tmp_path.iterdir()] == []
