"""State of one optimizer is loaded into the same one, or into one that means the same by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
import infinity
from tests.support.models import seeded
from tests.support.training import same_bits, same_values, values_of

WIDTH = 144
Factory = Callable[[Any], torch.optim.Optimizer]


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _train(offloaded: infinity.OffloadedModel, *batches: int) -> None:
    for number in batches:
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
        offloaded.backward(offloaded.model(x).float().square().mean())
        offloaded.step()


def _saved(path: Path, nvme: Path, optimizer: Any, *, steps: int = 2) -> Path:
    with infinity.offload(seeded(_model), nvme, optimizer=optimizer) as offloaded:
        _train(offloaded, *range(steps))
        offloaded.save(path)
    return path


NATIVE = infinity.AdamW(lr=1e-2)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def _amsgrad(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)


def _radam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.RAdam(parameters, lr=1e-2)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _adafactor(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters, lr=1e-2)


REFUSED: list[tuple[Any, Any, str]] = [
    (NATIVE, _sgd, r"infinity\.AdamW, and the optimizer is torch\.optim\.sgd\.SGD"),
    (_sgd, NATIVE, r"torch\.optim\.sgd\.SGD, and the optimizer is infinity\.AdamW"),
    (_adamw, _radam, r"torch\.optim\.adamw\.AdamW, and the optimizer is .*RAdam"),
    (_adamw, _adam, r"torch\.optim\.adamw\.AdamW, and the optimizer is .*Adam,"),
    (NATIVE, _adam, r"infinity\.AdamW, and the optimizer is .*Adam,"),
    (_amsgrad, _adamw, r"state max_exp_avg_sq of 0\.weight, which torch\.optim\.adamw\.AdamW"),
    (_amsgrad, NATIVE, r"state max_exp_avg_sq of 0\.weight, which infinity\.AdamW"),
    (NATIVE, _amsgrad, r"infinity\.AdamW, which torch\.optim\.adamw\.AdamW cannot .*amsgrad=True"),
]


@pytest.mark.parametrize(("theirs", "ours", "message"), REFUSED)
def test_load_of_another_optimizer_is_refused_by_name(
    theirs: Any, ours: Any, message: str, nvme: Path, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "saved", nvme, theirs)
    expected, model = seeded(_model, 2), seeded(_model, 2)
    for number, loaded in enumerate((expected, model)):
        with infinity.offload(loaded, nvme, optimizer=ours) as offloaded:
            _train(offloaded, 0)
            if number:
                with pytest.raises(ValueError, match=message):
                    offloaded.load(path)
            _train(offloaded, 1)
    assert all(map(same_bits, model.parameters(), expected.parameters()))


@pytest.mark.parametrize(
    ("theirs", "ours"), [(NATIVE, _adamw), (_adamw, NATIVE), (_adam, NATIVE), (_adamw, _amsgrad)]
)
def test_moments_of_one_kind_of_adam_are_those_of_another(
    theirs: Any, ours: Any, nvme: Path, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "saved", nvme, theirs, steps=3)
    going_on, model = seeded(_model, 2), seeded(_model, 3)
    for loaded, optimizer in ((going_on, theirs), (model, ours)):
        with infinity.offload(loaded, nvme, optimizer=optimizer) as offloaded:
            _train(offloaded, 7, 8)
            offloaded.load(path)
            offloaded.save(tmp_path / "again")
            _train(offloaded, 4, 5)
        again, saved = checkpoint.load(tmp_path / "again"), checkpoint.load(path)
        for name in ("exp_avg", "exp_avg_sq"):
            for key, value in saved["optimizer"][name].items():
                assert same_bits(again["optimizer"][name][key], value)
    expected = values_of(going_on)
    for name, value in values_of(model).items():
        assert torch.allclose(value, expected[name], rtol=0, atol=1e-7)


@pytest.mark.parametrize("optimizer", [NATIVE, _sgd])
def test_checkpoint_without_an_optimizer_leaves_options_and_begins_state_anew(
    optimizer: Any, nvme: Path, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "saved", nvme, None, steps=0)
    outcomes = []
    for batches in ((), (7, 8)):
        model = seeded(_model, 2)
        with infinity.offload(model, nvme, optimizer=optimizer) as offloaded:
            _train(offloaded, *batches)
            offloaded.load(path)
            assert offloaded.optimizer.param_groups[0]["lr"] == 1e-2
            _train(offloaded, 1, 2)
        outcomes.append(values_of(model))
    for name, value in outcomes[0].items():
        assert same_bits(value, outcomes[1][name])


def test_inference_takes_the_weights_of_any_optimizer(nvme: Path, tmp_path: Path) -> None:
    path = _saved(tmp_path / "saved", nvme, _in_groups(0))
    model = seeded(_model, 2)
    with infinity.offload(model, nvme, optimizer=None) as offloaded:
        offloaded.load(path)
    saved = checkpoint.load(path)["model"]
    assert all(same_bits(value, saved[name]) for name, value in values_of(model).items())


def test_small_state_of_before_does_not_outlast_a_load(nvme: Path, tmp_path: Path) -> None:
    """The step that is taken next has the number of the last one before the load."""
    path = _saved(tmp_path / "saved", nvme, _adafactor)
    outcomes = []
    for batches in ((), (7, 8, 9)):
        model = seeded(_model, 2)
        with infinity.offload(model, nvme, optimizer=_adafactor) as offloaded:
            _train(offloaded, *batches)
            offloaded.load(path)
            _train(offloaded, 3)
        outcomes.append(values_of(model))
    for name, value in outcomes[0].items():
        assert same_bits(value, outcomes[1][name])


def test_state_of_what_is_frozen_now_is_not_saved_again(nvme: Path, tmp_path: Path) -> None:
    path = _saved(tmp_path / "saved", nvme, NATIVE)
    model = seeded(_model, 2)
    model[0].requires_grad_(False)  # type: ignore[index]
    with infinity.offload(model, nvme, optimizer=NATIVE) as offloaded:
        offloaded.load(path)
        offloaded.save(path)
    steps = checkpoint.load(path, only=["infinity.*"])["infinity"]["steps"]
    assert steps == {"0.weight": 0, "0.bias": 0, "2.weight": 2, "2.bias": 2}


def test_loss_scale_begins_anew_where_none_was_saved(nvme: Path, tmp_path: Path) -> None:
    path = _saved(tmp_path / "saved", nvme, NATIVE)
    with infinity.offload(_model(), nvme, compute_dtype=torch.float16) as offloaded:
        first = offloaded.loss_scale
        x = torch.ones(1, WIDTH, dtype=torch.float16)
        offloaded.backward(offloaded.model(x).float().sum() * float("inf"))
        offloaded.step()
        assert offloaded.loss_scale < first
        offloaded.load(path)
        assert offloaded.loss_scale == first


def _in_groups(order: int, cut: int = 0) -> Factory:
    """Weights decay, biases do not, in this order; or the first ``cut`` parameters do."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        chosen = parameters[:cut] if cut else [p for p in parameters if p.dim() == 2]
        others = [p for p in parameters if not any(p is one for one in chosen)]
        groups = [{"params": chosen, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups[::-1] if order else groups, lr=1e-2)

    return make


def test_groups_in_another_order_get_the_options_of_their_members(
    nvme: Path, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "saved", nvme, _in_groups(0))
    with infinity.offload(_model(), nvme, optimizer=_in_groups(1)) as offloaded:
        offloaded.load(path)
        groups = offloaded.optimizer.param_groups
        assert [(g["weight_decay"], g["params"][0].dim()) for g in groups] == [(0.0, 1), (0.5, 2)]


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (_in_groups(0), _in_groups(0, 2), r"0\.weight and 0\.bias in two groups .* in one"),
        (_adamw, _in_groups(0), r"0\.weight and 0\.bias in one group .* in two"),
    ],
)
def test_groups_of_other_members_are_refused_by_name(
    theirs: Factory, ours: Factory, message: str, nvme: Path, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "saved", nvme, theirs)
    with (
        infinity.offload(_model(), nvme, optimizer=ours) as offloaded,
        pytest.raises(ValueError, match=message),
    ):
        offloaded.load(path)


def test_a_group_of_what_was_frozen_keeps_its_options(nvme: Path, tmp_path: Path) -> None:
    def two_rates(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": parameters[2:]}, {"params": parameters[:2], "lr": 3e-3}]
        return torch.optim.AdamW(groups, lr=2e-3)

    model = seeded(_model)
    model[0].requires_grad_(False)  # type: ignore[index]
    with infinity.offload(model, nvme, optimizer=_adamw) as offloaded:
        _train(offloaded, 0)
        offloaded.save(tmp_path / "saved")
    with infinity.offload(_model(), nvme, optimizer=two_rates) as offloaded:
        offloaded.load(tmp_path / "saved")
        assert [group["lr"] for group in offloaded.optimizer.param_groups] == [1e-2, 3e-3]


def test_groups_of_tiles_are_those_of_the_whole(nvme: Path, tmp_path: Path) -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(256, 1024))

    with infinity.offload(wide(), nvme, max_parameter_bytes=1 << 18) as offloaded:
        offloaded.optimizer.param_groups[0]["lr"] = 0.5
        offloaded.save(tmp_path / "saved")
    for bound in (None, 1 << 19):
        with infinity.offload(wide(), nvme, max_parameter_bytes=bound) as offloaded:
            offloaded.load(tmp_path / "saved")
            assert offloaded.optimizer.param_groups[0]["lr"] == 0.5


def test_state_of_tiles_that_nothing_keeps_here_is_refused_where_the_first_has_none(
    nvme: Path, tmp_path: Path
) -> None:
    def wide() -> nn.Module:
        return nn.Linear(WIDTH, 1024, bias=False)

    options: Any = {"max_parameter_bytes": "256KiB"}
    with infinity.offload(wide(), nvme, optimizer=_amsgrad, **options) as offloaded:
        offloaded.backward(offloaded.model(torch.ones(WIDTH)).sum())
        next(offloaded.model.parameters()).grad = None
        offloaded.step()
        offloaded.save(tmp_path / "saved")
    with (
        infinity.offload(wide(), nvme, optimizer=_adamw, **options) as offloaded,
        pytest.raises(ValueError, match=r"max_exp_avg_sq of weight"),
    ):
        offloaded.load(tmp_path / "saved")


@pytest.mark.parametrize(
    ("theirs", "ours", "message"),
    [
        (NATIVE, NATIVE, None),
        (_adamw, _adamw, None),
        (_adamw, NATIVE, None),
        (NATIVE, _adamw, None),
        (None, NATIVE, None),
        (NATIVE, _sgd, "state of infinity.AdamW"),
        (_sgd, NATIVE, "state of an optimizer made by a factory"),
        (_radam, NATIVE, "state of an optimizer made by a factory"),
        (_sgd, _adamw, "state momentum_buffer of 0.weight"),
    ],
)
def test_checkpoint_that_does_not_name_the_optimizer_is_known_by_its_state(
    theirs: Any, ours: Any, message: str | None, nvme: Path, tmp_path: Path
) -> None:
    path = _saved(tmp_path / "saved", nvme, theirs, steps=0 if theirs is None else 2)
    tree = checkpoint.load(path)
    del tree["infinity"]["optimizer_class"]
    checkpoint.save(tree, path)
    with infinity.offload(_model(), nvme, optimizer=ours) as offloaded:
        if message is None:
            offloaded.load(path)
            _train(offloaded, 3)
            offloaded.flush()
        else:
            with pytest.raises(ValueError, match=message):
                offloaded.load(path)


class _Tiles(nn.Module):
    """Has modules of its own where other models have tiles of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.tiles = nn.ModuleList([nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.tiles
        return second(torch.tanh(first(x)))


@pytest.mark.parametrize("bound", [None, "256KiB"], ids=["whole", "tiles"])
@pytest.mark.parametrize("kept", ["checkpoint", "snapshot"])
def test_groups_of_modules_that_a_program_calls_tiles_load(
    kept: str, bound: str | None, nvme: Path, tmp_path: Path
) -> None:
    def grouped(parameters: Any) -> torch.optim.Optimizer:
        first, second = ([*part.parameters()] for part in model.tiles)
        groups = [{"params": first, "lr": 0.5}, {"params": second, "lr": 0.25}]
        return torch.optim.AdamW(groups)

    options: Any = {"optimizer": grouped, "max_parameter_bytes": bound}
    model = seeded(_Tiles)
    with infinity.offload(model, nvme, **options) as offloaded:
        _train(offloaded, 0, 1)
        offloaded.snapshot("last")
        offloaded.save(tmp_path / "saved")
        _train(offloaded, 2)
    expected = values_of(model)
    model = seeded(_Tiles)
    with infinity.offload(model, nvme, **options) as offloaded:
        offloaded.load(tmp_path / "saved") if kept == "checkpoint" else offloaded.restore("last")
        assert [group["lr"] for group in offloaded.optimizer.param_groups] == [0.5, 0.25]
        _train(offloaded, 2)
        offloaded.drop_snapshot("last")
    assert same_values(values_of(model), expected)
