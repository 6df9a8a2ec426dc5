"""``state_dict`` of the optimizer of an offloaded model: small, and which state it is of."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import move_to_device  # type: ignore[import-untyped]
from torch import nn

import checkpoint
import infinity
from infinity.block import OffloadBlock
from tests.support.models import LowStack as Stack
from tests.support.models import low_vector_loss as vector_loss
from tests.support.models import seeded
from tests.support.optimizer_state import ways_to_change_state
from tests.support.training import least_budget

MIB = 1 << 20
Trip = Callable[[dict[str, Any], Path], dict[str, Any]]


def _through_torch(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    torch.save(state, folder / "optimizer.pt")
    loaded: dict[str, Any] = torch.load(folder / "optimizer.pt", weights_only=True)
    return loaded


def _through_checkpoint(state: dict[str, Any], folder: Path) -> dict[str, Any]:
    checkpoint.save(state, folder / "optimizer")
    loaded: dict[str, Any] = checkpoint.load(folder / "optimizer")
    return loaded


TRIPS: dict[str, Trip] = {
    "as it is": lambda state, _: state,
    "to a device": lambda state, _: move_to_device(state, torch.device("cpu")),
    "torch.save": _through_torch,
    "checkpoint.save": _through_checkpoint,
}


def _train(offloaded: infinity.OffloadedModel, *batches: int) -> None:
    for batch in batches:
        offloaded.backward(vector_loss(offloaded.model, batch))
        offloaded.step()


def _offload(model: nn.Module, nvme: Path, **options: Any) -> OffloadBlock:
    return infinity.offload(model, nvme, host_memory=least_budget(Stack, nvme), **options)


@pytest.mark.parametrize("trip", TRIPS)
def test_a_state_dict_of_the_run_itself_brings_back_its_options(
    trip: str, nvme: Path, tmp_path: Path
) -> None:
    with _offload(seeded(Stack), nvme) as offloaded:
        _train(offloaded, 0, 1)
        state = TRIPS[trip](offloaded.optimizer.state_dict(), tmp_path)
        offloaded.optimizer.param_groups[0]["lr"] = 7.0
        offloaded.optimizer.load_state_dict(state)
        assert offloaded.optimizer.param_groups[0]["lr"] == 1e-3
        assert offloaded.optimizer.state_dict() == state
        assert state["state"] == {}
        assert max(state["infinity"]["steps"].values()) == 2
        _train(offloaded, 2)


@pytest.mark.parametrize("trip", TRIPS)
def test_a_state_dict_loads_after_the_checkpoint_of_its_state(
    trip: str, nvme: Path, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    with _offload(seeded(Stack), nvme) as offloaded:
        _train(offloaded, 0, 1)
        offloaded.optimizer.param_groups[0]["lr"] = 0.5
        offloaded.save(saved)
        state = TRIPS[trip](offloaded.optimizer.state_dict(), tmp_path)
    with _offload(seeded(Stack), nvme) as offloaded:
        with pytest.raises(ValueError, match=rf"2 steps, .* {saved}.* after 0 steps.*offloaded\.l"):
            offloaded.optimizer.load_state_dict(state)
        assert offloaded.optimizer.param_groups[0]["lr"] == 1e-3
        offloaded.load(saved)
        offloaded.optimizer.load_state_dict(state)
        assert offloaded.optimizer.param_groups[0]["lr"] == 0.5
        _train(offloaded, 2)
        with pytest.raises(ValueError, match=r"after 2 steps.* after 3 steps"):
            offloaded.optimizer.load_state_dict(state)


@pytest.mark.parametrize("cuts", [(MIB // 4, None), (None, MIB // 4), (MIB // 4, MIB // 2)])
def test_a_state_dict_loads_where_weights_are_cut_in_another_way(
    cuts: tuple[int | None, int | None], nvme: Path, tmp_path: Path
) -> None:
    saved, (before, after) = tmp_path / "saved", cuts
    options: Any = {"host_memory": "256MiB"}
    model = _wide()
    with infinity.offload(model, nvme, max_parameter_bytes=before, **options) as offloaded:
        names = len([*model.named_parameters()])
        biases = [p for p in model.parameters() if p.dim() == 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        _regroup(offloaded, weights, biases)
        _step(offloaded)
        offloaded.save(saved)
        state = _through_torch(offloaded.optimizer.state_dict(), tmp_path)
    model = _wide()
    with infinity.offload(model, nvme, max_parameter_bytes=after, **options) as offloaded:
        assert len([*model.named_parameters()]) != names
        biases = [p for p in model.parameters() if p.dim() == 1]
        weights = [p for p in model.parameters() if p.dim() > 1]
        _regroup(offloaded, weights, biases)
        with pytest.raises(ValueError, match=r"after 1 steps.* after 0 steps"):
            offloaded.optimizer.load_state_dict(state)
        offloaded.load(saved)
        for group in offloaded.optimizer.param_groups:
            group["lr"] = 7.0
        offloaded.optimizer.load_state_dict(state)
        groups = offloaded.optimizer.param_groups
        assert [group["lr"] for group in groups] == [0.5, 0.25]
        assert [len(group["params"]) for group in groups] == [len(weights), len(biases)]
        _step(offloaded)
    with (
        infinity.offload(nn.Linear(512, 256), nvme, **options) as offloaded,
        pytest.raises(ValueError, match="another model"),
    ):
        offloaded.optimizer.load_state_dict(state)


def _wide() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 512))


def _regroup(offloaded: infinity.OffloadedModel, *groups: list[nn.Parameter]) -> None:
    optimizer = offloaded.optimizer
    optimizer.param_groups.clear()
    for members, rate in zip(groups, (0.5, 0.25), strict=True):
        optimizer.add_param_group({**optimizer.defaults, "params": members, "lr": rate})


def _step(offloaded: infinity.OffloadedModel) -> None:
    offloaded.backward(offloaded.model(torch.ones(2, 512)).square().mean())
    offloaded.step()


def test_as_many_steps_of_another_history_are_another_state(nvme: Path, tmp_path: Path) -> None:
    with _offload(seeded(Stack), nvme) as offloaded:
        _train(offloaded, 0)
        offloaded.save(tmp_path / "saved")
        _train(offloaded, 1)
        state = offloaded.optimizer.state_dict()
        offloaded.load(tmp_path / "saved")
        _train(offloaded, 2)
        with pytest.raises(ValueError, match="the model has another"):
            offloaded.optimizer.load_state_dict(state)
    with _offload(seeded(Stack), nvme) as offloaded:
        _train(offloaded, 0, 1)
        with pytest.raises(ValueError, match="the model has another"):
            offloaded.optimizer.load_state_dict(state)


def test_the_state_before_the_first_step_is_that_of_every_run(nvme: Path) -> None:
    with _offload(seeded(Stack), nvme) as offloaded:
        state = offloaded.optimizer.state_dict()
    with _offload(seeded(Stack), nvme) as offloaded:
        offloaded.optimizer.load_state_dict(state)


def _of_torch(stepped: bool) -> dict[str, Any]:
    model = seeded(Stack)
    optimizer = torch.optim.AdamW(model.parameters())
    if stepped:
        vector_loss(model, 0).backward()
        optimizer.step()
    return optimizer.state_dict()


def _of_another(nvme: Path, make: Callable[[], nn.Module], **options: Any) -> dict[str, Any]:
    with infinity.offload(make(), nvme, **options) as offloaded:
        return offloaded.optimizer.state_dict()


FOREIGN: dict[str, tuple[Callable[[Path], dict[str, Any]], str]] = {
    "torch": (lambda _: _of_torch(True), "keeps step, exp_avg, exp_avg_sq in memory.*weights="),
    "torch, new": (lambda _: _of_torch(False), r"keeps its state in memory.*offloaded\.load"),
    "another model": (
        lambda nvme: _of_another(nvme, lambda: nn.Linear(4, 4)),
        "another model: it .* offloaded.load",
    ),
    "another optimizer": (
        lambda nvme: _of_another(nvme, Stack, optimizer=torch.optim.SGD),
        r"of torch\.optim\.sgd\.SGD, and the optimizer is infinity\.AdamW",
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_state_dict_is_refused_with_what_to_do(name: str, nvme: Path) -> None:
    make, match = FOREIGN[name]
    state = make(nvme)
    with _offload(seeded(Stack), nvme) as offloaded:
        before = offloaded.optimizer.state_dict()
        with pytest.raises(ValueError, match=match):
            offloaded.optimizer.load_state_dict(state)
        assert offloaded.optimizer.state_dict() == before


def test_a_loss_scale_comes_back_with_the_state_dict(nvme: Path) -> None:
    with infinity.offload(seeded(Stack), nvme, compute_dtype=torch.float16) as offloaded:
        state = offloaded.optimizer.state_dict()
        offloaded.backward(vector_loss(offloaded.model, 0) * float("inf"))
        offloaded.step()
        assert offloaded.loss_scale == 2.0**15
        offloaded.optimizer.load_state_dict(state)
        assert offloaded.loss_scale == 2.0**16


def test_a_scheduler_goes_on_beside_a_state_dict(nvme: Path, tmp_path: Path) -> None:
    with _offload(seeded(Stack), nvme) as offloaded:
        scheduler = torch.optim.lr_scheduler.StepLR(offloaded.optimizer, 1, 0.5)
        _train(offloaded, 0)
        scheduler.step()
        states = _through_torch(
            {"s": scheduler.state_dict(), "o": offloaded.optimizer.state_dict()}, tmp_path
        )
        offloaded.save(tmp_path / "saved")
    with _offload(seeded(Stack), nvme) as offloaded:
        scheduler = torch.optim.lr_scheduler.StepLR(offloaded.optimizer, 1, 0.5)
        offloaded.load(tmp_path / "saved")
        offloaded.optimizer.load_state_dict(states["o"])
        scheduler.load_state_dict(states["s"])
        _train(offloaded, 1)
        scheduler.step()
        assert offloaded.optimizer.param_groups[0]["lr"] == 0.25e-3


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_of_optimizer_and_handle_are_refused_by_name(
    copied: Callable[[Any], Any], nvme: Path
) -> None:
    with infinity.offload(seeded(Stack), nvme) as offloaded:
        with pytest.raises(RuntimeError, match=r"offloaded model cannot be copied.*offloaded\.sav"):
            copied(offloaded.optimizer)
        with pytest.raises(RuntimeError, match=r"offloaded model cannot be copied.*offloaded\.sav"):
            copied(offloaded)


def test_state_is_neither_looked_for_nor_changed_through_the_optimizer(nvme: Path) -> None:
    with _offload(seeded(Stack), nvme) as offloaded:
        _train(offloaded, 0)
        optimizer = offloaded.optimizer
        first = optimizer.param_groups[0]["params"][0]
        for change in ways_to_change_state(optimizer):
            with pytest.raises(TypeError, match=r"another offload block .* begins without state"):
                change()
        looks: list[Callable[[], object]] = [
            lambda: optimizer.state.get(first),
            lambda: first in optimizer.state,
        ]
        for look in looks:
            with pytest.raises(RuntimeError, match="is not in memory"):
                look()
        assert [*optimizer.state.items()] == []
        _train(offloaded, 1)


def test_a_hook_that_raises_behind_a_load_leaves_no_state_that_could_be_changed(
    nvme: Path,
) -> None:
    def fail(_: object) -> None:
        raise ArithmeticError

    with _offload(seeded(Stack), nvme) as offloaded:
        _train(offloaded, 0)
        optimizer = offloaded.optimizer
        state = optimizer.state_dict()
        optimizer.register_load_state_dict_post_hook(fail)
        with pytest.raises(ArithmeticError):
            optimizer.load_state_dict(state)
        with pytest.raises(TypeError, match="begins without state"):
            optimizer.state.clear()
        _train(offloaded, 1)
