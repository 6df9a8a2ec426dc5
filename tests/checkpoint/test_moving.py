"""Checkpoints whose data lie on stripes, after they were renamed, copied or mounted elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

import checkpoint
from checkpoint.dcp import StorageReader
from checkpoint.directory.owners import OWNER_NAME
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


def state(value: int) -> dict[str, Any]:
    return {f"w{k}": torch.full((5000,), float(value + k)) for k in range(4)}


def holds(value: int, path: Path, **options: Any) -> bool:
    found = checkpoint.load(path, **options)
    return all(torch.equal(found[name], tensor) for name, tensor in state(value).items())


def data_of(stripes: list[Path]) -> list[str]:
    return sorted(entry.name for stripe in stripes for entry in stripe.iterdir())


def move(stripes: list[Path], suffix: str) -> list[Path]:
    """As if they were mounted somewhere else."""
    moved = [stripe.with_name(stripe.name + suffix) for stripe in stripes]
    for stripe, new in zip(stripes, moved, strict=True):
        stripe.rename(new)
    return moved


@pytest.mark.parametrize("name", ["run", "another"])
def test_a_renamed_checkpoint_loads_and_still_owns_its_data(
    tmp_path: Path, stripes: list[Path], name: str
) -> None:
    checkpoint.save(state(1), tmp_path / "run", stripes)
    moved = tmp_path / "elsewhere" / name
    moved.parent.mkdir()
    (tmp_path / "run").rename(moved)
    assert holds(1, moved)
    checkpoint.save(state(2), moved, stripes)
    assert holds(2, moved)
    assert len(data_of(stripes)) == 2, "what was replaced is gone"


def test_a_renamed_series_is_pruned_where_its_data_are(tmp_path: Path, stripes: list[Path]) -> None:
    checkpoint.Manager(tmp_path / "run", stripes).save(1, state(1))
    (tmp_path / "run").rename(tmp_path / "new")
    manager = checkpoint.Manager(tmp_path / "new", stripes, keep=1)
    manager.save(2, state(2))
    assert manager.steps() == [2]
    assert all(name.startswith("step-2.") for name in data_of(stripes))


@pytest.mark.parametrize("command", ["cp -r", "cp -a", "cp -al"])
def test_saving_over_a_copy_leaves_the_original_whole(
    tmp_path: Path, stripes: list[Path], command: str, caplog: pytest.LogCaptureFixture
) -> None:
    original, copy = tmp_path / "run" / "step-1", tmp_path / "copy" / "step-1"
    checkpoint.save(state(1), original, stripes)
    subprocess.run([*command.split(), tmp_path / "run", tmp_path / "copy"], check=True)
    assert holds(1, copy)
    checkpoint.save(state(2), copy, stripes)
    assert holds(2, copy)
    assert holds(1, original)
    assert checkpoint.verify(original).ok
    assert "step-1 does not own" in caplog.text
    assert str(original) in caplog.text
    checkpoint.Manager(tmp_path / "copy", stripes, keep=1).save(2, state(3))
    assert holds(1, original)


def test_a_copy_that_takes_the_place_of_the_original_does_not_own_its_data(
    tmp_path: Path, stripes: list[Path]
) -> None:
    run, backup, old = tmp_path / "run", tmp_path / "backup", tmp_path / "old"
    checkpoint.save(state(1), run, stripes)
    shutil.copytree(run, backup)
    run.rename(old)
    backup.rename(run)
    checkpoint.save(state(2), run, stripes)
    assert holds(1, old)
    checkpoint.save(state(3), old, stripes)
    assert holds(2, run)
    assert len(data_of(stripes)) == 4, "the original owned its data, wherever it was"


def change_mode(run: Path) -> None:
    for entry in [run, *run.rglob("*")]:
        entry.chmod(entry.stat().st_mode | 0o040)


def change_owner(run: Path) -> None:
    for entry in [run, *run.rglob("*")]:
        os.chown(entry, os.geteuid(), os.getegid())


def copy_by_links(run: Path) -> None:
    shutil.copytree(run, run.with_name("links"), copy_function=os.link)


@pytest.mark.parametrize("touch", [change_mode, change_owner, copy_by_links])
def test_a_checkpoint_in_its_place_owns_its_data_whatever_changed_its_attributes(
    tmp_path: Path, stripes: list[Path], touch: Callable[[Path], None]
) -> None:
    run = tmp_path / "run"
    checkpoint.save(state(1), run, stripes)
    touch(run)
    checkpoint.save(state(2), run, stripes)
    assert holds(2, run)
    assert len(data_of(stripes)) == 2, "what was replaced is gone"


def test_a_copy_by_hard_links_does_not_own_the_data(tmp_path: Path, stripes: list[Path]) -> None:
    checkpoint.save(state(1), tmp_path / "run", stripes)
    copy_by_links(tmp_path / "run")
    checkpoint.save(state(2), tmp_path / "links", stripes)
    assert holds(1, tmp_path / "run")


def test_an_unfinished_save_in_a_copy_removes_nothing_of_the_original(
    tmp_path: Path, stripes: list[Path]
) -> None:
    original, copy = tmp_path / "run", tmp_path / "copy" / "run"
    checkpoint.save(state(1), original, stripes)
    shutil.copytree(original, copy)
    (copy / "manifest.json").unlink()
    checkpoint.Manager(copy.parent, stripes).retire()
    checkpoint.save(state(2), copy)
    assert holds(1, original)
    (original / "manifest.json").unlink()
    checkpoint.save(state(3), original)
    assert data_of(stripes) == [], "the orphans of the original are its own"


@pytest.mark.parametrize("how", ["list", "reversed", "mapping"])
def test_moved_stripes_are_found_by_every_reader(
    tmp_path: Path, stripes: list[Path], how: str
) -> None:
    path = tmp_path / "run"
    checkpoint.save(state(1), path, stripes)
    moved = move(stripes, "-new")
    given: Any = {
        "list": moved,
        "reversed": moved[::-1],
        "mapping": dict(zip(stripes, moved, strict=True)),
    }[how]
    with pytest.raises(checkpoint.CorruptCheckpointError, match="stripe_dirs="):
        checkpoint.load(path)
    assert not checkpoint.verify(path).ok
    assert holds(1, path, stripe_dirs=given)
    into = state(5)
    checkpoint.load(path, into=into, stripe_dirs=given)
    assert torch.equal(into["w3"], state(1)["w3"])
    assert checkpoint.verify(path, stripe_dirs=given).ok
    assert checkpoint.list_tensors(path) == list(state(1))
    files = checkpoint.export_safetensors(path, tmp_path / "shards", stripe_dirs=given)
    assert all(file.is_file() for file in files)
    group = checkpoint.open_zarr(path, stripe_dirs=given)
    assert np.all(np.asarray(group["w1"]) == 2)
    references = checkpoint.write_references(path, tmp_path / "refs.json", stripe_dirs=given)
    assert "-new" in references.read_text()


def test_data_on_an_ssd_that_is_not_mounted_stay_and_are_named(
    tmp_path: Path, stripes: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "run"
    checkpoint.save(state(1), path, stripes)
    (away,) = move(stripes[:1], "-away")
    checkpoint.save(state(2), path, stripes[1:])
    assert holds(2, path)
    assert str(stripes[0]) in caplog.text
    assert len(data_of([away])) == 1


def test_a_series_finds_moved_stripes_among_its_own(
    tmp_path: Path, stripes: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=2)
    manager.save(1, state(1))
    manager.save(2, state(2))
    moved = move(stripes, "-new")
    assert checkpoint.Manager(tmp_path / "run").steps() == []
    caplog.clear()
    manager = checkpoint.Manager(tmp_path / "run", moved, keep=2)
    assert manager.steps() == [1, 2]
    assert torch.equal(manager.load()["w0"], state(2)["w0"])
    manager.save(3, state(3))
    assert not caplog.records
    assert manager.steps() == [2, 3]
    assert {name.split(".")[0] for name in data_of(moved)} == {"step-2", "step-3"}


def test_stripes_that_were_added_or_taken_away_do_not_hide_older_steps(
    tmp_path: Path, stripes: list[Path]
) -> None:
    checkpoint.Manager(tmp_path / "run", stripes).save(1, state(1))
    other = tmp_path / "ssd2"
    other.mkdir()
    assert checkpoint.Manager(tmp_path / "run", [stripes[0], other]).latest() == 1
    assert checkpoint.Manager(tmp_path / "run", [other]).latest() == 1
    assert holds(1, tmp_path / "run" / "step-1", stripe_dirs=[other])


def test_a_copy_with_its_own_stripes_is_read_from_them(tmp_path: Path, stripes: list[Path]) -> None:
    checkpoint.save(state(1), tmp_path / "run", stripes)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    copies = [shutil.copytree(stripe, tmp_path / f"copy-{stripe.name}") for stripe in stripes]
    (file,) = stripes[0].rglob("*.safetensors")
    os.truncate(file, 4096)
    with pytest.raises(checkpoint.CorruptCheckpointError):
        checkpoint.load(tmp_path / "copy")
    assert holds(1, tmp_path / "copy", stripe_dirs=copies)
    checkpoint.save(state(2), tmp_path / "copy", copies)
    assert holds(2, tmp_path / "copy")
    assert file.is_file(), "of the original nothing was removed"


def test_data_gathered_in_one_directory_under_another_name_are_found(
    tmp_path: Path, stripes: list[Path]
) -> None:
    uuid = checkpoint.save(state(1), tmp_path / "run", stripes).uuid
    target = tmp_path / "all" / f"best.{uuid}"
    target.mkdir(parents=True)
    for file in tmp_path.glob("ssd*/*/*.safetensors"):
        file.rename(target / file.name)
    assert holds(1, tmp_path / "run", stripe_dirs=[tmp_path / "all"])


def test_nonsense_is_refused(tmp_path: Path, stripes: list[Path]) -> None:
    path = tmp_path / "run"
    checkpoint.save(state(1), path, stripes)
    with pytest.raises(TypeError, match="is one path"):
        checkpoint.load(path, stripe_dirs=str(stripes[0]))
    with pytest.raises(NotADirectoryError, match="missing"):
        checkpoint.load(path, stripe_dirs=[tmp_path / "missing"])
    with pytest.raises(NotADirectoryError, match="missing"):
        checkpoint.load(path, stripe_dirs={stripes[0]: tmp_path / "missing"})
    with pytest.raises(ValueError, match="its data are in") as caught:
        checkpoint.load(path, stripe_dirs={tmp_path / "other": stripes[0]})
    assert str(stripes[1]) in str(caught.value)


def generation_of(path: Path) -> Path:
    (found,) = [entry for entry in path.iterdir() if entry.is_dir()]
    return found


@pytest.mark.parametrize("marked", [False, True])
def test_a_planted_list_of_stripes_removes_nothing_elsewhere(
    tmp_path: Path, stripes: list[Path], marked: bool
) -> None:
    """A checkpoint of a stranger that claims what another one has."""
    info = checkpoint.save(state(1), tmp_path / "run", stripes)
    plant = tmp_path / "strange" / "run"
    home = plant / info.uuid
    home.mkdir(parents=True)
    names = [str(stripe / f"run.{info.uuid}") for stripe in stripes]
    (home / "stripes.json").write_text(json.dumps(names))
    if marked:
        shutil.copy(Path(names[0]) / OWNER_NAME, home)
    checkpoint.save(state(2), plant)
    assert holds(1, tmp_path / "run")


def test_a_stripe_that_is_a_link_is_not_followed(tmp_path: Path, stripes: list[Path]) -> None:
    path = tmp_path / "run"
    info = checkpoint.save(state(1), path, stripes)
    outside = tmp_path / "outside"
    made = stripes[0] / f"run.{info.uuid}"
    made.rename(outside)
    made.symlink_to(outside)
    assert holds(1, path)
    checkpoint.save(state(2), path, stripes)
    assert (outside / "r0-0.safetensors").is_file()
    assert holds(2, path)


@pytest.mark.parametrize("name", ["stripes.json", OWNER_NAME, "manifest.json"])
@pytest.mark.parametrize("kind", ["pipe", "link", "directory"])
def test_planted_things_do_not_hold_up_or_lead_astray_a_save(
    tmp_path: Path, stripes: list[Path], name: str, kind: str
) -> None:
    path = tmp_path / "run"
    info = checkpoint.save(state(1), path, stripes)
    folder = {"stripes.json": path / info.uuid, "manifest.json": path}.get(
        name, stripes[0] / f"run.{info.uuid}"
    )
    secret = tmp_path / "secret"
    secret.write_text("[]")
    (folder / name).unlink()
    if kind == "pipe":
        os.mkfifo(folder / name)
    elif kind == "link":
        (folder / name).symlink_to(secret)
    else:
        (folder / name).mkdir()
    if name == "manifest.json":
        with pytest.raises(FileExistsError, match=r"manifest\.json"):
            checkpoint.save(state(2), path, stripes)
    else:
        checkpoint.save(state(2), path, stripes)
        assert holds(2, path)
    assert secret.read_text() == "[]"


def test_a_link_in_the_place_of_a_generation_is_not_followed(tmp_path: Path) -> None:
    path, outside = tmp_path / "run", tmp_path / "outside"
    checkpoint.save(state(1), outside)
    path.mkdir()
    (path / "0badc0de").symlink_to(generation_of(outside))
    checkpoint.save(state(2), path)
    assert holds(1, outside)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_directories_mounted_elsewhere_load_and_stay_owned(
    tmp_path: Path, stripes: list[Path]
) -> None:
    path = tmp_path / "run"
    path.mkdir()
    checkpoint.save(state(1), path, stripes)
    mounted = [tmp_path / f"mnt-{source.name}" for source in [path, *stripes]]
    for source, target in zip([path, *stripes], mounted, strict=True):
        target.mkdir()
        try:
            subprocess.run(["mount", "--bind", source, target], check=True, capture_output=True)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no bind mounts here: {error.stderr!r}")
    try:
        assert holds(1, mounted[0], stripe_dirs=mounted[1:])
        checkpoint.save(state(2), mounted[0], mounted[1:])
        assert holds(2, mounted[0])
        assert holds(2, path, stripe_dirs=stripes)
        assert len(data_of(stripes)) == 2
    finally:
        for target in mounted:
            subprocess.run(["umount", target], check=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
def test_dcp_finds_the_stripes_where_they_are_now(tmp_path: Path, stripes: list[Path]) -> None:
    checkpoint.save(state(1), tmp_path / "run", stripes)
    moved = move(stripes, "-moved")
    found: dict[str, Any] = {name: torch.zeros(5000) for name in state(1)}
    reader = StorageReader(tmp_path / "run", stripe_dirs=moved)
    dcp_load(found, storage_reader=reader, no_dist=True)
    assert all(torch.equal(found[name], tensor) for name, tensor in state(1).items())


def test_a_copy_leaves_directories_on_stripes_that_hold_no_data_of_the_original(
    tmp_path: Path,
) -> None:
    """Those of a save that runs hold none yet, and without them it would fail."""
    stripes = [tmp_path / name for name in ("one", "two")]
    for stripe in stripes:
        stripe.mkdir()
    manager = checkpoint.Manager(tmp_path / "run", stripes, keep=None)
    for step in (1, 2):
        manager.save(step, {"w": torch.ones(4)})  # of one file, on the first of them
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    checkpoint.Manager(tmp_path / "copy", stripes, keep=1).save(3, {"w": torch.ones(4)})
    assert not (tmp_path / "copy" / "step-1").exists()
    assert [len(list(stripe.iterdir())) for stripe in stripes] == [3, 3]
    checkpoint.Manager(tmp_path / "run", stripes, keep=1).retire()
    assert [len(list(stripe.glob("step-1.*"))) for stripe in stripes] == [0, 0]
    assert [len(list(stripe.iterdir())) for stripe in stripes] == [2, 2]
