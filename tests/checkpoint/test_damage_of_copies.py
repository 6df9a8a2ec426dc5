"""Damage is that of the data that were read: a copy of them is sound or damaged by itself."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import checkpoint
from checkpoint.directory.relocation import relocation
from checkpoint.known.manifests import KnownManifests
from checkpoint.known.watched_loads import WatchedLoads
from tests.support.memory import folder_in_memory

tmp_path = folder_in_memory()


def make_steps(root: Path, stripe: Path | None = None) -> checkpoint.Manager:
    manager = checkpoint.Manager(root, [stripe] if stripe else None, keep=2)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((4,), float(step))})
    return manager


def damage(folder: Path) -> None:
    """As a disk does where a file is replaced; a link to it stays what it was."""
    (file,) = folder.rglob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[4096] ^= 1
    file.with_name("damaged").write_bytes(content)
    file.with_name("damaged").replace(file)


def kept_then(manager: checkpoint.Manager) -> list[int]:
    manager.save(3, {"w": torch.zeros(4)})
    return manager.steps()


def striped(folder: Path) -> tuple[checkpoint.Manager, dict[Path, Path]]:
    """Steps with their data on a stripe, and where there is a copy of it."""
    (folder / "stripe").mkdir()
    manager = make_steps(folder / "run", folder / "stripe")
    shutil.copytree(folder / "stripe", folder / "backup")
    return manager, {folder / "stripe": folder / "backup"}


WAYS: dict[str, Callable[[Path, dict[Path, Path]], object]] = {
    "load": lambda path, moved: checkpoint.load(path, stripe_dirs=moved),
    "verify": lambda path, moved: checkpoint.verify(path, stripe_dirs=moved),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_sound_copy_of_stripes_forgets_no_damage_of_those_that_are_used(
    tmp_path: Path, way: str
) -> None:
    manager, moved = striped(tmp_path)
    (folder,) = (tmp_path / "stripe").glob("step-2.*")
    damage(folder)
    assert not checkpoint.verify(manager.path(2))
    WAYS[way](manager.path(2), moved)
    assert kept_then(manager) == [1, 2, 3]


def test_damage_of_a_copy_of_stripes_is_none_of_those_that_are_used(tmp_path: Path) -> None:
    manager, moved = striped(tmp_path)
    (folder,) = (tmp_path / "backup").glob("step-2.*")
    damage(folder)
    assert not checkpoint.verify(manager.path(2), stripe_dirs=moved)
    with (
        checkpoint.open(manager.path(2), stripe_dirs=moved) as opened,
        pytest.raises(checkpoint.CorruptCheckpointError),
    ):
        opened["w"][...]
    assert kept_then(manager) == [2, 3]


def test_damage_of_one_stripe_is_none_of_another_that_was_read_with_it(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    places = [tmp_path / "one", tmp_path / "two"]
    manager = checkpoint.Manager(tmp_path / "run", places, keep=1)
    manager.save(1, {"v": torch.zeros(2**20), "w": torch.ones(2**20)})
    shutil.copytree(tmp_path / "one", tmp_path / "backup")
    damage(tmp_path / "backup")
    moved = {tmp_path / "one": tmp_path / "backup"}
    assert not checkpoint.verify(manager.path(1), stripe_dirs=moved)
    manager.save(2, {"w": torch.ones(4)})
    assert manager.steps() == [2]


def test_a_sound_copy_of_hard_links_forgets_no_damage(tmp_path: Path) -> None:
    manager = make_steps(tmp_path / "run")
    shutil.copytree(manager.path(2), tmp_path / "copy", copy_function=os.link)
    damage(manager.path(2))
    assert not checkpoint.verify(manager.path(2))
    assert checkpoint.verify(tmp_path / "copy")
    assert not WatchedLoads(KnownManifests()).was_damaged(tmp_path / "copy")
    assert kept_then(manager) == [1, 2, 3]


def test_a_copy_that_reads_the_same_data_is_as_damaged(tmp_path: Path) -> None:
    manager, _ = striped(tmp_path)
    (folder,) = (tmp_path / "stripe").glob("step-2.*")
    damage(folder)
    assert not checkpoint.verify(manager.path(2))
    shutil.copytree(manager.path(2), manager.path(5))
    assert WatchedLoads(KnownManifests()).was_damaged(manager.path(5))


def test_damage_is_known_where_another_manifest_of_the_same_content_has_come(
    tmp_path: Path,
) -> None:
    manager = make_steps(tmp_path / "run")
    damage(manager.path(2))
    assert not checkpoint.verify(manager.path(2))
    manifest = manager.path(2) / "manifest.json"
    shutil.copy(manifest, tmp_path / "manifest")
    (tmp_path / "manifest").replace(manifest)
    assert kept_then(manager) == [1, 2, 3]


def test_what_a_load_from_other_stripes_leaves_of_a_damaged_step_is_refused(tmp_path: Path) -> None:
    """Where the manager would look for the data there are none, and the load had some."""
    (tmp_path / "stripe").mkdir()
    manager = checkpoint.Manager(tmp_path / "run", [tmp_path / "stripe"])
    manager.save(1, {"w": torch.zeros(4)})
    manager.save(2, {"w": torch.ones(4), "v": torch.ones(4)})
    moved = (tmp_path / "stripe").rename(tmp_path / "moved")
    damage(next(moved.glob("step-2.*")))
    into = {"w": torch.full((4,), 7.0), "v": torch.full((4,), 7.0)}
    with pytest.raises(checkpoint.CorruptCheckpointError, match="v of into may hold some of it"):
        manager.load(into=into, strict=False, stripe_dirs=[moved])


@pytest.mark.parametrize("step", [2, None])
def test_damage_of_a_copy_that_a_manager_loads_from_is_none_of_its_own_stripes(
    tmp_path: Path, step: int | None
) -> None:
    manager, moved = striped(tmp_path)
    (folder,) = (tmp_path / "backup").glob("step-2.*")
    damage(folder)
    with suppress(checkpoint.CorruptCheckpointError):
        manager.load(step, stripe_dirs=moved)
    assert kept_then(manager) == [2, 3]


def test_damage_that_another_rank_finds_in_a_copy_is_none_of_the_stripes_that_are_used(
    tmp_path: Path,
) -> None:
    manager, moved = striped(tmp_path)
    loads, path = WatchedLoads(KnownManifests()), manager.path(2)
    loads.look_before(path)
    loads.note_damage(path, {"stripe_dirs": moved})
    assert not loads.was_damaged(path)
    assert WatchedLoads(KnownManifests(relocation(moved))).was_damaged(path)
    loads.look_before(path)
    loads.note_damage(path, {})
    assert loads.was_damaged(path)


def on_two_stripes(folder: Path) -> tuple[checkpoint.Manager, dict[Path, Path]]:
    """The second step has damage in both of its directories; of each there is a sound copy."""
    for name in ("one", "two"):
        (folder / name).mkdir()
    manager = checkpoint.Manager(folder / "run", [folder / "one", folder / "two"], keep=2)
    for step in (1, 2):
        manager.save(step, {"v": torch.zeros(2**20), "w": torch.ones(2**20)})
    copies = {}
    for name in ("one", "two"):
        (data,) = (folder / name).glob("step-2.*")
        copies[data] = shutil.copytree(data, folder / f"sound-{name}")
        damage(data)
    return manager, copies


def test_all_damage_that_verify_finds_is_known_where_some_of_it_was_repaired(
    tmp_path: Path,
) -> None:
    manager, copies = on_two_stripes(tmp_path)
    first, second = checkpoint.verify(manager.path(2)).problems
    data = Path(str(first.path)).parent
    assert data != Path(str(second.path)).parent
    data.rename(tmp_path / "aside")
    copies[data].rename(data)
    assert kept_then(manager) == [1, 2, 3]


def test_damage_that_verify_finds_beside_what_is_away_is_known_when_that_is_back(
    tmp_path: Path,
) -> None:
    manager, copies = on_two_stripes(tmp_path)
    away = next(iter(copies))
    away.rename(tmp_path / "away")
    assert len(checkpoint.verify(manager.path(2)).problems) == 2
    copies[away].rename(away)
    assert kept_then(manager) == [1, 2, 3]


def test_damage_of_a_hard_link_is_that_of_what_it_is_a_link_to(tmp_path: Path) -> None:
    manager = make_steps(tmp_path / "run")
    shutil.copytree(manager.path(2), tmp_path / "best", copy_function=os.link)
    (file,) = manager.path(2).rglob("*.safetensors")
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"x")
    assert not checkpoint.verify(tmp_path / "best")
    assert kept_then(manager) == [1, 2, 3]


def test_iterators_of_directories_and_patterns_are_for_all_steps_that_are_tried(
    tmp_path: Path,
) -> None:
    """One that the first step used up hid the data of the next one, which was called damaged."""
    manager, moved = striped(tmp_path)
    (folder,) = (tmp_path / "backup").glob("step-2.*")
    damage(folder)
    shutil.rmtree(tmp_path / "stripe")
    state = manager.load(stripe_dirs=iter(moved.values()), only=iter(["w"]))
    assert state["w"][0] == 1
    assert manager.loaded == checkpoint.LoadedStep(1, (2,))
