"""Files that are measured are gone afterwards, and never fill a disk."""

import os
import shutil
import signal
from pathlib import Path

import pytest

from checkpoint.bench.conditions.pagecache import PageCache, files_below
from checkpoint.bench.conditions.scratch import (
    PREFIX,
    DiskSpaceError,
    check_space,
    open_scratch,
    remove_orphans,
)
from tests.support.scripts import Script


@pytest.fixture
def directories(tmp_path: Path) -> list[Path]:
    made = [tmp_path / "a", tmp_path / "b"]
    for path in made:
        path.mkdir()
    return made


def everything(directories: list[Path]) -> list[Path]:
    return [path for directory in directories for path in directory.iterdir()]


def test_place_is_empty_each_time_and_gone_after(directories: list[Path]) -> None:
    with open_scratch(directories, keep_free_bytes=0) as scratch:
        for _ in range(2):
            with scratch.place(directories, 100) as place:
                assert [path.parent.parent for path in place.folders] == directories
                assert place.main == place.folders[0]
                assert not any(place.main.iterdir())
                (place.main / "deep").mkdir()
                (place.main / "deep" / "file").write_bytes(b"x")
            assert not place.main.exists()
        with scratch.place(directories[1:], 100) as place:
            assert place.main.is_relative_to(directories[1])
    assert everything(directories) == []


def test_scratch_is_gone_after_an_exception(directories: list[Path]) -> None:
    def fail() -> None:
        with open_scratch(directories) as scratch, scratch.place(directories, 1) as place:
            (place.main / "file").write_bytes(b"x")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert everything(directories) == []


def test_scratch_in_a_directory_that_takes_nothing_leaves_nothing_in_the_others(
    directories: list[Path],
) -> None:
    def fail() -> None:
        with open_scratch([*directories, Path("/proc")]):
            pass

    with pytest.raises(OSError, match="/proc"):
        fail()
    assert everything(directories) == []


def test_orphans_of_a_killed_process_are_removed_and_no_others(directories: list[Path]) -> None:
    script = (
        "import sys, os, signal, pathlib\n"
        "from checkpoint.bench.conditions.scratch import open_scratch\n"
        "home = pathlib.Path(sys.argv[1])\n"
        "with open_scratch([home]) as scratch, scratch.place([home], 1) as place:\n"
        "    (place.main / 'file').write_bytes(b'x')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = Script(script, directories[0])
    assert killed.end() == ("", "")
    assert killed.returncode == -signal.SIGKILL
    (left,) = everything(directories)
    with open_scratch(directories[1:]):
        mine = everything(directories[1:])
        assert remove_orphans(directories[1]) == []
        assert remove_orphans(directories[0]) == [left]
        assert everything(directories) == mine


def test_what_ends_is_no_orphan_of_another_run_that_begins(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    remove, found = shutil.rmtree, list[Path]()

    def removed_beside_another(folder: Path) -> None:
        with monkeypatch.context() as another:
            another.setattr(shutil, "rmtree", remove)
            found.extend(remove_orphans(directories[0]))
        remove(folder)

    with open_scratch(directories[:1]):
        monkeypatch.setattr(shutil, "rmtree", removed_beside_another)
    assert found == []
    assert everything(directories) == []


def test_orphans_are_known_by_their_names_only(directories: list[Path]) -> None:
    for name in ("data", f"x{PREFIX}1"):
        (directories[0] / name).mkdir()
    (directories[0] / f"{PREFIX}file").write_bytes(b"x")
    assert remove_orphans(directories[0]) == []
    assert len(everything(directories)) == 3


def test_space_that_would_not_stay_free_is_refused_with_the_numbers(
    directories: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = list(os.statvfs(directories[0]))
    sizes[:5] = [4096, 4096, 1000 * 256, 100 * 256, 100 * 256]  # of 1000 MiB 100 are free
    monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result(sizes))
    mib = 1 << 20
    check_space(directories[:1], 50 * mib, None)
    with pytest.raises(DiskSpaceError, match=r"a: 100 MiB are free.* 51 MiB, and 50 MiB are to"):
        check_space(directories[:1], 51 * mib, None)
    check_space(directories[:1], 99 * mib, mib)
    # Both are on one file system.
    with pytest.raises(DiskSpaceError, match=r"a, .*b: 100 MiB are free"):
        check_space(directories, 26 * mib, None)


def test_page_cache_that_cannot_be_dropped_is_asked_by_file_and_says_so(
    directories: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = PageCache(drop=tmp_path / "no" / "drop_caches")
    assert cache.method == "advised"
    assert "without root" in cache.describe()
    (directories[0] / "deep").mkdir()
    (directories[0] / "deep" / "file").write_bytes(b"x" * 4096)
    (directories[0] / "link").symlink_to("nowhere")
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda *arguments: asked.append(arguments[1:]))
    cache.forget(directories)
    assert asked == [(0, 0, os.POSIX_FADV_DONTNEED)]


def test_page_cache_that_can_be_dropped_is(tmp_path: Path) -> None:
    drop = tmp_path / "drop_caches"
    cache = PageCache(drop=drop)
    drop.write_text("")
    cache.forget([tmp_path])
    assert (cache.method, drop.read_text()) == ("dropped", "3")
    drop.unlink()
    drop.mkdir()
    cache.forget([tmp_path])
    assert cache.method == "advised"


def test_files_below_are_regular_files_at_any_depth(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "file")
    assert list(files_below([tmp_path])) == [tmp_path / "a" / "b" / "file"]
