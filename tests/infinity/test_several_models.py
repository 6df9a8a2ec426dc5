"""Several models under one budget, and a running mean of weights: as in plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import checkpoint
import infinity
from tests.support.models import seeded
from tests.support.training import WHOLE, least_budget, values_of

WIDTH = 512
STEPS = 5
DECAY = 0.9


def mlp(depth: int = 3) -> nn.Sequential:
    layers = chain.from_iterable((nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(depth))
    return nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))


def adversaries() -> nn.ModuleDict:
    return nn.ModuleDict({"generator": mlp(), "critic": mlp(2)})


def pupils() -> nn.ModuleDict:
    return nn.ModuleDict({"student": mlp(), "teacher": mlp(2).requires_grad_(False)})


def batches(count: int = 1) -> Iterator[list[torch.Tensor]]:
    rng = torch.Generator().manual_seed(7)
    for _ in range(STEPS):
        yield [torch.randn(4, WIDTH, generator=rng) for _ in range(count)]


def budget_of(name: str, make: Any, nvme: Path, **options: Any) -> int:
    return WHOLE if name == "whole" else least_budget(make, nvme, **options)


def critic_loss(models: nn.Module, real: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    critic = models.get_submodule("critic")
    return F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()


def generator_loss(models: nn.Module, made: torch.Tensor) -> torch.Tensor:
    return F.softplus(-models.get_submodule("critic")(made)).mean()


def plain_adversaries() -> tuple[list[float], dict[str, torch.Tensor]]:
    models = seeded(adversaries)
    of_generator, of_critic = (
        torch.optim.AdamW(models.get_submodule(name).parameters(), lr=lr, fused=True)
        for name, lr in (("generator", 1e-3), ("critic", 2e-3))
    )
    losses = []
    for real, noise in batches(2):
        made = models.get_submodule("generator")(noise)
        for optimizer in (of_critic, of_generator):
            is_critic = optimizer is of_critic
            loss = critic_loss(models, real, made) if is_critic else generator_loss(models, made)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, values_of(models)


@pytest.mark.parametrize("name", ["whole", "least"])
def test_generator_and_critic_under_one_budget_train_as_with_an_optimizer_each(
    name: str, nvme: Path
) -> None:
    models = seeded(adversaries)
    budget = budget_of(name, adversaries, nvme)
    losses = []
    with infinity.offload(models, nvme, host_memory=budget) as offloaded:
        [group] = offloaded.optimizer.param_groups
        for real, noise in batches(2):
            made = models.get_submodule("generator")(noise)
            loss = critic_loss(models, real, made)
            loss.backward()
            group["lr"] = 2e-3
            offloaded.step()
            losses.append(loss.item())
            loss = generator_loss(models, made)
            loss.backward()
            models.get_submodule("critic").zero_grad()
            group["lr"] = 1e-3
            offloaded.step()
            losses.append(loss.item())
        has_read = offloaded.report().read_bytes > 0
    assert has_read == (name == "least")
    expected_losses, expected = plain_adversaries()
    assert losses == expected_losses
    assert all(torch.equal(value, expected[key]) for key, value in values_of(models).items())


def distilled(models: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = models.get_submodule("teacher")(x)
    return F.mse_loss(models.get_submodule("student")(x), target)


@pytest.mark.parametrize("name", ["whole", "least"])
def test_student_beside_a_frozen_teacher_trains_as_in_memory(name: str, nvme: Path) -> None:
    models, plain = seeded(pupils), seeded(pupils)
    teacher = values_of(models.get_submodule("teacher"))
    optimizer = torch.optim.AdamW(plain.get_submodule("student").parameters(), lr=1e-3, fused=True)
    with infinity.offload(models, nvme, host_memory=budget_of(name, pupils, nvme)) as offloaded:
        for (x,) in batches():
            loss, expected = distilled(models, x), distilled(plain, x)
            assert loss.item() == expected.item()
            loss.backward()
            offloaded.step()
            expected.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert (offloaded.report().read_bytes > 0) == (name == "least")
    after = values_of(plain)
    assert all(torch.equal(value, after[key]) for key, value in values_of(models).items())
    assert all(
        torch.equal(value, teacher[key])
        for key, value in values_of(models.get_submodule("teacher")).items()
    )


class AveragingAdamW(torch.optim.AdamW):
    """AdamW that keeps a running mean of the weights, as its state."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                    mean.lerp_(p, 1 if self.state[p]["step"] == 1 else 1 - DECAY)
        return loss


def averaging(params: Any) -> torch.optim.Optimizer:
    return AveragingAdamW(params, lr=1e-3, fused=True)


@pytest.mark.parametrize("name", ["whole", "least"])
def test_running_mean_kept_by_the_optimizer_is_exported_as_weights(
    name: str, nvme: Path, tmp_path: Path
) -> None:
    model, plain = seeded(mlp), seeded(mlp)
    mean = torch.optim.swa_utils.AveragedModel(
        plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(DECAY)
    )
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    budget = budget_of(name, mlp, nvme, optimizer=averaging)
    with infinity.offload(model, nvme, optimizer=averaging, host_memory=budget) as offloaded:
        for (x,) in batches():
            for trained in (model, plain):
                F.mse_loss(trained(x), x).backward()
            offloaded.step()
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(plain)
        offloaded.save(tmp_path / "run")
    assert all(
        torch.equal(p, expected)
        for p, expected in zip(model.parameters(), plain.parameters(), strict=True)
    )
    files = checkpoint.export_safetensors(
        tmp_path / "run", tmp_path / "mean", prefix="optimizer.mean."
    )
    averaged = copy.deepcopy(plain)
    with infinity.offload(
        averaged, nvme, optimizer=None, weights=files[0].parent, host_memory="1GiB"
    ):
        pass
    expected_values = values_of(mean.get_submodule("module"))
    for key, value in values_of(averaged).items():
        assert torch.equal(value, expected_values[key])


class _Beside(torch.autograd.Function):
    """The outputs of two heads, one beside the other, of which both weights are saved."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, hints: torch.Tensor, other: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, hints, other)
        return x @ weight.T - hints @ other.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        x, weight, hints, other = ctx.saved_tensors
        scale = 1 + (hints @ other.T).square().mean()
        return gradient @ weight * scale, gradient.T @ x, None, None


@pytest.mark.parametrize("activations", ["keep", "host"])
def test_function_that_saves_weights_of_two_blocks_trains_as_in_memory(
    activations: Any, nvme: Path
) -> None:
    """As a fused loss of distillation does, whose teacher is in a block of its own."""
    found = []
    for is_offloaded in (False, True):
        student, teacher = seeded(mlp), seeded(lambda: mlp(2)).requires_grad_(False)
        with ExitStack() as stack:
            plain = torch.optim.AdamW(student.parameters(), fused=True)
            step: Any = plain.step
            if is_offloaded:
                options: Any = {"host_memory": "32MiB", "activations": activations}
                step = stack.enter_context(infinity.offload(student, nvme, **options)).step
                stack.enter_context(
                    infinity.offload(teacher, nvme, optimizer=None, host_memory="32MiB")
                )
            for (inputs,) in batches():
                with torch.no_grad():
                    hints = teacher[:-1](inputs)
                _Beside.apply(
                    student[:-1](inputs), student[-1].weight, hints, teacher[-1].weight
                ).square().mean().backward()
                step()
                student.zero_grad()
        found.append(values_of(student))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class _Scaled(nn.Module):
    """Buffers, and a place for a parameter that has none."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.1, 1.0, 16) * 1.0001)
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale.to(x.dtype)


@pytest.mark.parametrize("first", [None, torch.bfloat16])
@pytest.mark.parametrize("second", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_nested", [True, False])
def test_buffers_that_models_of_two_blocks_share_come_back_in_whatever_order_these_end(
    first: torch.dtype | None, second: torch.dtype | None, is_nested: bool, nvme: Path
) -> None:
    shared = _Scaled()
    models = [nn.Sequential(nn.Linear(16, 16), shared, nn.Linear(16, 16)) for _ in range(2)]
    before, values = shared.scale, shared.scale.clone()
    blocks = [
        infinity.offload(model, nvme, compute_dtype=dtype, host_memory=WHOLE)
        for model, dtype in zip(models, (first, second), strict=True)
    ]
    for block in blocks:
        block.__enter__()
    ends = [1, 0] if is_nested else [0, 1]
    blocks[ends[0]].__exit__(None, None, None)
    left = ends[1]
    with torch.no_grad():
        models[left](torch.ones(2, 16, dtype=(first, second)[left] or torch.float32))
    blocks[left].__exit__(None, None, None)
    assert shared.scale is before
    assert torch.equal(before, values)
    copy.deepcopy(models)  # no block has them any more


@pytest.mark.parametrize("is_nested", [True, False])
def test_shared_buffer_that_changed_in_blocks_has_its_last_value(
    is_nested: bool, nvme: Path
) -> None:
    shared = _Scaled()
    models = [nn.Sequential(nn.Linear(16, 16), shared) for _ in range(2)]
    blocks = [
        infinity.offload(model, nvme, compute_dtype=torch.bfloat16, host_memory=WHOLE)
        for model in models
    ]
    for block in blocks:
        block.__enter__()
        shared.scale[0] += 2
    for block in reversed(blocks) if is_nested else blocks:
        block.__exit__(None, None, None)
        shared.scale[1] += 1
    assert shared.scale.dtype == torch.float32
    assert shared.scale[0] > 4
    assert shared.scale[1] > 2
