"""A process's place on an SSD: locked while it lives, reclaimed when it is dead."""

import errno
import fcntl
import os
import shutil
import signal
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

from aio import AioError, Engine
from aio.process.descriptors import Descriptor
from swap.storage.drives.directory import SwapDirectory, reclaim
from tests.support.forks import FORKS
from tests.support.interrupts import interrupt
from tests.support.proof import matrix
from tests.support.scripts import Script
from tests.support.tiers import Leftovers

HOLD = """
import signal, sys
from aio import Engine
from swap.storage.drives.directory import SwapDirectory
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
engine = Engine("posix")
directory = SwapDirectory(sys.argv[1], engine)
directory.file.allocate(0, 1 << 20)
print(directory.path, flush=True)
signal.sigwait([signal.SIGTERM])
directory.close()
engine.close()
"""


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine("posix") as made:
        yield made


class Holder:
    """Another process with a directory under ``root``."""

    def __init__(self, root: Path) -> None:
        self._script = Script(HOLD, root)
        self.path = Path(self._script.stdout.readline().strip())

    def end(self, how: int = signal.SIGTERM) -> None:
        """Let it close its directory, or kill it with another signal."""
        self._script.send_signal(how)
        assert self._script.end() == ("", "")


def _swap_folders(root: Path) -> list[Path]:
    return sorted(root.glob(".infinity/*"))


def test_directory_is_made_and_leaves_nothing_behind(tmp_path: Path, engine: Engine) -> None:
    directory = SwapDirectory(tmp_path, engine)
    assert directory.path.parent == tmp_path / ".infinity"
    assert directory.file.path == directory.path / "state.swap"
    directory.file.allocate(0, 1 << 16)
    directory.close()
    directory.close()
    assert list(tmp_path.iterdir()) == []


def test_several_directories_on_one_ssd_go_one_by_one(tmp_path: Path, engine: Engine) -> None:
    first, second = SwapDirectory(tmp_path, engine), SwapDirectory(tmp_path, engine)
    assert first.path != second.path
    first.close()
    assert _swap_folders(tmp_path) == [second.path]
    second.close()
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_left_is_reclaimed_by_the_next(
    tmp_path: Path, engine: Engine
) -> None:
    killed = Holder(tmp_path)
    killed.end(signal.SIGKILL)
    assert (killed.path / "state.swap").stat().st_size == 1 << 20
    directory = SwapDirectory(tmp_path, engine)
    assert _swap_folders(tmp_path) == [directory.path]
    directory.close()


def test_directory_of_a_living_process_is_left_alone(tmp_path: Path, engine: Engine) -> None:
    living, killed = Holder(tmp_path), Holder(tmp_path)
    killed.end(signal.SIGKILL)
    assert reclaim(tmp_path) == [killed.path]
    directory = SwapDirectory(tmp_path, engine)
    assert _swap_folders(tmp_path) == sorted([living.path, directory.path])
    directory.close()
    assert (living.path / "state.swap").exists()
    living.end()
    assert list(tmp_path.iterdir()) == []


def test_folder_of_a_process_killed_before_it_had_a_lock_is_reclaimed(tmp_path: Path) -> None:
    begun = tmp_path / ".infinity" / "0123456789ab"
    begun.mkdir(parents=True)
    assert reclaim(tmp_path) == [begun]
    assert _swap_folders(tmp_path) == []


def test_what_is_not_ours_is_left_alone(tmp_path: Path, engine: Engine) -> None:
    notes = tmp_path / ".infinity" / "notes"
    notes.mkdir(parents=True)
    (notes / "lock").touch()
    (tmp_path / ".infinity" / "0123456789ab.txt").touch()
    SwapDirectory(tmp_path, engine).close()
    assert sorted(path.name for path in _swap_folders(tmp_path)) == ["0123456789ab.txt", "notes"]


def test_nothing_to_reclaim_is_no_error(tmp_path: Path) -> None:
    assert reclaim(tmp_path) == []
    (tmp_path / ".infinity").mkdir()  # as one that was killed may leave it
    assert reclaim(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def _open_and_close(root: str, start: threading.Barrier, times: int) -> None:
    start.wait()
    with Engine("posix") as engine:
        for _ in range(times):
            directory = SwapDirectory(root, engine)
            assert (directory.path / "lock").exists()
            directory.close()


@pytest.mark.parametrize("times", matrix([5, 40], usual=[5]))
def test_processes_that_come_and_go_at_once_do_not_get_in_each_others_way(
    times: int, tmp_path: Path
) -> None:
    """As the ranks of a job do, on an SSD with orphans that each of them wants to reclaim."""
    for name in range(50):
        orphan = tmp_path / ".infinity" / f"{name:012x}"
        orphan.mkdir(parents=True)
        (orphan / "lock").touch()
        (orphan / "state.swap").touch()
    start = FORKS.Barrier(4)
    arguments = (str(tmp_path), start, times)
    workers = [FORKS.Process(target=_open_and_close, args=arguments) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == []


def test_threads_of_one_process_do_not_get_in_each_others_way(
    tmp_path: Path, engine: Engine
) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(30):
                SwapDirectory(tmp_path, engine).close()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_named(tmp_path: Path, engine: Engine) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=str(missing)):
        SwapDirectory(missing, engine)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOLCK])
def test_directory_that_cannot_be_locked_is_named(
    number: int, tmp_path: Path, engine: Engine
) -> None:
    failure = OSError(number, os.strerror(number))
    with patch("fcntl.flock", side_effect=failure), pytest.raises(OSError, match="flock") as caught:
        SwapDirectory(tmp_path, engine)
    assert (caught.value.errno, caught.value.filename) == (number, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_file_in_place_of_a_directory_is_named(tmp_path: Path, engine: Engine) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(NotADirectoryError, match=str(file)):
        SwapDirectory(file, engine)


def test_directory_without_permission_is_refused_unchanged(tmp_path: Path, engine: Engine) -> None:
    with patch("os.access", return_value=False), pytest.raises(PermissionError) as caught:
        SwapDirectory(tmp_path, engine)
    assert str(tmp_path) in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_read_only_file_system_is_refused_unchanged(tmp_path: Path, engine: Engine) -> None:
    flags = os.statvfs(tmp_path)

    class ReadOnly:
        f_flag = flags.f_flag | os.ST_RDONLY

    with patch("os.statvfs", return_value=ReadOnly()), pytest.raises(PermissionError):
        SwapDirectory(tmp_path, engine)
    assert list(tmp_path.iterdir()) == []


def test_swap_file_that_cannot_be_made_leaves_nothing(tmp_path: Path, engine: Engine) -> None:
    before = Leftovers.of(tmp_path)
    failure = AioError("no", errno=errno.EIO)
    with patch.object(engine, "open", side_effect=failure), pytest.raises(AioError):
        SwapDirectory(tmp_path, engine)
    assert Leftovers.of(tmp_path) == before


def test_folders_and_files_are_for_their_user_alone(tmp_path: Path, engine: Engine) -> None:
    before = os.umask(0)
    try:
        directory = SwapDirectory(tmp_path, engine)
    finally:
        os.umask(before)
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob(".infinity/**/*")}
    assert modes == {
        directory.path: 0o700,
        directory.path / "lock": 0o600,
        directory.path / "state.swap": 0o600,
    }
    directory.close()


@pytest.mark.parametrize("mode", [0o700, 0o755, 0o775, 0o1777])
def test_whoever_may_write_to_the_disk_may_offload_to_it(
    tmp_path: Path, engine: Engine, mode: int
) -> None:
    root = tmp_path / "nvme"
    root.mkdir()
    root.chmod(mode)
    before = os.umask(0o077)
    try:
        directory = SwapDirectory(root, engine)
    finally:
        os.umask(before)
    assert stat.S_IMODE((root / ".infinity").stat().st_mode) == mode | stat.S_ISVTX
    directory.close()
    assert list(root.iterdir()) == []


def test_folder_of_another_user_that_is_closed_to_others_is_named_with_the_remedy(
    tmp_path: Path, engine: Engine
) -> None:
    shared = tmp_path / ".infinity"
    shared.mkdir()
    access = os.access

    def closed(path: Path, mode: int) -> bool:
        return path != shared and access(path, mode)

    with patch("os.access", closed), pytest.raises(PermissionError, match="chmod 1777") as caught:
        SwapDirectory(tmp_path, engine)
    assert caught.value.filename == str(shared)
    assert list(shared.iterdir()) == []


def test_orphan_that_cannot_be_removed_is_a_warning_and_stops_nobody(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    stuck, other = (tmp_path / ".infinity" / f"{name:012x}" for name in (1, 2))
    for folder in (stuck, other):
        folder.mkdir(parents=True)
        (folder / "state.swap").touch()
    remove = shutil.rmtree

    def refuse(folder: Path) -> None:
        if folder == stuck:
            raise PermissionError(errno.EPERM, "immutable", str(folder / "state.swap"))
        remove(folder)

    with patch("shutil.rmtree", refuse):
        directory = SwapDirectory(tmp_path, engine)
        directory.close()
    assert _swap_folders(tmp_path) == [stuck]
    (record,) = caplog.records
    assert f"{stuck}" in record.getMessage()
    assert "immutable" in record.getMessage()


def test_folder_that_is_a_link_is_refused_and_nothing_behind_it_is_removed(
    tmp_path: Path, engine: Engine
) -> None:
    root, elsewhere = tmp_path / "nvme", tmp_path / "elsewhere"
    (elsewhere / "0123456789ab").mkdir(parents=True)
    root.mkdir()
    (root / ".infinity").symlink_to(elsewhere)
    assert reclaim(root) == []
    with pytest.raises(NotADirectoryError, match=r"\.infinity"):
        SwapDirectory(root, engine)
    assert (elsewhere / "0123456789ab").is_dir()


@pytest.mark.parametrize("planted", ["link to nothing", "link to a folder", "file"])
def test_what_is_planted_beside_the_folders_stops_nobody(
    tmp_path: Path, engine: Engine, planted: str
) -> None:
    stranger = tmp_path / ".infinity" / "0123456789ab"
    stranger.parent.mkdir()
    outside = tmp_path / "outside"
    outside.mkdir()
    if planted == "file":
        stranger.touch()
    else:
        stranger.symlink_to("/nowhere" if planted == "link to nothing" else outside)
    SwapDirectory(tmp_path, engine).close()
    assert os.path.lexists(stranger)
    assert outside.is_dir()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_lock_that_is_none_is_neither_waited_for_nor_followed(
    tmp_path: Path, engine: Engine, kind: str
) -> None:
    folder = tmp_path / ".infinity" / "0123456789ab"
    folder.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(folder / "lock")
    else:
        (folder / "lock").symlink_to(tmp_path / "made")
    SwapDirectory(tmp_path, engine).close()
    assert not (tmp_path / "made").exists()
    assert folder.is_dir()


def test_directory_that_stays_locked_is_named_after_a_while(
    tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swap.storage.drives.directory._TURN_SECONDS", 0.0)
    before = Leftovers.of(tmp_path)
    with Descriptor(tmp_path, os.O_RDONLY) as held:
        fcntl.flock(held.number, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"flock .*{tmp_path}"):
            SwapDirectory(tmp_path, engine)
    assert Leftovers.of(tmp_path) == before
    SwapDirectory(tmp_path, engine).close()


def test_directory_that_was_removed_is_closed_with_a_warning(
    tmp_path: Path, engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "nvme"
    root.mkdir()
    before = Leftovers.of(tmp_path)
    directory = SwapDirectory(root, engine)
    root.rename(tmp_path / "away")
    directory.close()
    directory.close()
    (record,) = caplog.records
    assert str(directory.path) in record.getMessage()
    (tmp_path / "away").rename(root)
    assert Leftovers.of(tmp_path).descriptors == before.descriptors
    assert reclaim(root) == [directory.path]


def test_directory_that_is_let_go_of_is_named_unlocked_and_reclaimed_by_the_next(
    tmp_path: Path, engine: Engine
) -> None:
    before = Leftovers.of(tmp_path)
    with pytest.warns(ResourceWarning, match="state.swap.* was never closed"):
        SwapDirectory(tmp_path, engine)
    assert Leftovers.of(tmp_path).descriptors == before.descriptors
    assert len(reclaim(tmp_path)) == 1


@pytest.mark.filterwarnings("ignore:.*was never closed:ResourceWarning")
def test_closing_that_is_interrupted_is_finished_by_closing_again(
    tmp_path: Path, engine: Engine
) -> None:
    lines = interrupt(SwapDirectory(tmp_path, engine).close, None).seen
    before = Leftovers.of(tmp_path)
    for number in range(lines):
        directory = SwapDirectory(tmp_path, engine)
        line = interrupt(directory.close, number).line
        assert line
        directory.close()
        assert Leftovers.of(tmp_path) == before, line
