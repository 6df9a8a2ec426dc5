"""What an accelerate script does beside training, and what is refused before anything is loaded."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    FullyShardedDataParallelPlugin,
    ProjectConfiguration,
)
from torch import nn
from transformers import LlamaForCausalLM

from infinity.integrations import published
from infinity.integrations.accelerate import OffloadAccelerator
from tests.support import accelerated
from tests.support.accelerated import fused, groups_of, loader, loss_of, make, script
from tests.support.models import Gpt, seeded
from tests.support.trainers import tiny_llama
from tests.support.training import WHOLE, same_bits, values_of


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    with accelerated.fresh_accelerate():
        yield


def _accelerator(nvme: Path, **options: Any) -> Any:
    return OffloadAccelerator(cpu=True, nvme=nvme, **({"host_memory": WHOLE} | options))


def _step(accelerator: Any, model: nn.Module, optimizer: Any, tokens: torch.Tensor) -> None:
    accelerator.backward(loss_of(model, tokens))
    optimizer.step()
    optimizer.zero_grad()


def test_bf16_mixed_precision_is_that_in_memory(nvme: Path) -> None:
    sgd = accelerated.sgd
    with accelerated.fresh_accelerate():
        plain = script(Accelerator(cpu=True, mixed_precision="bf16"), optimizer=sgd)
    least = accelerated.least_of(nvme, sgd)
    made = _accelerator(nvme, host_memory=least, mixed_precision="bf16")
    ours = script(made, optimizer=sgd)
    assert ours.seen == plain.seen
    assert all(same_bits(value, ours.values[name]) for name, value in plain.values.items())


@pytest.mark.parametrize("together", [True, False], ids=["together", "one by one"])
@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_model_optimizer_and_scheduler_are_prepared_in_any_order(
    together: bool, order: str, nvme: Path
) -> None:
    model = seeded(make)
    optimizer = fused(groups_of(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    accelerator = _accelerator(nvme)
    if together:
        given: list[Any] = [model, optimizer, scheduler]
        if order == "optimizer first":
            given = [scheduler, optimizer, model]
        made = list(accelerator.prepare(*given))
        model, optimizer, scheduler = made if order == "model first" else made[::-1]
    elif order == "model first":
        model, optimizer = accelerator.prepare(model), accelerator.prepare(optimizer)
        scheduler = accelerator.prepare(scheduler)
    else:
        with pytest.raises(ValueError, match="of no model that was prepared"):
            accelerator.prepare(optimizer)
        return
    _step(accelerator, model, optimizer, torch.zeros(2, 16, dtype=torch.long))
    scheduler.step()
    assert [group["lr"] for group in accelerator.offloaded.optimizer.param_groups] == [5e-3] * 2
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    accelerator.free_memory()
    assert not hasattr(next(model.parameters()), "offload_index")


def test_a_model_prepared_alone_is_for_inference(nvme: Path) -> None:
    model, tokens = seeded(make), torch.zeros(2, 16, dtype=torch.long)
    model.eval()
    expected = model(tokens)
    with _accelerator(nvme) as accelerator:
        model = accelerator.prepare(model)
        with torch.no_grad():
            assert torch.equal(model(tokens), expected)


def test_weights_are_saved_and_handed_out_piece_by_piece(nvme: Path, tmp_path: Path) -> None:
    model: Any = tiny_llama()
    accelerator = _accelerator(nvme)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    tokens = torch.zeros(2, 16, dtype=torch.long)
    accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    optimizer.zero_grad()
    handed = accelerator.get_state_dict(model)
    state = {name: handed[name] for name in handed}
    assert len(handed) == len(state)
    unwrapped = accelerator.unwrap_model(model)
    unwrapped.save_pretrained(
        tmp_path / "pretrained", state_dict=handed, save_function=accelerator.save
    )
    accelerator.save_model(model, tmp_path / "model")
    accelerator.free_memory()
    for name, value in model.named_parameters():
        assert same_bits(value.detach(), state[name])
    for folder in ("pretrained", "model"):
        if folder == "model":
            model.config.save_pretrained(tmp_path / folder)
        loaded = LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert all(map(same_bits, loaded.parameters(), model.parameters()))
    assert "save_pretrained" not in vars(model)


def test_numbered_states_are_pruned_when_a_new_one_is_there(nvme: Path, tmp_path: Path) -> None:
    config = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True, total_limit=2)
    model = seeded(make)
    accelerator = _accelerator(nvme, project_config=config)
    model, optimizer = accelerator.prepare(model, fused(groups_of(model), lr=1e-2))
    for number in range(3):
        _step(accelerator, model, optimizer, torch.full((2, 16), number))
        accelerator.save_state()
    folder = tmp_path / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["checkpoint_1", "checkpoint_2"]
    accelerator.offloaded.flush()
    accelerator.load_state()
    accelerator.load_state(str(folder / "checkpoint_1"))
    state = accelerator.offloaded.optimizer.state_dict()
    assert max(state["infinity"]["steps"].values()) == 2


def test_a_state_saved_again_keeps_files_of_others_and_survives_an_error(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "state"
    model = seeded(make)
    accelerator = _accelerator(nvme)
    model, optimizer = accelerator.prepare(model, fused(groups_of(model), lr=1e-2))
    accelerator.save_state(str(folder))
    (folder / "notes").mkdir()
    (folder / "notes" / "a.txt").write_text("mine")
    _step(accelerator, model, optimizer, torch.zeros(2, 16, dtype=torch.long))

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(published, "sync_tree", fail)
        with pytest.raises(OSError, match="no space"):
            accelerator.save_state(str(folder))
    assert [path.name for path in tmp_path.glob(".*")] == []
    accelerator.load_state(str(folder))
    assert _steps_of(accelerator) == 0
    _step(accelerator, model, optimizer, torch.zeros(2, 16, dtype=torch.long))
    accelerator.save_state(str(folder))
    assert (folder / "notes" / "a.txt").read_text() == "mine"
    folder.rename(published.replaced_of(folder))  # as a kill in between leaves it
    accelerator.load_state(str(folder))
    assert _steps_of(accelerator) == 1


def test_state_is_saved_to_the_current_directory_and_through_a_link(
    nvme: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, disk, link = tmp_path / "here", tmp_path / "disk", tmp_path / "link"
    here.mkdir()
    disk.mkdir()
    link.symlink_to(disk)
    monkeypatch.chdir(here)
    model = seeded(make)
    accelerator = _accelerator(nvme)
    model, optimizer = accelerator.prepare(model, fused(groups_of(model), lr=1e-2))
    for place, folder in ((".", here), (str(link), disk)):
        accelerator.save_state(place)
        assert (folder / "infinity" / "manifest.json").is_file()
        steps = _steps_of(accelerator)
        _step(accelerator, model, optimizer, torch.zeros(2, 16, dtype=torch.long))
        accelerator.load_state(place)
        assert _steps_of(accelerator) == steps
    assert link.is_symlink()
    assert [path.name for path in tmp_path.rglob(".*")] == []


def _steps_of(accelerator: Any) -> int:
    state = accelerator.offloaded.optimizer.state_dict()
    return max(state["infinity"]["steps"].values())


def test_a_state_of_a_plain_accelerator_is_refused(nvme: Path, tmp_path: Path) -> None:
    with accelerated.fresh_accelerate():
        plain = Accelerator(cpu=True)
        plain.prepare(seeded(make))
        plain.save_state(str(tmp_path / "plain"))
    accelerator = _accelerator(nvme)
    accelerator.prepare(seeded(make))
    with pytest.raises(ValueError, match=r"keeps its model in memory.*weights="):
        accelerator.load_state(str(tmp_path / "plain"))


def _prepared(made: Callable[[Gpt], Any], **options: Any) -> Callable[[Path], None]:
    def prepare(nvme: Path) -> None:
        model = seeded(make)
        _accelerator(nvme, **options).prepare(model, *made(model))

    return prepare


def _stepped(model: Gpt, make: Callable[..., torch.optim.Optimizer] = fused) -> list[Any]:
    optimizer = make(model.parameters(), lr=1e-2)
    loss_of(model, torch.zeros(2, 16, dtype=torch.long)).backward()
    optimizer.step()
    return [optimizer]


def _of_another(model: Gpt) -> list[Any]:
    return [fused([*model.parameters(), nn.Parameter(torch.ones(3))], lr=1e-2)]


REFUSED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "fp16": (lambda nvme: _accelerator(nvme, mixed_precision="fp16"), "'fp16'.*'bf16'"),
    "fsdp": (
        lambda nvme: _accelerator(nvme, fsdp_plugin=FullyShardedDataParallelPlugin()),
        "fsdp_plugin cannot be honoured.*leave it out",
    ),
    "dynamo": (lambda nvme: _accelerator(nvme, dynamo_backend="inductor"), "dynamo_backend"),
    "two models": (_prepared(lambda _: [seeded(make)]), "for one model.*ModuleDict"),
    "two optimizers": (
        _prepared(lambda m: [fused(m.parameters(), 1e-2), fused(m.parameters(), 1e-2)]),
        "2 optimizers of one model",
    ),
    "a part": (
        _prepared(lambda m: [fused(m.head.parameters(), 1e-2)]),
        r"blocks.0.* is in no group.*requires_grad_\(False\)",
    ),
    "after steps": (_prepared(_stepped), "state from steps in memory"),
    "state after steps": (
        _prepared(partial(_stepped, make=torch.optim.Adagrad)),
        "the Adagrad has state from steps in memory",
    ),
    "of another": (_prepared(_of_another), "not of the model.*ModuleDict"),
    "LBFGS": (_prepared(lambda m: [torch.optim.LBFGS(m.parameters())]), "LBFGS"),
    "state_dtype": (
        _prepared(lambda m: [torch.optim.SGD(m.parameters())], state_dtype=torch.bfloat16),
        "option of AdamW; SGD",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, nvme: Path) -> None:
    act, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        act(nvme)


def test_the_environment_is_looked_at_too(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
    with pytest.raises(ValueError, match="dynamo backend"):
        _accelerator(nvme)


def test_end_training_gives_the_model_its_trained_values(nvme: Path) -> None:
    model = seeded(make)
    accelerator = _accelerator(nvme)
    model, optimizer, batches = accelerator.prepare(
        model, fused(groups_of(model), lr=1e-2), loader(0, 4)
    )
    before = values_of(seeded(make))
    for (tokens,) in batches:
        _step(accelerator, model, optimizer, tokens)
    assert accelerator.optimizer_step_was_skipped is False
    accelerator.end_training()
    assert any(not torch.equal(value, before[name]) for name, value in values_of(model).items())


class _BrokenInto(OffloadAccelerator):
    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        signal.raise_signal(signal.SIGUSR1)
        return super().get_state_dict(model, unwrap=unwrap)


def test_close_by_a_handler_in_a_save_is_refused_and_the_state_is_saved(
    nvme: Path, tmp_path: Path
) -> None:
    refused: list[str] = []
    with _BrokenInto(cpu=True, nvme=nvme, host_memory=WHOLE) as accelerator:
        model = seeded(make)
        model, optimizer = accelerator.prepare(model, fused(model.parameters(), lr=1e-2))
        _step(accelerator, model, optimizer, torch.zeros(2, 16, dtype=torch.long))

        def close(*_: object) -> None:
            try:
                accelerator.close()
            except RuntimeError as error:
                refused.append(str(error))

        previous = signal.signal(signal.SIGUSR1, close)
        try:
            accelerator.save_state(tmp_path / "saved")
        finally:
            signal.signal(signal.SIGUSR1, previous)
        assert len(refused) == 1
        assert refused[0].startswith("close() while save_state() is under way")
        before = values_of(model)
        _step(accelerator, model, optimizer, torch.zeros(2, 16, dtype=torch.long))
        accelerator.load_state(str(tmp_path / "saved"))
        after = values_of(model)
        assert all(same_bits(value, after[name]) for name, value in before.items())
