"""State of AdamW as ``infinity export --optimizer`` writes it: plain PyTorch goes on from it."""

from __future__ import annotations

import errno
import os
import resource
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import infinity
from infinity.cli import main
from infinity.commands.foreign import exporting
from infinity.commands.foreign.exporting import export_optimizer
from infinity.commands.sources import source_of
from tests.support.foreign_runs import AT, OPTIONS, Model, after, batches, run, train
from tests.support.models import seeded


def test_exported_state_goes_on_in_torch_with_the_bits_of_ours(nvme: Path, tmp_path: Path) -> None:
    model = seeded(Model)
    with infinity.offload(
        model, nvme, optimizer=infinity.AdamW(**OPTIONS), host_memory="256MiB"
    ) as offloaded:
        data = batches()
        train(model, offloaded.step, data)
        offloaded.save(tmp_path / "ours")
        expected = train(model, offloaded.step, data)
    run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
    plain = Model()
    plain.load_state_dict(load_file(tmp_path / "weights" / "model.safetensors"))
    optimizer = torch.optim.AdamW(plain.parameters())
    optimizer.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    assert train(plain, step, after(AT)) == expected
    for key, value in plain.state_dict().items():
        assert torch.equal(value, model.state_dict()[key])


@pytest.mark.parametrize("makes", [infinity.AdamW, "a factory"])
def test_options_that_are_tensors_are_exported_with_their_values(
    makes: Any, nvme: Path, tmp_path: Path
) -> None:
    rates = torch.tensor([0.25, 0.5], dtype=torch.float64)
    options: dict[str, Any] = {"lr": rates[1]}
    if makes == "a factory":
        options |= {"betas": (torch.tensor(0.75), torch.tensor(0.875)), "foreach": False}
        options["capturable"] = False
        makes = partial(partial, torch.optim.AdamW)
    made = makes(**options)
    model = seeded(Model)
    with infinity.offload(model, nvme, optimizer=made, host_memory="256MiB") as offloaded:
        train(model, offloaded.step, batches())
        offloaded.save(tmp_path / "ours")
    export_optimizer(tmp_path / "ours", tmp_path / "opt.pt")
    (group,) = torch.load(tmp_path / "opt.pt", weights_only=True)["param_groups"]
    for key, value in options.items():
        assert group[key] == value, key
    assert group["lr"].dtype == torch.float64


def test_export_of_a_model_with_frozen_weights_says_what_to_give_the_optimizer(
    nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = seeded(Model)
    model.requires_grad_(False)
    next(model.parameters()).requires_grad_(True)
    with infinity.offload(model, nvme, host_memory="256MiB") as offloaded:
        train(model, offloaded.step, batches())
        offloaded.save(tmp_path / "ours")
    run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
    said = "torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)"
    assert said in " ".join(capsys.readouterr().out.split())
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    optimizer.load_state_dict(torch.load(tmp_path / "opt.pt", weights_only=True))


def _saved(nvme: Path, tmp_path: Path) -> Path:
    """A checkpoint "ours", and an empty folder to export to."""
    model = seeded(Model)
    with infinity.offload(model, nvme, host_memory="256MiB") as offloaded:
        train(model, offloaded.step, batches())
        offloaded.save(tmp_path / "ours")
    folder = tmp_path / "out"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("most", [0, 4096])
def test_disk_that_is_full_is_told_with_the_file_and_leaves_nothing(
    nvme: Path, tmp_path: Path, most: int
) -> None:
    folder = _saved(nvme, tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))  # as a full disk: EFBIG
    try:
        with pytest.raises(OSError, match=r"opt\.pt") as raised:
            export_optimizer(tmp_path / "ours", folder / "opt.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert raised.value.errno == errno.EFBIG
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("ours/manifest.json", "would be among the files of the checkpoint"),
        ("ours/opt.pt", "would be among the files of the checkpoint"),
        ("link/opt.pt", "would be among the files of the checkpoint"),
        ("out/model.safetensors", "would be among the weights exported"),
        ("out/model.safetensors.index.json", "would be among the weights exported"),
        ("loop", "symbolic links"),
    ],
)
def test_state_is_written_into_no_file_of_the_checkpoint_or_of_weights(
    nvme: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str, words: str
) -> None:
    folder = _saved(nvme, tmp_path)
    (tmp_path / "link").symlink_to(tmp_path / "ours")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    before = {file: file.read_bytes() for file in (tmp_path / "ours").rglob("*") if file.is_file()}
    words_of = ["export", tmp_path / "ours", folder, "--optimizer", tmp_path / place]
    assert main([str(word) for word in words_of]) != 0
    assert words in capsys.readouterr().err.replace("\n", " ")
    assert not any(folder.iterdir())
    assert all(file.read_bytes() == data for file, data in before.items())


def test_exports_at_once_to_one_file_each_leave_all_of_it(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = _saved(nvme, tmp_path)
    whole = export_optimizer(tmp_path / "ours", tmp_path / "opt.pt").read_bytes()
    fill = exporting._fill

    def behind_another(*arguments: Any) -> None:
        monkeypatch.undo()
        export_optimizer(tmp_path / "ours", folder / "opt.pt")
        assert (folder / "opt.pt").read_bytes() == whole
        fill(*arguments)

    monkeypatch.setattr(exporting, "_fill", behind_another)
    export_optimizer(tmp_path / "ours", folder / "opt.pt")
    assert (folder / "opt.pt").read_bytes() == whole
    assert list(folder.iterdir()) == [folder / "opt.pt"]


def test_exported_state_has_the_permissions_and_the_place_of_what_it_replaces(
    nvme: Path, tmp_path: Path
) -> None:
    model = seeded(Model)
    with infinity.offload(model, nvme, host_memory="256MiB") as offloaded:
        train(model, offloaded.step, batches())
        offloaded.save(tmp_path / "ours")
    file, link, pipe = tmp_path / "opt.pt", tmp_path / "link.pt", tmp_path / "pipe.pt"
    file.touch(0o600)
    link.symlink_to(file)
    export_optimizer(tmp_path / "ours", link)
    assert link.is_symlink()
    assert file.stat().st_mode & 0o777 == 0o600
    assert torch.load(file, weights_only=True)["state"]
    os.mkfifo(pipe)
    with pytest.raises(FileNotFoundError, match=r"pipe\.pt: give a file"):
        export_optimizer(tmp_path / "ours", pipe)
    assert pipe.is_fifo()


def test_state_of_a_sequential_comes_back_by_its_numbers_which_have_gaps(
    nvme: Path, tmp_path: Path
) -> None:
    def layers() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))

    def losses(model: torch.nn.Module, step: Any) -> list[float]:
        found = []
        for number in range(3):
            loss = model(torch.full((4, 16), 1.0 + number)).square().mean()
            loss.backward()
            step()
            found.append(float(loss.detach()))
        return found

    model = seeded(layers)
    with infinity.offload(model, nvme, host_memory="256MiB") as offloaded:
        losses(model, offloaded.step)
        offloaded.save(tmp_path / "ours")
        expected = losses(model, offloaded.step)
    run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
    run("import", tmp_path / "opt.pt", tmp_path / "back", "--model", tmp_path / "weights")
    other = layers()
    with infinity.offload(other, nvme, host_memory="256MiB") as offloaded:
        offloaded.load(tmp_path / "back")
        assert losses(other, offloaded.step) == expected


def test_model_of_files_keeps_numbers_and_buffers_beside_them(tmp_path: Path) -> None:
    tensors = {"a.0.w": torch.ones(2), "a.10.w": torch.ones(2), "a.2.w": torch.ones(2)}
    save_file({**tensors, "a.seen": torch.zeros(1, dtype=torch.int64)}, tmp_path / "x.safetensors")
    model = source_of(str(tmp_path), None).model
    assert isinstance(model, torch.nn.Module)
    assert isinstance(model.a, torch.nn.ModuleList)
    assert [name for name, _ in model.named_parameters()] == ["a.0.w", "a.2.w", "a.10.w"]
    assert [name for name, _ in model.named_buffers()] == ["a.seen"]


class _Tiles(torch.nn.Module):
    """Has modules of its own where other models have tiles of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))


def test_state_of_modules_that_a_program_calls_tiles_is_exported(
    nvme: Path, tmp_path: Path
) -> None:
    model = seeded(_Tiles)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        sum(part(torch.ones(8)) for part in model.tiles).sum().backward()
        offloaded.step()
        offloaded.save(tmp_path / "ours")
    run("export", tmp_path / "ours", tmp_path / "weights", "--optimizer", tmp_path / "opt.pt")
    written = torch.load(tmp_path / "opt.pt", weights_only=True)
    names = [name for name, _ in model.named_parameters()]
    assert written["param_groups"][0]["param_names"] == names
    assert [*written["state"]] == [0, 1, 2, 3]
