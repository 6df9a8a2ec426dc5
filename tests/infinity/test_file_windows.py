"""Windows over files give the bytes of the files, whatever is asked for after what."""

import itertools
import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import infinity
from aio import AioError
from infinity.values.initial.file_windows import NUM_WINDOWS, WINDOW_BYTES, FileWindows
from infinity.values.initial.weight_files import WeightFolder
from tests.support.examples import examples
from tests.support.training import same_values, values_of

SIZE = (2 * NUM_WINDOWS + 3) * WINDOW_BYTES + 4097


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, bytes]]:
    folder = tmp_path_factory.mktemp("files")
    made = []
    for number in range(2):
        data = np.random.default_rng(number).bytes(SIZE)
        (folder / str(number)).write_bytes(data)
        made.append((folder / str(number), data))
    return made


@settings(max_examples=examples(20))
@given(
    reads=st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, SIZE), st.integers(0, 3 * WINDOW_BYTES)),
        max_size=6,
    )
)
def test_reads_in_any_order_give_the_bytes_of_the_files(
    files: list[tuple[Path, bytes]], reads: list[tuple[int, int, int]]
) -> None:
    windows = FileWindows()
    try:
        for number, offset, nbytes in reads:
            path, data = files[number]
            expected = data[offset : offset + nbytes]
            out = bytearray(len(expected))
            windows.read(path, offset, memoryview(out))
            assert out == expected
    finally:
        windows.close()


def test_read_beyond_the_end_is_an_error_that_names_the_file_and_leaves_nothing(
    files: list[tuple[Path, bytes]],
) -> None:
    windows = FileWindows()
    path, data = files[0]
    out = bytearray(100)
    with pytest.raises(AioError, match=path.name) as caught:
        windows.read(path, SIZE - 50, memoryview(out))
    assert caught.value.filename == str(path)
    windows.read(path, SIZE - 100, memoryview(out))
    assert out == data[-100:]
    with pytest.raises(AioError, match=path.name):  # of a window that is there, cut at the end
        windows.read(path, SIZE - 50, memoryview(out))
    windows.close()
    windows.close()


@pytest.mark.parametrize("change", ["shorter", "another dtype", "another shape", "without it"])
def test_a_file_that_changes_once_it_was_looked_at_is_an_error_that_names_it(
    change: str, tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(300_000), "b": torch.ones(4)}, path)
    folder, windows = WeightFolder(path), FileWindows()
    folder.on_meta("a")  # maps the file that is there
    try:
        if change == "shorter":
            source = folder.stored("a", windows)
            os.truncate(path, path.stat().st_size - 4)
            with pytest.raises(ValueError, match=r"model\.safetensors is another file"):
                source.read(0, memoryview(bytearray(4 * 300_000)))
            return
        others = {
            "another dtype": torch.ones(600_000, dtype=torch.float16),
            "another shape": torch.ones(3, 100_000),
        }
        other = {"a": others[change]} if change in others else {}
        save_file(other | {"b": torch.ones(4)}, tmp_path / "other")
        (tmp_path / "other").replace(path)
        with pytest.raises(ValueError, match=r"model\.safetensors is another file than it was"):
            folder.stored("a", windows)
    finally:
        windows.close()
        folder.close()


def test_a_file_that_is_replaced_between_two_reads_is_an_error(tmp_path: Path) -> None:
    path, aside = tmp_path / "model.safetensors", tmp_path / "aside.safetensors"
    for number, file in enumerate((path, aside)):
        save_file({"a": torch.full((1000,), float(number))}, file)
    windows = FileWindows()
    try:
        mine, beside = (WeightFolder(file).stored("a", windows) for file in (path, aside))
        out = bytearray(2000)
        mine.read(0, memoryview(out))
        beside.read(0, memoryview(out))
        save_file({"a": torch.zeros(1000)}, tmp_path / "other")
        (tmp_path / "other").replace(path)
        with pytest.raises(ValueError, match="is another file"):
            mine.read(2000, memoryview(out))
    finally:
        windows.close()


@pytest.mark.parametrize("change", ["written to", "replaced", "removed"])
def test_a_file_of_weights_that_is_written_to_while_it_is_read_is_an_error(
    change: str, tmp_path: Path, nvme: Path
) -> None:
    path, other = tmp_path / "model.safetensors", tmp_path / "other"
    layers = {f"{n}.weight": torch.full((600, 600), float(n)) for n in range(6)}
    save_file(layers, path)
    save_file({name: values + 10 for name, values in layers.items()}, other)
    model = nn.Sequential(*[nn.Linear(600, 600, bias=False) for _ in range(6)])
    before = values_of(model)
    find, reads = FileWindows._copy, itertools.count()

    def copied(*arguments: Any) -> None:
        if next(reads) == 3:
            if change == "written to":
                with path.open("r+b") as opened:  # at no moment shorter
                    opened.write(other.read_bytes())
            elif change == "replaced":
                other.replace(path)
            else:
                path.unlink()
        find(*arguments)

    block = infinity.offload(model, nvme, weights=path, host_memory="64MiB")
    with mock.patch.object(FileWindows, "_copy", copied):
        if change != "written to":
            with block:
                pass
            assert same_values(layers, values_of(model))
            return
        with pytest.raises(ValueError, match=r"model\.safetensors is another file than it was"):
            block.__enter__()
    assert same_values(before, values_of(model))


class _Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(600, 600))
        self.count = nn.Buffer(torch.zeros(300, 300))


@pytest.mark.parametrize("when", ["parameters", "buffers", "inside"])
@pytest.mark.parametrize("change", ["written to", "replaced", "shortened"])
def test_a_file_that_has_buffers_alone_is_not_mixed_with_what_it_was(
    change: str, when: str, tmp_path: Path, nvme: Path
) -> None:
    path = tmp_path / "b.safetensors"
    save_file({"weight": torch.ones(600, 600)}, tmp_path / "a.safetensors")
    save_file({"count": torch.ones(300, 300)}, path)
    save_file({"count": torch.full((300, 300), 2.0)}, tmp_path / "other")
    files = {"weight": "a.safetensors", "count": "b.safetensors"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    def changes() -> None:
        if not (tmp_path / "other").exists():
            return
        if change == "written to":
            with path.open("r+b") as opened:
                opened.write((tmp_path / "other").read_bytes())
        if change == "shortened":
            os.truncate(path, 4096)
        (tmp_path / "other").replace(path if change == "replaced" else tmp_path / "used")

    def before(function: Any) -> Any:
        def changed(*arguments: Any) -> Any:
            changes()
            return function(*arguments)

        return changed

    model = _Counted()
    block = infinity.offload(model, nvme, weights=tmp_path, host_memory="64MiB")
    if when == "inside":
        with block:
            changes()
            assert (model.count == 1).all()
        assert (model.count == 1).all()
        return
    where, name = (FileWindows, "_copy") if when == "parameters" else (WeightFolder, "read")
    with (
        mock.patch.object(where, name, before(getattr(where, name))),
        pytest.raises(ValueError, match=r"b\.safetensors is another file than it was"),
    ):
        block.__enter__()
    assert not any(values.any() for values in model.state_dict().values())
