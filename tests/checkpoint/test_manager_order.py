"""A series of checkpoints whose run went back to an earlier step, and one that others write to."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
from checkpoint.directory.lock import Lock
from checkpoint.format.manifest import MANIFEST_NAME
from tests.checkpoint.test_manager import damage_data, state
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


@pytest.mark.parametrize("background", [False, True])
def test_a_save_after_going_back_is_kept_and_is_the_latest(
    tmp_path: Path, background: bool
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=3)
    for step in (1000, 2000, 3000, 4000):
        manager.save(step, state(step))
    for step in (1100, 1200):
        if background:
            manager.save_async(step, state(step)).result()
        else:
            manager.save(step, state(step))
        assert manager.latest() == step
        assert checkpoint.Manager(tmp_path).load()["step"] == step
    assert manager.steps() == [1100, 1200, 4000], "the three that were saved last"
    manager.save(1300, state(1300))
    assert manager.steps() == [1100, 1200, 1300]


def test_a_copied_series_has_the_order_of_the_original(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path / "run")
    for step in (20, 30, 10):
        manager.save(step, state(step))
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    for at, step in enumerate((10, 20, 30)):
        os.utime(tmp_path / "copy" / f"step-{step}" / MANIFEST_NAME, (at, at))
    assert checkpoint.Manager(tmp_path / "copy").latest() == 10


def test_manifests_that_do_not_say_when_are_older_than_those_that_do(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=3)
    for step in (5, 9, 7):
        manager.save(step, state(step))
    for step in (5, 9):
        manifest = manager.path(step) / MANIFEST_NAME
        body = re.sub(rb'"saved":[0-9]+,\n', b"", manifest.read_bytes().split(b"\n", 1)[1])
        first = b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",\n'
        manifest.write_bytes(first + body)
    manager = checkpoint.Manager(tmp_path, keep=3)
    assert manager.latest() == 7
    manager.save(6, state(6))
    assert manager.steps() == [6, 7, 9]
    shutil.rmtree(manager.path(6))
    shutil.rmtree(manager.path(7))
    assert manager.load()["step"] == 9


def test_a_clock_that_is_set_back_does_not_change_the_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(1, state(1))
    monkeypatch.setattr("time.time_ns", lambda: 5)
    manager.save(2, state(2))
    assert manager.steps() == [2]
    manager.save_async(3, state(3)).result()
    assert checkpoint.Manager(tmp_path).steps() == [3]


def test_a_load_says_which_step_it_is_and_which_were_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=None)
    for step in (1, 2, 3, 4):
        manager.save(step, state(step))
    damage_data(manager.path(4))
    (manager.path(3) / MANIFEST_NAME).write_text("{}")
    assert checkpoint.Manager(tmp_path).loaded is None
    caplog.set_level(logging.INFO)
    assert manager.load()["step"] == 2
    assert manager.loaded == checkpoint.LoadedStep(2, passed_over=(3, 4))
    (said,) = [r for r in caplog.records if "step 2 was loaded" in r.getMessage()]
    assert said.levelno == logging.WARNING
    assert "3, 4" in said.getMessage()
    manager.load(1)
    assert manager.loaded == checkpoint.LoadedStep(1, passed_over=())


def test_steps_that_a_load_passed_over_stay_and_do_not_count_as_kept(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    damage_data(manager.path(3))
    assert manager.load()["step"] == 2
    manager.save(4, state(4))
    assert manager.steps() == [2, 3, 4]
    damage_data(manager.path(4))
    assert manager.load()["step"] == 2
    manager.save(5, state(5))
    assert manager.steps() == [2, 3, 4, 5]
    for step in (3, 4):  # saved over they are whole again
        manager.save(step, state(step))
    assert manager.steps() == [3, 4]
    assert manager.load()["step"] == 4


def test_a_step_that_was_asked_for_and_found_damaged_does_not_count_as_kept(
    tmp_path: Path,
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    damage_data(manager.path(3))
    with pytest.raises(checkpoint.CorruptCheckpointError):
        manager.load(3)
    assert manager.load(2)["step"] == 2
    manager.save(4, state(4))
    assert manager.steps() == [2, 3, 4]


@pytest.mark.parametrize(
    "options",
    [{"only": ["typo*"]}, {"map_location": "nonsense"}, {"verify": False}, {"only": ["step"]}],
)
def test_a_load_that_looked_at_less_forgets_no_damage(
    options: dict[str, Any], tmp_path: Path
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    damage_data(manager.path(3))
    assert manager.load()["step"] == 2
    with suppress(ValueError, FileNotFoundError):
        manager.load(**options)
    manager.save(4, state(4))
    assert manager.steps() == [2, 3, 4]


def test_steps_of_a_stripe_that_was_away_for_a_load_count_again(tmp_path: Path) -> None:
    stripe = tmp_path / "stripe"
    stripe.mkdir()
    manager = checkpoint.Manager(tmp_path / "series", keep=2, stripe_dirs=[stripe])
    for step in (1, 2):
        manager.save(step, state(step))
    stripe.rename(tmp_path / "away")
    with pytest.raises(FileNotFoundError):
        manager.load()
    (tmp_path / "away").rename(stripe)
    for step in (3, 4):
        manager.save(step, state(step))
    assert manager.steps() == [3, 4]


def test_values_of_a_damaged_step_do_not_stay_where_the_step_before_has_none(
    tmp_path: Path,
) -> None:
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, {"w": torch.ones(4096)})
    manager.save(2, {"w": torch.full((4096,), 2.0), "new": torch.full((4096,), 3.0)})
    damage_data(manager.path(2))
    live = {"w": torch.zeros(4096)}
    assert manager.load(into=live, strict=False)["w"][0] == 1
    live |= {"new": torch.zeros(4096), "other": torch.zeros(4096)}
    assert manager.load(into=live, strict=False, only=["w"])["w"][0] == 1
    with pytest.raises(
        checkpoint.CorruptCheckpointError, match=r"new of into may hold .*step-1.* lacks this"
    ) as caught:
        manager.load(into=live, strict=False)
    assert caught.value.path == str(manager.path(2))
    assert manager.load(1, into=live, strict=False)["w"][0] == 1


def test_a_step_of_which_nothing_was_read_is_passed_over_for_what_is_loaded_into(
    tmp_path: Path,
) -> None:
    manager = checkpoint.Manager(tmp_path)
    manager.save(1, {"w": torch.ones(4096)})
    manager.save(2, {"w": torch.full((4096,), 2.0), "new": torch.full((4096,), 3.0)})
    next(manager.path(2).rglob("*.safetensors")).unlink()
    live = {"w": torch.zeros(4096), "new": torch.zeros(4096)}
    assert manager.load(into=live, strict=False)["w"][0] == 1
    assert not live["new"].any()


def test_a_step_that_was_mended_and_loaded_whole_counts_again(tmp_path: Path) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    (file,) = manager.path(3).rglob("*.safetensors")
    whole = file.read_bytes()
    damage_data(manager.path(3))
    assert manager.load()["step"] == 2
    file.write_bytes(whole)
    assert manager.load(3, map_location="cpu")["step"] == 3
    for step in (4, 5):
        manager.save(step, state(step))
    assert manager.steps() == [4, 5]


@pytest.mark.parametrize("plant", ["file", "pipe", "dangling link", "link to a file"])
def test_what_is_no_directory_is_no_step(tmp_path: Path, plant: str) -> None:
    manager = checkpoint.Manager(tmp_path)
    manager.save(7, state(7))
    path = tmp_path / "step-8"
    if plant == "file":
        path.write_text("notes")
    elif plant == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / ("missing" if plant == "dangling link" else "notes"))
        (tmp_path / "notes").write_text("notes")
    assert manager.steps() == [7]
    assert manager.latest() == 7
    assert manager.load()["step"] == 7
    manager.save(9, state(9))
    assert manager.steps() == [7, 9]
    assert os.path.lexists(path)


def test_a_step_that_is_a_link_is_loaded_and_never_removed(tmp_path: Path) -> None:
    elsewhere = checkpoint.Manager(tmp_path / "elsewhere")
    elsewhere.save(1, state(1))
    manager = checkpoint.Manager(tmp_path / "run", keep=1)
    manager.root.mkdir()
    manager.path(1).symlink_to(elsewhere.path(1))
    assert manager.load()["step"] == 1
    for step in (2, 3):
        manager.save(step, state(step))
    assert manager.steps() == [1, 3]
    assert elsewhere.load()["step"] == 1


def test_an_error_while_old_ones_are_removed_does_not_fail_the_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=1)
    manager.save(1, state(1))

    def fails(*_: object) -> bool:
        raise PermissionError(13, "not allowed", "somewhere")

    monkeypatch.setattr("checkpoint.known.retiring.remove_checkpoint", fails)
    assert manager.save(2, state(2)).num_tensors == 1
    assert "cannot be removed" in caplog.text
    monkeypatch.setattr(manager, "retire", fails)
    assert manager.save(3, state(3)).num_tensors == 1
    assert "not allowed" in caplog.text


def test_a_step_that_is_finished_before_its_orphans_are_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process saves between the look at a step and the lock."""
    manager = checkpoint.Manager(tmp_path)
    (tmp_path / "step-5" / "0badc0de").mkdir(parents=True)
    before_the_lock(
        monkeypatch, manager.path(5), lambda: checkpoint.save(state(5), manager.path(5))
    )
    manager.retire()
    assert manager.load(5)["step"] == 5


def test_an_old_step_that_is_saved_again_before_it_is_removed_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    manager.save(1, state(1))
    manager.save(2, state(2))
    manager = checkpoint.Manager(tmp_path, keep=1)
    before_the_lock(
        monkeypatch, manager.path(1), lambda: checkpoint.save(state(8), manager.path(1))
    )
    manager.retire()
    assert manager.load(1)["step"] == 8
    assert manager.latest() == 1


def before_the_lock(monkeypatch: pytest.MonkeyPatch, path: Path, action: Any) -> None:
    """Does something once when the checkpoint at `path` is about to be locked."""
    waiting = [action]

    def late(checkpoint: Path, **options: Any) -> Any:
        if checkpoint == path and waiting:
            waiting.pop()()
        return Lock(checkpoint, **options)

    monkeypatch.setattr("checkpoint.directory.generations.Lock", late)


def test_a_load_beside_a_writer_that_keeps_one_finds_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each listing is outdated by the time it is used, until the writer stops."""
    writer = checkpoint.Manager(tmp_path, keep=1)
    writer.save(1, state(1))
    reader = checkpoint.Manager(tmp_path)
    found = reader._retiring._found
    ahead = iter(range(2, 12))

    def outdated() -> list[int]:
        listing = found()
        for step in ahead:
            writer.save(step, state(step))
            if step % 3 == 0:
                break
        return listing

    monkeypatch.setattr(reader._retiring, "_found", outdated)
    assert reader.load()["step"] == 11
    ahead = iter(range(12, 22))
    assert reader.latest() == 21
    ahead = iter(range(22, 32))
    assert reader.steps() == [31]


@pytest.mark.parametrize("background", [False, True])
def test_a_damaged_manifest_that_claims_a_late_time_leaves_later_saves_loadable(
    tmp_path: Path, background: bool
) -> None:
    manager = checkpoint.Manager(tmp_path, keep=2)
    for step in (1, 2, 3):
        manager.save(step, state(step))
    manifest = manager.path(2) / MANIFEST_NAME
    raw = manifest.read_bytes()
    manifest.write_bytes(raw.replace(b'"saved":1', b'"saved":9', 1))
    for step in (4, 5, 6):
        if background:
            manager.save_async(step, state(step)).result()
        else:
            manager.save(step, state(step))
        assert manager.load(step)["step"] == step
    assert checkpoint.Manager(tmp_path).latest() == 6
    assert manager.steps() == [5, 6], "those before are removed, the damaged one is not whole"


def test_a_clock_that_no_manifest_can_say_is_refused_before_anything_is_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = checkpoint.Manager(tmp_path)
    last = (1 << 63) - 1
    monkeypatch.setattr("time.time_ns", lambda: last)
    manager.save(1, state(1))
    assert manager.load()["step"] == 1
    with pytest.raises(ValueError, match="set the clock"):
        manager.save(2, state(2))
    assert not manager.path(2).exists()
    assert manager.load()["step"] == 1
