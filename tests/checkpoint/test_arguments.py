"""Arguments that cannot be meant are refused at once; those that can are taken as they are now."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import checkpoint
import checkpoint.dcp


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


def _given(kind: str) -> Any:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    return {
        "module": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
        "generator": model.parameters(),
        "defaultdict": defaultdict(int),
        "path": Path("a"),
        "function": len,
    }[kind]


_REMEDIES = {
    "module": r"give what its state_dict\(\) returns",
    "optimizer": r"give what its state_dict\(\) returns",
    "scheduler": r"give what its state_dict\(\) returns",
    "generator": r"give list\(\.\.\.\) of it",
    "defaultdict": r"give dict\(\.\.\.\) of it",
    "path": r"give str\(\.\.\.\) of it",
    "function": "convert it to plain containers",
}


@pytest.mark.parametrize("kind", _REMEDIES)
def test_what_no_tree_holds_is_refused_with_what_to_give_instead(tmp_path: Path, kind: str) -> None:
    given, remedy = _given(kind), _REMEDIES[kind]
    with pytest.raises(TypeError, match=rf"^cannot save state\['x'\]: .*; {remedy}"):
        checkpoint.save({"x": given}, tmp_path / "step")
    checkpoint.save({"x": torch.ones(2)}, tmp_path / "step")
    with pytest.raises(TypeError, match=r"^cannot load: into\['x'\] is a .*; give ") as caught:
        checkpoint.load(tmp_path / "step", into={"x": given})
    if "state_dict" in remedy:
        assert "state_dict()" in str(caught.value)
        assert "load_state_dict()" in str(caught.value)
        with pytest.raises(TypeError, match=f"not a mapping; {remedy}"):
            checkpoint.write_safetensors(given, tmp_path / "export")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_path_to_something_else_is_refused_with_what_it_is(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2)}
    torch.save(tensors, tmp_path / "x.pt")
    save_file(tensors, tmp_path / "x.safetensors")
    (tmp_path / "hub").mkdir()
    save_file(tensors, tmp_path / "hub" / "model.safetensors")
    dcp_save(dict(tensors), checkpoint_id=tmp_path / "torch", no_dist=True)
    checkpoint.Manager(tmp_path / "run").save(1, tensors)
    step = tmp_path / "run" / "step-1"
    (data,) = (entry for entry in step.iterdir() if entry.is_dir())
    others = {
        tmp_path / "x.pt": "read it with torch.load",
        tmp_path / "x.safetensors": r"read it with safetensors\.torch\.load_file",
        tmp_path / "hub": "a folder of safetensors files",
        tmp_path / "torch": r"a checkpoint of torch\.distributed\.checkpoint",
        tmp_path / "run": r"the root of a Manager; use Manager\(path\)\.load\(\)",
        step / "manifest.json": f"give the directory that it is in, {step}",
        data: f"data of the checkpoint {step}; give that path",
    }
    for path, what in others.items():
        kind = checkpoint.IncompleteCheckpointError if path.is_dir() else NotADirectoryError
        for read in (checkpoint.load, checkpoint.list_tensors, checkpoint.verify):
            with pytest.raises(kind, match=what):
                read(path)


def test_what_is_no_path_is_refused_by_the_name_of_the_argument(tmp_path: Path) -> None:
    given: Any = {"w": 1}
    refused: Any
    for refused in (
        lambda: checkpoint.save(tmp_path, given),
        lambda: checkpoint.load(given),
        lambda: checkpoint.verify(b"/tmp/step"),  # type: ignore[arg-type]
        lambda: checkpoint.open_stream(given),
        lambda: checkpoint.dcp.StorageReader(given),
        lambda: checkpoint.dcp.StorageWriter(given),
    ):
        with pytest.raises(TypeError, match=r"^path is a (dict|bytes), not a path; give a str"):
            refused()
    with pytest.raises(TypeError, match=r"^root is a dict, not a path"):
        checkpoint.Manager(given)
    with pytest.raises(TypeError, match="map_location is a dict, not a device"):
        checkpoint.load(tmp_path, map_location=given)
    with pytest.raises(TypeError, match=r"give checkpoint\.GroupCoordinator"):
        checkpoint.save({}, tmp_path / "step", coordinator=given)


@pytest.mark.parametrize("path", ["s3://bucket/run", "file:///tmp/run", "", Path("hdfs://host/x")])
def test_a_path_that_no_file_system_has_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str | Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for act in (
        lambda: checkpoint.save({}, path),
        lambda: checkpoint.save_async({}, path).result(),
        lambda: checkpoint.load(path),
        lambda: checkpoint.open_stream(path, "wb"),
        lambda: checkpoint.Manager(path),
        lambda: checkpoint.dcp.StorageWriter(path),
    ):
        with pytest.raises(ValueError, match=r"is a URL, and only|give '\.' for the current"):
            act()
    assert not list(tmp_path.iterdir())
    checkpoint.save({}, "./s3:/run")
    assert (tmp_path / "s3:" / "run").is_dir()


def test_a_loop_of_links_is_an_error_of_the_system(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for act in (
        lambda: checkpoint.save({}, loop),
        lambda: checkpoint.load(loop),
        lambda: checkpoint.open_stream(loop),
        lambda: checkpoint.save({}, tmp_path / "run", [loop]),
    ):
        with pytest.raises(OSError, match=r"symbolic links: .*loop"):
            act()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.raises(TypeError, match="nested tensor; save the list"):
        checkpoint.save({"w": nested}, tmp_path / "run")
    checkpoint.save({"w": torch.ones(2)}, tmp_path / "run")
    with pytest.raises(ValueError, match="nested tensor; give tensors"):
        checkpoint.load(tmp_path / "run", into={"w": nested})


@pytest.mark.parametrize("transform", ["grad", "vmap", "functionalize"])
def test_a_tensor_of_a_transform_is_refused_by_name(tmp_path: Path, transform: str) -> None:
    """Torch's errors (it has no storage) named no leaf."""
    checkpoint.save({"w": torch.ones(2)}, tmp_path / "run")

    def within(x: torch.Tensor) -> torch.Tensor:
        tree = {"model": {"w": x}}
        for save in (checkpoint.save, checkpoint.save_async):
            with pytest.raises(TypeError, match=r"state\['model'\]\['w'\].* torch.func"):
                save(tree, tmp_path / "other")
        with pytest.raises(ValueError, match=r"into\['w'\].* torch.func"):
            checkpoint.load(tmp_path / "run", into={"w": x})
        return x.sum()

    getattr(torch.func, transform)(within)(
        torch.ones(2, 2) if transform == "vmap" else torch.ones(2)
    )
    assert not (tmp_path / "other").exists()


def test_arguments_of_another_kind_are_named(tmp_path: Path) -> None:
    checkpoint.save({"w": torch.ones(2)}, tmp_path / "run")
    number: Any = 5
    with pytest.raises(TypeError, match="prefix=5 is no text"):
        checkpoint.export_safetensors(tmp_path / "run", tmp_path / "out", prefix=number)
    with pytest.raises(TypeError, match="stripe_dirs=5 is not a list"):
        checkpoint.save({}, tmp_path / "run", number)
    with pytest.raises(TypeError, match="stripe_dirs=5 is not a list"):
        checkpoint.load(tmp_path / "run", stripe_dirs=number)


@pytest.mark.parametrize("odd", [7, "odd", object(), [1]], ids=lambda value: type(value).__name__)
def test_options_of_another_type_are_refused_by_name(tmp_path: Path, odd: Any) -> None:
    path, new = tmp_path / "run", tmp_path / "new"
    checkpoint.save({"w": torch.ones(2)}, path)
    for act in (
        lambda **options: checkpoint.save({}, new, **options),
        lambda **options: checkpoint.save_async({}, new, **options),
        lambda **options: checkpoint.load(path, **options),
        lambda **options: checkpoint.verify(path, **options),
        lambda **options: checkpoint.Manager(new, **options),
    ):
        with pytest.raises(TypeError, match="engine is a"):
            act(engine=odd)
        with pytest.raises(TypeError, match=r"stripe_dirs"):
            act(stripe_dirs=[7])
    for read in (checkpoint.load, checkpoint.open_zarr, checkpoint.dcp.StorageReader):
        with pytest.raises(TypeError, match="verify="):
            read(path, verify=odd)
    with pytest.raises(ValueError, match="map_location="):
        checkpoint.load(path, map_location="odd")
    pending = checkpoint.save_async({}, new)
    pending.result()
    if not isinstance(odd, int):
        with pytest.raises(TypeError, match="timeout="):
            pending.result(odd)
        for writes in (checkpoint.dcp.StorageWriter, checkpoint.dcp.StorageReader):
            with pytest.raises(TypeError, match="staging_bytes="):
                writes(new, staging_bytes=odd)
    if not isinstance(odd, str):
        for export in (
            lambda: checkpoint.export_safetensors(path, odd),
            lambda: checkpoint.write_safetensors({"w": torch.ones(1)}, odd),
        ):
            with pytest.raises(TypeError, match="folder is a"):
                export()
        with pytest.raises(TypeError, match="file is a"):
            checkpoint.write_references(path, odd)


@pytest.mark.parametrize("text", ["a\0b", "a\ud800"], ids=ascii)
def test_a_text_that_no_file_can_be_called_is_refused_by_the_argument(
    tmp_path: Path, text: str
) -> None:
    state, step = {"w": torch.ones(1)}, tmp_path / "step"
    checkpoint.save(state, step)
    calls: list[tuple[str, Any]] = [
        ("path", lambda: checkpoint.save(state, text)),
        ("path", lambda: checkpoint.load(text)),
        ("path", lambda: checkpoint.open_stream(text, "wb")),
        ("root", lambda: checkpoint.Manager(text)),
        ("folder", lambda: checkpoint.export_safetensors(step, text)),
        ("stripe_dirs", lambda: checkpoint.save(state, step, stripe_dirs=[text])),
        ("stripe_dirs", lambda: checkpoint.load(step, stripe_dirs=[text])),
        ("stripe_dirs", lambda: checkpoint.load(step, stripe_dirs={text: tmp_path})),
    ]
    for name, call in calls:
        with pytest.raises(ValueError, match=rf"^{name}=.* is no path: no file has a zero byte"):
            call()
