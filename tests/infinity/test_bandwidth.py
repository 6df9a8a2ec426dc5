"""What is read back as a measurement was one; whatever else lies there is refused by name."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import infinity
from aio import AioError, File
from swap.storage.drives import bandwidth
from swap.storage.drives.bandwidth import kept, measure, measure_and_keep
from swap.storage.drives.directory import reclaim
from tests.support.models import Stack


def _text(content: str) -> Callable[[Path], object]:
    return lambda file: file.write_text(content)


PLANTED: dict[str, Callable[[Path], object]] = {
    "a fifo": os.mkfifo,
    "a link": lambda file: file.symlink_to("/etc/hostname"),
    "a dangling link": lambda file: file.symlink_to("nowhere"),
    "a folder": os.mkdir,
    "nothing": _text(""),
    "no object": _text("[1, 2]"),
    "one rate": _text('{"read": 1e9}'),
    "zero": _text('{"read": 0, "write": 0}'),
    "negative": _text('{"read": 1e9, "write": -1e9}'),
    "NaN": _text('{"read": NaN, "write": 1e9}'),
    "infinite": _text('{"read": Infinity, "write": 1e9}'),
    "beyond floats": _text('{"read": 1' + "0" * 400 + ', "write": 1e9}'),
    "text": _text('{"read": "1e9", "write": "1e9"}'),
    "true": _text('{"read": true, "write": true}'),
    "deep": _text("[" * 4000),
    "long": _text('{"read": 1e9, "write": 1e9}' + " " * 5000),
}


@pytest.mark.parametrize("what", PLANTED)
def test_what_is_no_measurement_is_refused_by_name(what: str, tmp_path: Path) -> None:
    file = tmp_path / ".infinity" / "bandwidth.json"
    file.parent.mkdir()
    PLANTED[what](file)
    with pytest.raises(ValueError, match="is not a measurement") as error:
        kept(tmp_path)
    assert str(file) in str(error.value)
    least = infinity.plan(Stack(), host_memory=1).least_host_bytes
    with (
        pytest.raises(ValueError, match="is not a measurement"),
        infinity.offload(Stack(), tmp_path, host_memory=least),
    ):
        pass


def test_a_measurement_is_written_over_a_link_and_not_through_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "_REQUEST_BYTES", 1 << 20)
    mine = tmp_path / "mine"
    mine.write_text("keep")
    folder = tmp_path / "nvme" / ".infinity"
    folder.mkdir(parents=True)
    (folder / "bandwidth.json").symlink_to(mine)
    assert measure_and_keep(tmp_path / "nvme") == kept(tmp_path / "nvme")
    assert mine.read_text() == "keep"
    assert [entry.name for entry in folder.iterdir()] == ["bandwidth.json"]


def test_measuring_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "_REQUEST_BYTES", 1 << 20)
    assert measure([tmp_path]).read > 0
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_process_of_the_same_number_left_is_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bandwidth, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "_REQUEST_BYTES", 1 << 20)
    (tmp_path / ".infinity").mkdir()
    (tmp_path / ".infinity" / f".bandwidth.json.{os.getpid()}").touch()
    assert measure_and_keep(tmp_path) == kept(tmp_path)


@pytest.mark.parametrize("again", [measure_and_keep, reclaim], ids=["tune", "gc"])
def test_what_a_killed_process_left_half_written_is_removed(
    tmp_path: Path, again: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(bandwidth, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(bandwidth, "_REQUEST_BYTES", 1 << 20)
    if (child := os.fork()) == 0:
        try:
            monkeypatch.setattr(os, "replace", die)
            measure_and_keep(tmp_path)
        finally:
            os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert [*(tmp_path / ".infinity").glob(".bandwidth.json.*")]
    again(tmp_path)
    assert [*(tmp_path / ".infinity").glob(".*")] == []


def test_measuring_takes_no_more_room_than_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate = File.allocate
    free = 2 << 20

    def allocate_what_is_free(self: File, offset: int, nbytes: int) -> None:
        if offset + nbytes > free:
            raise AioError("full", errno=errno.EDQUOT, filename=str(self.path))
        allocate(self, offset, nbytes)

    monkeypatch.setattr(File, "allocate", allocate_what_is_free)
    monkeypatch.setattr(bandwidth, "_PROBE_BYTES", 8 << 20)
    monkeypatch.setattr(bandwidth, "_REQUEST_BYTES", 1 << 20)
    assert measure([tmp_path]).read > 0
    free = 4096
    with pytest.raises(AioError, match=r"cannot measure .* 1048576 bytes of room") as caught:
        measure([tmp_path])
    assert caught.value.errno == errno.EDQUOT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_file_system_without_permissions_is_measured_and_offloaded_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    """It is said where others may read what is there."""
    make = Path.mkdir

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(bandwidth, "_PROBE_BYTES", 1 << 20)
    monkeypatch.setattr(os, "fchmod", refuse)
    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(Path, "mkdir", lambda path, *_, **named: make(path, mode=mode))
    least = infinity.plan(Stack(), host_memory=1).least_host_bytes
    with infinity.offload(Stack(), tmp_path, host_memory=least):
        pass
    assert measure_and_keep(tmp_path) == kept(tmp_path)
