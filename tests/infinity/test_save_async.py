"""Saves that training does not wait for."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import checkpoint
import infinity
from checkpoint.directory import locate
from checkpoint.saving.data_files import RankFiles
from tests.support.early_reads import before_reads
from tests.support.models import Gpt, seeded, token_loss
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of


@pytest.mark.parametrize("tight", [False, True], ids=["whole", "least"])
def test_background_save_holds_the_state_of_the_moment_it_was_called(
    tmp_path: Path, tight: bool
) -> None:
    host_memory = least_budget(Gpt, tmp_path) if tight else WHOLE
    model = seeded(Gpt)
    with infinity.offload(model, tmp_path, host_memory=host_memory) as offloaded:
        for step in range(3):
            token_loss(model, step).backward()
            offloaded.step()
        offloaded.save(tmp_path / "waited for")
        pending = offloaded.save(tmp_path / "behind", block=False, extra={"step": 3})
        for step in range(3, 6):
            token_loss(model, step).backward()
            offloaded.step()
        assert pending.result().num_tensors > 0
    saved = checkpoint.load(tmp_path / "waited for")
    behind = checkpoint.load(tmp_path / "behind")
    assert behind["extra"]["value"] == {"step": 3}
    assert same_values(behind["model"], saved["model"])
    assert behind["optimizer"].keys() == saved["optimizer"].keys() != set()
    for component, values in behind["optimizer"].items():
        assert same_values(values, saved["optimizer"][component]), component
    assert saved["infinity"]["steps"] == behind["infinity"]["steps"]


def test_leaving_the_block_waits_for_a_background_save(tmp_path: Path) -> None:
    model = seeded(Gpt)
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        token_loss(model, 0).backward()
        offloaded.step()
        pending = offloaded.save(tmp_path / "last", block=False)
    assert pending.done()
    saved = checkpoint.load(tmp_path / "last")["model"]
    assert all(same_bits(saved[name], value) for name, value in values_of(model).items())


@pytest.mark.parametrize("tight", [False, True], ids=["whole", "least"])
def test_values_modified_behind_a_background_save_are_not_in_it(
    tmp_path: Path, tight: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The save reads nothing before somebody waits for it, or all is modified."""
    host_memory = least_budget(Gpt, tmp_path) if tight else WHOLE
    waited, wait = threading.Event(), checkpoint.PendingSave.wait_staged

    def late() -> None:
        waited.wait()

    def noted(self: checkpoint.PendingSave, timeout: float | None = None) -> bool:
        waited.set()
        return wait(self, timeout)

    model = seeded(Gpt)
    before = {name: value.clone() for name, value in values_of(model).items()}
    monkeypatch.setattr(checkpoint.PendingSave, "wait_staged", noted)
    with infinity.offload(model, tmp_path, host_memory=host_memory) as offloaded:
        before_reads(monkeypatch, late)
        pending = offloaded.save(tmp_path / "behind", block=False)
        with offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        waited.set()
        pending.result()
    saved = checkpoint.load(tmp_path / "behind", only=["model.*"])["model"]
    assert all(same_bits(saved[name], value) for name, value in before.items())
    after = values_of(model)
    assert all(
        same_bits(after[name], before[name] + 1.0) for name in dict(model.named_parameters())
    )


@pytest.mark.parametrize("within", ["hook", "closure"])
@pytest.mark.parametrize("call", ["save", "snapshot"])
def test_a_step_waits_for_what_its_own_hook_or_closure_saves_behind_training(
    call: str, within: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hook of the save itself comes too late for that step."""
    waited, wait = threading.Event(), checkpoint.PendingSave.wait_staged

    def noted(self: checkpoint.PendingSave, timeout: float | None = None) -> bool:
        waited.set()
        return wait(self, timeout)

    model = seeded(Gpt)
    monkeypatch.setattr(checkpoint.PendingSave, "wait_staged", noted)
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        before_reads(monkeypatch, lambda: waited.wait(1))
        saves: list[Any] = []

        def save() -> float:
            path = tmp_path / "behind" if call == "save" else "behind"
            saves.append(getattr(offloaded, call)(path, block=False))
            return 0.0

        def hook(*_: Any) -> None:
            save()

        token_loss(model, 0).backward()
        if within == "hook":
            handle = offloaded.optimizer.register_step_pre_hook(hook)
            offloaded.optimizer.step()
            handle.remove()
        else:
            offloaded.optimizer.step(save)
        saves[0].result()


def test_background_save_that_fails_is_told_and_training_goes_on(tmp_path: Path) -> None:
    model = seeded(Gpt)
    with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
        token_loss(model, 0).backward()
        offloaded.step()
        (tmp_path / "file").write_text("in the way")
        with pytest.raises(OSError, match="file"):
            offloaded.save(tmp_path / "file" / "below", block=False).result()
        token_loss(model, 1).backward()
        offloaded.step()
        offloaded.flush()


def test_weights_of_a_checkpoint_that_is_saved_over_are_those_of_one_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, read = tmp_path / "checkpoint", locate.read_manifest
    values = iter([1.0, 2.0])

    def save() -> None:
        for value in values:
            checkpoint.save({"weight": torch.full((2, 2), value)}, path)
            break

    def overtaken(*args: Any) -> Any:
        manifest = read(*args)
        save()
        return manifest

    save()
    monkeypatch.setattr(locate, "read_manifest", overtaken)
    model = torch.nn.Linear(2, 2, bias=False)
    with infinity.offload(model, tmp_path, host_memory=WHOLE, optimizer=None, weights=path):
        pass
    assert torch.equal(model.weight, torch.full((2, 2), 2.0))


@pytest.mark.parametrize("how", ["silent", "asked", "other error"])
def test_background_save_that_failed_is_told_at_the_end_of_the_block_once(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise OSError(5, "the disk is gone")

    model = seeded(Gpt)

    def block() -> None:
        with infinity.offload(model, tmp_path, host_memory=WHOLE) as offloaded:
            monkeypatch.setattr(RankFiles, "write", fails)
            pending = offloaded.save(tmp_path / "s", block=False)
            if how == "asked":
                with pytest.raises(OSError, match="the disk is gone"):
                    pending.result()
            elif how == "other error":
                raise KeyError("of the program")

    if how == "asked":
        block()
    else:
        expected: type[Exception] = KeyError if how == "other error" else OSError
        with pytest.raises(expected, match=r"of the program|the disk is gone"):
            block()
    assert not any(parameter.is_meta for parameter in model.parameters())
