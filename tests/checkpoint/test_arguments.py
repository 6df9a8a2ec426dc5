"""Arguments that cannot be meant are refused at once; those that can are taken as they are now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint


@pytest.fixture
def stripes(tmp_path: Path) -> list[Path]:
    folders = [tmp_path / f"ssd{k}" for k in range(2)]
    for folder in folders:
        folder.mkdir()
    return folders


def test_a_manager_uses_stripes_that_a_generator_gives(tmp_path: Path, stripes: list[Path]) -> None:
    manager = checkpoint.Manager(tmp_path / "run", stripe_dirs=(stripe for stripe in stripes))  # type: ignore[arg-type]
    for step in (1, 2):
        manager.save(step, {"w": torch.ones(4 << 20)})
    for stripe in stripes:
        names = {entry.name.split(".")[0] for entry in stripe.iterdir()}
        assert names == {"step-1", "step-2"}


def test_a_manager_keeps_to_the_stripes_that_it_was_given(
    tmp_path: Path, stripes: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    manager = checkpoint.Manager("run", stripe_dirs=["ssd0", "ssd1"])
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    manager.save(1, {"w": torch.ones(4 << 20)})
    assert all(any(stripe.iterdir()) for stripe in stripes)
    assert manager.latest() == 1


@pytest.mark.parametrize("name", ["keep", "keep_every"])
@pytest.mark.parametrize("value", [2.0, "2"])
def test_a_manager_refuses_what_is_no_number_of_steps(
    tmp_path: Path, name: str, value: Any
) -> None:
    with pytest.raises(TypeError, match=f"{name}=.* is no int; give int"):
        checkpoint.Manager(tmp_path / "run", **{name: value})


@pytest.mark.parametrize("function", ["save", "save_async", "load", "verify", "write_safetensors"])
@pytest.mark.parametrize(
    ("value", "kind"), [("1GiB", TypeError), (1e9, TypeError), (-1, ValueError)]
)
def test_staging_bytes_that_are_no_number_of_bytes_are_refused(
    tmp_path: Path, function: str, value: Any, kind: type[Exception]
) -> None:
    arguments: list[Any] = [tmp_path / "step"]
    if function not in ("load", "verify"):
        arguments.insert(0, {"w": torch.ones(1)})
    with pytest.raises(kind, match="staging_bytes="):
        getattr(checkpoint, function)(*arguments, staging_bytes=value)
    assert not (tmp_path / "step").exists()


@pytest.mark.parametrize("value", [None, 1.0, "x", [1], torch.float32])
def test_an_export_of_what_is_no_tensor_names_it(tmp_path: Path, value: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot write 'head': .* is no tensor"):
        checkpoint.write_safetensors({"w": torch.ones(1), "head": value}, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("value", "kind"),
    [("5GB", TypeError), (float("nan"), TypeError), (0, ValueError), (-5, ValueError)],
)
def test_a_size_of_shards_that_is_none_is_refused(
    tmp_path: Path, value: Any, kind: type[Exception]
) -> None:
    checkpoint.save({"w": torch.ones(1)}, tmp_path / "step")
    with pytest.raises(kind, match="max_shard_bytes="):
        checkpoint.write_safetensors({"w": torch.ones(1)}, tmp_path / "a", max_shard_bytes=value)
    with pytest.raises(kind, match="max_shard_bytes="):
        checkpoint.export_safetensors(tmp_path / "step", tmp_path / "b", max_shard_bytes=value)
    assert [file.name for file in tmp_path.iterdir()] == ["step"]
