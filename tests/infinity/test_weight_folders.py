"""``weights=folder`` reads what ``from_pretrained`` would read of it, or refuses by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import checkpoint
import infinity
from tests.support.scripts import Script
from tests.support.training import same_bits

WIDTH = 4


def _model() -> nn.Module:
    model = nn.Module()
    model.first = nn.Linear(WIDTH, WIDTH)
    model.second = nn.Linear(WIDTH, WIDTH)
    model.tied = nn.Linear(WIDTH, WIDTH, bias=False)
    model.tied.weight = model.first.weight
    return model


def _state(value: float) -> dict[str, torch.Tensor]:
    return {
        f"{layer}.{name}": torch.full((WIDTH, WIDTH) if name == "weight" else (WIDTH,), value)
        for layer in ("first", "second")
        for name in ("weight", "bias")
    }


def _shards(folder: Path, value: float) -> None:
    folder.mkdir(exist_ok=True)
    where: dict[str, str] = {}
    for number, layer in enumerate(("first", "second"), 1):
        file = f"model-0000{number}-of-00002.safetensors"
        part = {name: tensor for name, tensor in _state(value).items() if name.startswith(layer)}
        save_file(part, folder / file)
        where |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))


def _loaded(weights: Path, nvme: Path) -> dict[str, torch.Tensor]:
    with torch.device("meta"):
        model = _model()
    with (
        infinity.offload(
            model, nvme, weights=weights, optimizer=None, host_memory="64MiB"
        ) as offloaded,
        offloaded.gathered(),
    ):
        return {name: value.detach().clone() for name, value in model.named_parameters()}


def _stale_shard(folder: Path) -> None:
    _shards(folder, 1.0)
    save_file(_state(2.0), folder / "model-00003-of-00003.safetensors")


def _original(folder: Path) -> None:
    _shards(folder, 1.0)
    (folder / "original").mkdir()
    save_file(_state(2.0), folder / "original" / "model.safetensors")


def _second_file(folder: Path) -> None:
    folder.mkdir()
    save_file(_state(1.0), folder / "model.safetensors")
    save_file(_state(2.0), folder / "zz.safetensors")


def _only_file(folder: Path) -> None:
    folder.mkdir()
    save_file(_state(1.0), folder / "weights.safetensors")


FOLDERS: dict[str, Callable[[Path], None]] = {
    "stale shard": _stale_shard,
    "original": _original,
    "second file": _second_file,
    "only file": _only_file,
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folder_gives_what_belongs_to_the_model(name: str, nvme: Path, tmp_path: Path) -> None:
    FOLDERS[name](tmp_path / "folder")
    for key, value in _loaded(tmp_path / "folder", nvme).items():
        assert same_bits(value, _state(1.0)[key]), key


def test_index_can_be_passed_itself(nvme: Path, tmp_path: Path) -> None:
    _stale_shard(tmp_path / "folder")
    found = _loaded(tmp_path / "folder" / "model.safetensors.index.json", nvme)
    assert all(same_bits(value, _state(1.0)[key]) for key, value in found.items())


def _no_index(folder: Path) -> None:
    _shards(folder, 1.0)
    (folder / "model.safetensors.index.json").unlink()


def _lost_shard(folder: Path) -> None:
    _shards(folder, 1.0)
    (folder / "model-00002-of-00002.safetensors").unlink()


def _twice(folder: Path) -> None:
    _shards(folder, 1.0)
    save_file(_state(2.0), folder / "model-00002-of-00002.safetensors")


def _pickled(folder: Path) -> None:
    folder.mkdir()
    (folder / "pytorch_model.bin").write_bytes(b"")


def _below(folder: Path) -> None:
    _shards(folder.with_name("inner"), 1.0)
    folder.mkdir()
    folder.with_name("inner").rename(folder / "inner")


def _broken(folder: Path) -> None:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"no tensors")


def _untied(folder: Path) -> None:
    folder.mkdir()
    save_file(
        _state(1.0) | {"tied.weight": torch.zeros(WIDTH, WIDTH)}, folder / "model.safetensors"
    )


REFUSED: dict[str, tuple[Callable[[Path], None], type[Exception], str]] = {
    "no index": (
        _no_index,
        ValueError,
        "model-00001.*model-00002.* and no model.*index",
    ),
    "lost shard": (_lost_shard, FileNotFoundError, "names model-00002-of-00002.safetensors"),
    "twice": (_twice, ValueError, "first.* is both in model-00001.* and in model-00002"),
    "pickled": (
        _pickled,
        ValueError,
        r"pickled files alone.*python -c .*from_pretrained.*save_pretrained",
    ),
    "below": (_below, ValueError, "no .safetensors file; pass .*inner"),
    "broken": (_broken, ValueError, "model.safetensors is no safetensors file"),
    "untied": (_untied, ValueError, "first.weight and tied.weight are one tied parameter"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_folder_that_says_no_one_thing_is_refused(name: str, nvme: Path, tmp_path: Path) -> None:
    make, kind, message = REFUSED[name]
    make(tmp_path / "folder")
    with pytest.raises(kind, match=message):
        _loaded(tmp_path / "folder", nvme)


@pytest.mark.parametrize("kind", ["safetensors", "checkpoint"])
def test_everything_that_does_not_fit_is_named_at_once(
    kind: str, nvme: Path, tmp_path: Path
) -> None:
    state = _state(1.0)
    del state["first.bias"], state["second.bias"]
    state["second.weight"] = torch.zeros(3, WIDTH)
    state["third.weight"] = torch.zeros(1)
    if kind == "checkpoint":
        checkpoint.save({"model": state}, tmp_path / "weights")
    else:
        save_file(state, tmp_path / "weights")
    message = (
        r"missing: first\.bias, second\.bias; "
        r"of another shape: second\.weight \(.*3, 4.*4, 4.* in the model\).*without weights="
    )
    with pytest.raises(ValueError, match=message) as raised:
        _loaded(tmp_path / "weights", nvme)
    assert ("not used: third.weight" in str(raised.value)) == (kind == "safetensors")


def test_tensors_that_are_not_used_are_named_in_a_warning(
    nvme: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_file(_state(1.0) | {"third.weight": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with caplog.at_level(logging.WARNING):
        _loaded(tmp_path / "weights.safetensors", nvme)
    assert "has tensors that Module has not; not used: third.weight" in caplog.text


@pytest.mark.proof
def test_a_pickled_file_is_refused_with_a_command_that_converts_it(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = torch.nn.Linear(3, 2, device="meta")
    values = {"weight": torch.ones(2, 3), "bias": torch.zeros(2)}
    torch.save(values, tmp_path / "model.bin")
    with (
        pytest.raises(ValueError, match="pickled files alone, which are not read") as refused,
        infinity.offload(model, nvme, weights=tmp_path / "model.bin", host_memory="1GiB"),
    ):
        pass
    code = str(refused.value).split('python -c "')[1].split('"')[0]
    converting = Script(f"import os; os.chdir({str(tmp_path)!r})\n{code}")
    assert converting.end() == ("", "")
    with (
        infinity.offload(
            model, nvme, weights=tmp_path / "model.safetensors", host_memory="1GiB"
        ) as offloaded,
        offloaded.gathered(),
    ):
        assert torch.equal(model.weight, values["weight"])


def test_values_drawn_for_a_model_on_meta_are_told(
    nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with infinity.offload(torch.nn.Linear(3, 2, device="meta"), nvme, host_memory="1GiB"):
        assert "2 parameters on the meta device: no weights= were given" in caplog.text
    caplog.clear()
    with infinity.offload(torch.nn.Linear(3, 2), nvme, host_memory="1GiB"):
        assert "meta" not in caplog.text


def test_weights_in_a_folder_whose_path_is_no_utf8_are_read(nvme: Path, tmp_path: Path) -> None:
    _shards(tmp_path / "plain", 3.0)
    folder = (tmp_path / "plain").rename(tmp_path / "\udcff")
    assert all((value == 3.0).all() for value in _loaded(folder, nvme).values())
