"""A step that cannot be read does not hide the others of its series."""

from __future__ import annotations

import errno
import gc
import logging
import os
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from aio import Engine, MemoryBackend
from checkpoint import manager as manager_module
from checkpoint.directory import locate
from checkpoint.format.manifest import MANIFEST_NAME
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.fixture
def series(tmp_path: Path) -> checkpoint.Manager:
    manager = checkpoint.Manager(tmp_path / "run", keep=None)
    for step in range(3):
        manager.save(step, {"step": torch.tensor(step)})
    return checkpoint.Manager(tmp_path / "run", keep=None)


def make_unreadable(path: Path) -> None:
    """For root as well: a link to itself gives ELOOP."""
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("what", [MANIFEST_NAME, "data"])
def test_a_step_that_cannot_be_read_is_passed_over(
    series: checkpoint.Manager, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    step = series.path(2)
    make_unreadable(step / what if what != "data" else next(step.rglob("*.safetensors")))
    assert series.steps() == [0, 1]
    assert series.latest() == 1
    assert series.load()["step"] == 1
    assert series.loaded == checkpoint.LoadedStep(1, passed_over=(2,))
    assert any("step-2 is passed over" in record.getMessage() for record in caplog.records)
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        series.load(2)
    series.save(3, {"step": torch.tensor(3)})
    assert series.steps() == [0, 1, 3]


@pytest.mark.parametrize("name", [MANIFEST_NAME, "latest"])
def test_a_step_whose_manifest_is_on_a_bad_sector_is_passed_over(
    series: checkpoint.Manager, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It opens, and reading it is an I/O error: /proc/self/mem has nothing at its beginning."""
    path = series.path(2) / MANIFEST_NAME
    path.unlink()
    path.symlink_to("/proc/self/mem")
    if name == "latest":
        assert series.latest() == 1
    else:
        assert series.steps() == [0, 1]
    assert series.load()["step"] == 1
    said = [record.getMessage() for record in caplog.records]
    assert any("step-2 is passed over" in line and MANIFEST_NAME in line for line in said)
    with pytest.raises(OSError, match="Input/output error") as caught:
        series.load(2)
    assert caught.value.filename == str(path)


def test_a_directory_that_cannot_be_looked_at_is_passed_over(
    series: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_dir, opened = Path.is_dir, locate.open_regular_file

    def check(path: Path) -> Path:
        if "step-2" in path.parts:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))
        return path

    monkeypatch.setattr(Path, "is_dir", lambda path: is_dir(check(path)))
    monkeypatch.setattr(locate, "open_regular_file", lambda path: opened(check(path)))
    assert series.steps() == [0, 1]
    assert series.load()["step"] == 1
    assert series.loaded == checkpoint.LoadedStep(1, (2,))
    assert caplog.records[0].levelno == logging.WARNING


def test_where_all_are_unreadable_the_error_names_them(series: checkpoint.Manager) -> None:
    for step in range(3):
        make_unreadable(series.path(step) / MANIFEST_NAME)
    with pytest.raises(FileNotFoundError, match="unreadable: steps 2, 1, 0"):
        series.load()


@pytest.mark.parametrize(
    ("number", "name"), [(errno.EMFILE, "run/step-2/manifest.json"), (errno.EACCES, "sink.bin")]
)
def test_an_error_that_is_not_of_the_step_is_raised(
    series: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch, number: int, name: str
) -> None:
    def fail(path: Path, **_: object) -> None:
        raise OSError(number, os.strerror(number), str(series.root.parent / name))

    monkeypatch.setattr(manager_module, "load", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        series.load()


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_step_whose_data_file_goes_stale_once_it_is_open_is_passed_over(
    series: checkpoint.Manager, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = next(series.path(2).rglob("*.safetensors"))
    node, status_of = file.stat().st_ino, os.fstat

    def stale(number: int) -> os.stat_result:
        status = status_of(number)
        if status.st_ino == node:
            raise OSError(code, os.strerror(code))
        return status

    monkeypatch.setattr(os, "fstat", stale)
    assert series.load()["step"] == 1
    for read in (checkpoint.load, checkpoint.open):
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            read(series.path(2))
        assert caught.value.filename == str(file)


def test_what_is_loaded_in_place_of_a_damaged_step_goes_with_its_last_reference(
    series: checkpoint.Manager,
) -> None:
    make_unreadable(next(series.path(2).rglob("*.safetensors")))
    gc.disable()
    try:
        found = weakref.ref(series.load()["step"])
        assert found() is None
    finally:
        gc.enable()


def test_what_cannot_be_looked_at_is_not_taken_for_missing_also_in_python_3_14(
    series: checkpoint.Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked, failing = Path.stat, [series.root]

    def looking(path: Path, **options: Any) -> os.stat_result:
        if path in failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return looked(path, **options)

    def is_there(path: Path, **_: Any) -> bool:
        return path not in failing and os.access(path, os.F_OK)

    monkeypatch.setattr(Path, "stat", looking)
    monkeypatch.setattr(Path, "exists", is_there)
    monkeypatch.setattr(Path, "is_dir", is_there)
    for call in (series.steps, series.latest, series.load):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            call()
    failing[:] = [series.path(2)]
    assert series.load()["step"] == 2
    (series.path(2) / MANIFEST_NAME).unlink()
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        checkpoint.load(series.path(2))


@pytest.mark.parametrize(
    "code", ["EBADE", "EILSEQ", "EIO", "ENODEV", "ENOLINK", "EREMOTEIO", "ETIME", "ETIMEDOUT"]
)
def test_what_a_disk_says_of_what_it_cannot_read_is_passed_over(tmp_path: Path, code: str) -> None:
    """In the words of Linux, as direct I/O has them: those of checks within the drive, too."""
    checkpoint.Manager(tmp_path).save(1, {"x": torch.ones(8)})
    with (
        Engine(MemoryBackend(error=1, errno=getattr(errno, code))) as engine,
        pytest.raises(FileNotFoundError, match="damaged or unreadable: steps 1"),
    ):
        checkpoint.Manager(tmp_path).load(engine=engine)
