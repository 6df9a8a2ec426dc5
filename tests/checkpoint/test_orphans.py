"""What is taken for the orphans of saves, and what is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkpoint

STATE = {"w": torch.ones(3)}


def test_folders_named_after_dates_are_not_taken_for_orphans(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    (path / "20260101").mkdir(parents=True)
    (path / "20260101" / "notes").write_text("kept")
    checkpoint.save(STATE, path / "20260102")
    for _ in range(2):
        checkpoint.save(STATE, path)
    assert caplog.records == []
    assert (path / "20260101" / "notes").read_text() == "kept"
    assert checkpoint.verify(path / "20260102").ok
    assert sum(entry.is_dir() for entry in path.iterdir()) == 3


def test_empty_folders_named_after_dates_are_not_taken_for_orphans(tmp_path: Path) -> None:
    path = tmp_path / "run"
    (path / "20260101").mkdir(parents=True)
    for _ in range(2):
        checkpoint.save(STATE, path)
    assert (path / "20260101").is_dir()
    manager = checkpoint.Manager(tmp_path, keep=1)
    (manager.path(1) / "20260102").mkdir(parents=True)
    manager.save(1, STATE)
    manager.save(2, STATE)
    assert [entry.name for entry in manager.path(1).iterdir()] == ["20260102"]


def test_no_save_has_an_id_that_a_date_could_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = iter(["20260101", "12345678", "1234567a", "20260101", "aaaaaaaa"])
    monkeypatch.setattr("secrets.token_hex", lambda _: next(drawn))
    assert checkpoint.save(STATE, tmp_path / "run").uuid == "1234567a"
    assert checkpoint.save(STATE, tmp_path / "run").uuid == "aaaaaaaa"


def test_an_orphan_with_something_else_in_it_is_told_once_by_each_save(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    first = checkpoint.save(STATE, path).uuid
    (path / first / "notes").write_text("kept")
    checkpoint.save(STATE, path)
    caplog.clear()
    (path / first / "r0-0.safetensors").mkdir()  # as good as a file that cannot be removed
    checkpoint.save(STATE, path)
    (record,) = caplog.records
    assert f"cannot remove what save {first} left" in record.getMessage()
    assert (path / first / "notes").read_text() == "kept"


def test_an_orphan_of_a_killed_save_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "run"
    checkpoint.save(STATE, path)
    for name, files in {"aaaaaaaa": (), "bbbbbbbb": ("r0-0.safetensors",)}.items():
        (path / name).mkdir()
        for file in files:
            (path / name / file).write_text("torn")
    kept = checkpoint.save(STATE, path).uuid
    assert {entry.name for entry in path.iterdir()} == {kept, "manifest.json"}


def test_a_stripe_that_cannot_be_cleaned_keeps_nothing_on_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    a, b = (tmp_path / name for name in "ab")
    for stripe in (a, b):
        stripe.mkdir()
    path = tmp_path / "run"
    first = checkpoint.save({"w": torch.ones(1 << 20)}, path, stripe_dirs=[a, b]).uuid
    (broken,) = a.rglob("r*-*.safetensors")
    broken.unlink()
    broken.mkdir()  # as good as a file that cannot be removed
    (broken / "notes").write_text("kept")
    checkpoint.save(STATE, path)
    assert f"cannot remove what save {first} left" in caplog.text
    assert (broken / "notes").exists()
    assert list(b.rglob("*.safetensors")) == []
