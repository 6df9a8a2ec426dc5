"""An optimizer that the library has not heard of: a rule, its options, no change elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.rule import NativeOptimizer, OptimizerRule
from infinity.parameters.records import Record
from swap.masters import keep_master, master_of
from swap.plan.layout import Component, Segment
from swap.plan.rules import ParameterUpdate, master_components
from tests.support.models import Stack, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits, train, values_of

WIDTH = 144


class LionRule(OptimizerRule):
    """Lion (arXiv 2302.06675): the sign of an average, and one average kept."""

    kept_by = "infinity.Lion"

    def __init__(self, kept_in: torch.dtype, *, with_scales: bool) -> None:
        self._kept_in = kept_in
        self._with_scales = with_scales

    def components(self, dtype: torch.dtype) -> tuple[Component, ...]:
        kept = (*master_components(dtype), Component("exp_avg", self._kept_in, zero=True))
        scales = Component("scale", torch.float32, zero=True, per=256)
        return (*kept, scales) if self._with_scales else kept

    def check(self, update: ParameterUpdate) -> None:
        if not update.options["lr"] >= 0:
            raise ValueError(f"lr={update.options['lr']} is negative")

    def apply(
        self,
        segment: Segment,
        update: ParameterUpdate,
        components: Mapping[str, torch.Tensor],
        gradient: torch.Tensor,
        gradient_scale: float,
    ) -> None:
        master, kept = master_of(components), components["exp_avg"].float()
        lion(master, kept, gradient.float() * gradient_scale, update.options)
        components["exp_avg"].copy_(kept)
        keep_master(master, components)


def lion(
    weight: torch.Tensor, kept: torch.Tensor, gradient: torch.Tensor, options: Mapping[str, Any]
) -> None:
    beta1, beta2 = options["betas"]
    weight.mul_(1 - options["lr"] * options["weight_decay"])
    weight.sub_((kept * beta1 + gradient * (1 - beta1)).sign(), alpha=options["lr"])
    kept.mul_(beta2).add_(gradient * (1 - beta2))


@dataclass(frozen=True, kw_only=True)
class Lion(NativeOptimizer):
    lr: float = 1e-2
    kept_in: torch.dtype = torch.float32
    with_scales: bool = False

    def rule(self, trained: Sequence[Record]) -> OptimizerRule:
        return LionRule(self.kept_in, with_scales=self.with_scales)

    def defaults(self) -> dict[str, Any]:
        return {"lr": self.lr, "betas": (0.9, 0.99), "weight_decay": 0.1}


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def _loss(model: nn.Module, number: int) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    loss: torch.Tensor = model(x.to(dtype)).float().square().mean()
    return loss


def _train(offloaded: infinity.OffloadedModel, *batches: int) -> None:
    for number in batches:
        offloaded.backward(_loss(offloaded.model, number))
        offloaded.step()


def _in_plain_torch(steps: int) -> dict[str, torch.Tensor]:
    model = seeded(Stack)
    kept = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for number in range(steps):
        vector_loss(model, number).backward()
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            with torch.no_grad():
                lion(parameter, kept[name], parameter.grad, Lion().defaults())
            parameter.grad = None
    return values_of(model)


@pytest.mark.parametrize("whole", [True, False])
def test_updates_are_those_of_plain_torch_wherever_the_state_is(nvme: Path, whole: bool) -> None:
    budget = WHOLE if whole else least_budget(Stack, nvme, optimizer=Lion())
    run = train(Stack, vector_loss, nvme, host_memory=budget, steps=3, optimizer=Lion())
    expected = _in_plain_torch(3)
    assert all(same_bits(value, expected[name]) for name, value in run.values.items())
    assert (run.read_bytes == 0) is whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_goes_on_from_a_checkpoint_with_the_same_bits(
    nvme: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    whole, model = seeded(_model), seeded(_model, 2)
    with infinity.offload(whole, nvme, optimizer=Lion(), compute_dtype=dtype) as offloaded:
        _train(offloaded, 0, 1)
        offloaded.save(tmp_path / "saved")
        _train(offloaded, 2, 3)
    with infinity.offload(model, nvme, optimizer=Lion(lr=1), compute_dtype=dtype) as offloaded:
        _train(offloaded, 7)
        offloaded.load(tmp_path / "saved")
        assert offloaded.optimizer.param_groups[0]["lr"] == Lion().lr
        _train(offloaded, 2, 3)
    expected = values_of(whole)
    assert all(same_bits(value, expected[name]) for name, value in values_of(model).items())


def _torch_lion(parameters: Any) -> torch.optim.Optimizer:
    """Of the same name, by another hand: its state may mean anything."""
    kind = type("Lion", (torch.optim.SGD,), {"__module__": "elsewhere"})
    made: torch.optim.Optimizer = kind(parameters, lr=1e-2, momentum=0.9)
    return made


Optimizer = Callable[[Any], torch.optim.Optimizer] | NativeOptimizer
REFUSED: list[tuple[Optimizer, Optimizer, str]] = [
    (Lion(), infinity.AdamW(), r"state of infinity\.Lion, and the optimizer is infinity\.AdamW"),
    (infinity.AdamW(), Lion(), r"state of infinity\.AdamW, and the optimizer is infinity\.Lion"),
    (Lion(), torch.optim.AdamW, r"infinity\.Lion, and the optimizer is torch\.optim\.adamw"),
    (torch.optim.AdamW, Lion(), r"torch\.optim\.adamw\.AdamW, and the optimizer is infinity\.Lion"),
    (Lion(), _torch_lion, r"infinity\.Lion, and the optimizer is elsewhere\.Lion"),
    (_torch_lion, Lion(), r"elsewhere\.Lion, and the optimizer is infinity\.Lion"),
    (Lion(kept_in=torch.bfloat16), Lion(), r"exp_avg of 0\.weight in torch\.bfloat16"),
]


@pytest.mark.parametrize(("theirs", "ours", "message"), REFUSED)
def test_state_of_another_optimizer_is_refused_by_name(
    theirs: Optimizer, ours: Optimizer, message: str, nvme: Path, tmp_path: Path
) -> None:
    with infinity.offload(seeded(_model), nvme, optimizer=theirs) as offloaded:
        _train(offloaded, 0)
        offloaded.save(tmp_path / "saved")
        packed = offloaded.optimizer.state_dict()
    with infinity.offload(seeded(_model), nvme, optimizer=ours) as offloaded:
        with pytest.raises(ValueError, match=message):
            offloaded.load(tmp_path / "saved")
        with pytest.raises(ValueError, match="state_dict is of"):
            offloaded.optimizer.load_state_dict(packed)


def test_blocks_of_other_tiles_are_refused(nvme: Path, tmp_path: Path) -> None:
    optimizer = Lion(with_scales=True)

    def tiled() -> nn.Module:
        return nn.Sequential(nn.Linear(384, 384))

    with infinity.offload(
        seeded(tiled), nvme, optimizer=optimizer, max_parameter_bytes=280_000
    ) as offloaded:
        offloaded.save(tmp_path / "saved")
    with (
        infinity.offload(seeded(tiled), nvme, optimizer=optimizer) as offloaded,
        pytest.raises(ValueError, match="in other tiles"),
    ):
        offloaded.load(tmp_path / "saved")


def test_a_plan_counts_the_components_that_it_keeps() -> None:
    lion_bytes, adam_bytes = (
        infinity.plan(_model(), host_memory=WHOLE, optimizer=optimizer).bytes_by_tier["host"]
        for optimizer in (Lion(), infinity.AdamW())
    )
    numel = sum(parameter.numel() for parameter in _model().parameters())
    assert 4 * numel <= adam_bytes - lion_bytes < 8 * numel, "one float32 component less, in pages"


def test_options_out_of_range_are_refused_before_anything_changes(nvme: Path) -> None:
    model = seeded(_model)
    with infinity.offload(model, nvme, optimizer=Lion()) as offloaded:
        offloaded.optimizer.param_groups[0]["lr"] = -1.0
        offloaded.backward(_loss(model, 2))
        with pytest.raises(ValueError, match=r"lr=-1\.0"):
            offloaded.step()
    expected = values_of(seeded(_model))
    assert all(same_bits(value, expected[name]) for name, value in values_of(model).items())


def test_option_that_a_group_has_no_more_is_named(nvme: Path) -> None:
    model = seeded(_model)
    with infinity.offload(model, nvme) as offloaded:
        del offloaded.optimizer.param_groups[0]["eps"]
        offloaded.backward(_loss(model, 2))
        with pytest.raises(ValueError, match="no option 'eps'"):
            offloaded.step()
