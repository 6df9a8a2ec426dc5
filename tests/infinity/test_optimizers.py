"""Optimizers: those of PyTorch through a factory, groups, schedulers, hooks, loops around them."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.optimizer import TorchRule
from swap.plan.layout import Segment
from swap.plan.rules import ParameterUpdate
from tests.support.models import Gpt, Stack, seeded, token_loss, vector_loss
from tests.support.proof import matrix
from tests.support.training import (
    WHOLE,
    Plain,
    assert_same_runs,
    least_budget,
    same_bits,
    train_each,
    values_of,
)

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class _Scaled(torch.optim.Optimizer):
    """Keeps an attribute beside its defaults, as optimizers outside of PyTorch do."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})
        self.factor = 0.5

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-group["lr"] * self.factor)


class _Eager(torch.optim.Optimizer):
    """Makes its state when it is made, with a value other than zero."""

    def __init__(self, params: Any, lr: float = 1e-2, start: float = 0.5) -> None:
        super().__init__(params, {"lr": lr, "start": start})
        for group in self.param_groups:
            for parameter in group["params"]:
                sums = torch.full_like(parameter, group["start"])
                self.state[parameter] = {"sum": sums, "count": 0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["count"] += 1
                    state["sum"].addcmul_(parameter.grad, parameter.grad)
                    scale = -group["lr"] / state["count"]
                    parameter.addcdiv_(parameter.grad, state["sum"].sqrt(), value=scale)


FACTORIES: dict[str, Factory] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, weight_decay=1e-2),
    "SGD momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, nesterov=True),
    "Adam": partial(torch.optim.Adam, lr=1e-3, weight_decay=1e-2),
    "Adam amsgrad": partial(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-3, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-3, fused=True),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-3, momentum=0.9, centered=True),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2, initial_accumulator_value=0.1),
    "Adadelta": partial(torch.optim.Adadelta, lr=0.5),
    "Adamax": partial(torch.optim.Adamax, lr=1e-3),
    "NAdam": partial(torch.optim.NAdam, lr=1e-3),
    "RAdam": partial(torch.optim.RAdam, lr=1e-3),
    "Rprop": partial(torch.optim.Rprop, lr=1e-3),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2, t0=3),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "attributes": _Scaled,
    "eager state": _Eager,
}


OF_TORCH = [*product(FACTORIES, (None, torch.bfloat16))]
OF_TORCH_USUALLY = [*OF_TORCH[::4], *OF_TORCH[3::4]]
"""Each optimizer once, in one dtype and the other by turns."""


@pytest.mark.parametrize(("name", "dtype"), matrix(OF_TORCH, usual=OF_TORCH_USUALLY))
def test_optimizers_of_torch_give_their_own_bits(
    name: str, dtype: torch.dtype | None, nvme: Path
) -> None:
    """The same optimizer on float32 masters in memory, bit for bit, also with all state on NVMe."""
    plain = Plain(seeded(Gpt), FACTORIES[name], dtype=dtype)
    for step in range(5):
        token_loss(plain.model, step).backward()
        plain.step()
    least = least_budget(Gpt, nvme, optimizer=FACTORIES[name], compute_dtype=dtype)
    for host_memory in (WHOLE, least):
        model = seeded(Gpt)
        with infinity.offload(
            model,
            nvme,
            optimizer=FACTORIES[name],
            compute_dtype=dtype,
            host_memory=host_memory,
        ) as offloaded:
            for step in range(5):
                token_loss(model, step).backward()
                offloaded.step()
            assert (offloaded.report().read_bytes > 0) == (host_memory == least)
        for key, parameter in model.named_parameters():
            assert same_bits(parameter, plain.masters[key]), key


def _matrices() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_for_matrices_alone_is_given_only_matrices(nvme: Path) -> None:
    factory = partial(torch.optim.Muon, lr=1e-2)
    plain = Plain(seeded(_matrices), factory)
    model = seeded(_matrices)
    with infinity.offload(model, nvme, optimizer=factory) as offloaded:
        for step in range(3):
            vector_loss(model, step).backward()
            offloaded.step()
            vector_loss(plain.model, step).backward()
            plain.step()
    assert all(same_bits(p, plain.masters[name]) for name, p in model.named_parameters())


def test_clipping_and_accumulation_work_with_a_factory(nvme: Path) -> None:
    factory = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    runs = train_each(
        Gpt, token_loss, nvme, steps=5, accumulate=2, optimizer=factory, max_grad_norm=0.1
    )
    assert_same_runs(runs)
    plain = Plain(seeded(Gpt), factory, max_grad_norm=0.1)
    for step in range(5):
        for part in range(2):
            (token_loss(plain.model, 2 * step + part) / 2).backward()
        plain.step()
    for name, master in plain.masters.items():
        assert torch.allclose(runs["least"].values[name], master, rtol=1e-6, atol=1e-9)


def test_an_update_that_is_computed_again_gives_the_same(nvme: Path) -> None:
    """After an I/O error a subgroup is read again and updated again, from what was there before."""
    rule = TorchRule(torch.optim.NAdam([nn.Parameter(torch.zeros(8, 8))]))
    segment = Segment(parameter=0, subgroup=0, start=0, length=64, offset=0)
    gradient = torch.linspace(-1, 1, 64)
    planes = {name: torch.zeros(64) for name in ("weight", "exp_avg", "exp_avg_sq")}
    for step in (1, 2, 3):
        update = ParameterUpdate(
            parameter=0,
            step=step,
            shape=torch.Size((8, 8)),
            options={k: v for k, v in rule._optimizer.param_groups[0].items() if k != "params"},
        )
        results = []
        for _ in range(2):
            again = {name: plane.clone() for name, plane in planes.items()}
            rule.apply(segment, update, again, gradient, 0.5)
            results.append(again)
        assert all(same_bits(results[0][name], results[1][name]) for name in planes), step
        planes = results[0]
    assert torch.equal(gradient, torch.linspace(-1, 1, 64)), "a retry scales it again"


# Groups and schedules.


def _two_groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() < 2]
    return [
        {"params": matrices, "lr": 2e-3, "weight_decay": 0.2},
        {"params": others, "lr": 5e-3, "weight_decay": 0.0, "betas": (0.5, 0.9)},
    ]


def test_groups_of_a_factory_keep_their_options(nvme: Path) -> None:
    def factory(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(_two_groups(parameters))

    plain = Plain(seeded(Gpt), factory)
    model = seeded(Gpt)
    least = least_budget(Gpt, nvme, optimizer=factory)
    with infinity.offload(model, nvme, optimizer=factory, host_memory=least) as offloaded:
        assert [group["lr"] for group in offloaded.optimizer.param_groups] == [2e-3, 5e-3]
        for step in range(4):
            token_loss(model, step).backward()
            offloaded.step()
            token_loss(plain.model, step).backward()
            plain.step()
    assert all(same_bits(p, plain.masters[name]) for name, p in model.named_parameters())


def test_groups_can_be_made_inside_the_block(nvme: Path) -> None:
    results = []
    for host_memory in (WHOLE, least_budget(Gpt, nvme)):
        model = seeded(Gpt)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            matrices, others = _two_groups([*model.parameters()])
            offloaded.optimizer.param_groups[0].update(matrices)
            offloaded.optimizer.add_param_group(others)
            for step in range(4):
                token_loss(model, step).backward()
                offloaded.step()
        results.append(values_of(model))
    plain = Plain(seeded(Gpt), lambda p: torch.optim.AdamW(_two_groups(p), fused=True))
    for step in range(4):
        token_loss(plain.model, step).backward()
        plain.step()
    for name, master in plain.masters.items():
        assert same_bits(results[0][name], results[1][name]), name
        assert torch.allclose(results[0][name], master, rtol=1e-5, atol=1e-7), name


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=5),
    "one cycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1e-2, total_steps=8),
    "warm-up": partial(torch.optim.lr_scheduler.LinearLR, start_factor=0.1, total_iters=4),
    "exponential": partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5),
    "lambda": partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=lambda step: 1 / (1 + step)),
}


KINDS = ("float", "tensor", "torch.optim.AdamW")
# LambdaLR keeps the tensor of the rate itself as its base.
SCHEDULED = [cell for cell in product(SCHEDULERS, KINDS) if cell != ("lambda", "tensor")]


@pytest.mark.parametrize(("name", "kind"), matrix(SCHEDULED, usual=SCHEDULED[::4]))
def test_schedulers_change_what_they_change_in_torch(name: str, kind: str, nvme: Path) -> None:
    """A schedule moves on while the update before is still going on in the background."""
    optimizers: dict[str, Any] = {
        "float": infinity.AdamW(lr=1e-2),
        "tensor": infinity.AdamW(lr=torch.tensor(1e-2)),
        "torch.optim.AdamW": partial(torch.optim.AdamW, lr=1e-2),
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        results, rates = [], []
        for host_memory in (WHOLE, least_budget(Gpt, nvme, optimizer=optimizers[kind])):
            model = seeded(Gpt)
            with infinity.offload(
                model, nvme, optimizer=optimizers[kind], host_memory=host_memory
            ) as offloaded:
                scheduler = SCHEDULERS[name](offloaded.optimizer)
                for step in range(7):
                    token_loss(model, step).backward()
                    offloaded.step()
                    rates.append(float(offloaded.optimizer.param_groups[0]["lr"]))
                    scheduler.step()
            results.append(values_of(model))
    plain = Plain(seeded(Gpt), partial(torch.optim.AdamW, lr=1e-2))
    scheduler = SCHEDULERS[name](plain.optimizer)
    model = seeded(Gpt)
    with infinity.offload(model, nvme, optimizer=optimizers[kind]) as offloaded:
        for step in range(7):
            assert rates[step] == rates[7 + step] == pytest.approx(scheduler.get_last_lr()[0])
            offloaded.optimizer.param_groups[0].update(
                {key: plain.optimizer.param_groups[0][key] for key in ("betas", "weight_decay")},
                lr=rates[step],
            )
            for one in (model, plain.model):
                token_loss(one, step).backward()
            offloaded.step()
            plain.step()
            scheduler.step()
    for key, value in values_of(model).items():
        assert same_bits(results[0][key], results[1][key]), key
        assert same_bits(results[0][key], value), key
        if kind == "torch.optim.AdamW":
            assert same_bits(plain.masters[key], value), key


def test_options_changed_between_backward_and_step_count_for_that_step(nvme: Path) -> None:
    """Updates may begin during backward, with options that can still change before the step."""
    results = []
    for host_memory in (WHOLE, least_budget(Gpt, nvme)):
        for in_place in (False, True):
            model = seeded(Gpt)
            rate: Any = torch.tensor(1e-3) if in_place else 1e-3
            with infinity.offload(
                model, nvme, optimizer=infinity.AdamW(lr=rate), host_memory=host_memory
            ) as offloaded:
                for step in range(8):
                    token_loss(model, step).backward()
                    group = offloaded.optimizer.param_groups[0]
                    if in_place:
                        group["lr"].fill_(1e-3 * (step + 1))
                    else:
                        group["lr"] = torch.tensor(1e-3 * (step + 1)).item()
                    offloaded.step()
            results.append(values_of(model))
    for other in results[1:]:
        assert all(same_bits(value, other[name]) for name, value in results[0].items())


def test_gradients_changed_between_backward_and_step_count_for_that_step(nvme: Path) -> None:
    results = []
    for host_memory in (WHOLE, least_budget(Gpt, nvme)):
        model = seeded(Gpt)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(6):
                token_loss(model, step).backward()
                chosen = [*model.parameters()][step % 4 :: 3]
                for parameter in chosen:
                    gradient = offloaded.gradient(parameter)
                    parameter.grad = None if step % 2 else gradient.sign()  # type: ignore[union-attr]
                if step == 3:
                    offloaded.clip_grad_norm_(0.1)
                if step == 4:
                    token_loss(model, 100).backward()
                offloaded.step()
        results.append(values_of(model))
    assert all(same_bits(value, results[1][name]) for name, value in results[0].items())


# Loops.


def test_the_plain_loop_is_the_step(nvme: Path) -> None:
    results = []
    for plain_loop in (False, True):
        model = seeded(Gpt)
        least = least_budget(Gpt, nvme)
        with infinity.offload(model, nvme, host_memory=least, max_grad_norm=0.5) as offloaded:
            optimizer = offloaded.optimizer
            for step in range(4):
                if plain_loop:
                    optimizer.zero_grad()
                    token_loss(model, step).backward()
                    optimizer.step()
                else:
                    token_loss(model, step).backward()
                    offloaded.step()
        results.append(values_of(model))
    assert all(same_bits(value, results[1][name]) for name, value in results[0].items())


def test_a_gradient_on_top_of_a_used_one_is_refused(nvme: Path) -> None:
    """PyTorch would add to the old gradient, which is gone; a loop without zero_grad is a bug."""
    model = Stack()
    with infinity.offload(model, nvme) as offloaded:
        vector_loss(model, 0).backward()
        offloaded.optimizer.step()
        with pytest.raises(RuntimeError, match=r"offloaded\.step\(\), or optimizer\.zero_grad\(\)"):
            vector_loss(model, 1).backward()
        offloaded.optimizer.zero_grad()
        vector_loss(model, 1).backward()
        offloaded.optimizer.step()


def test_step_hooks_and_closures_run_around_the_step(nvme: Path) -> None:
    model, calls = Stack(), []
    with torch.no_grad():
        expected = vector_loss(model, 0).item()
    with infinity.offload(model, nvme) as offloaded:
        optimizer = offloaded.optimizer
        assert isinstance(optimizer, torch.optim.Optimizer)
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))

        def closure() -> float:
            calls.append("closure")
            assert torch.is_grad_enabled()
            loss = vector_loss(model, 0)
            loss.backward()
            return loss.item()

        with torch.no_grad():
            loss = optimizer.step(closure)
        assert loss == expected
        optimizer.zero_grad()
        vector_loss(model, 0).backward()
        offloaded.step()
    assert calls == ["before", "closure", "after", "before", "after"]


def test_a_step_without_gradients_changes_nothing(nvme: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with infinity.offload(model, nvme) as offloaded:
        offloaded.step()
        offloaded.optimizer.step()
        with pytest.raises(RuntimeError, match="no step was taken yet"):
            _ = offloaded.grad_norm
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


def test_parameters_without_a_gradient_are_not_stepped(nvme: Path) -> None:
    """As in PyTorch: neither decayed nor counted, and what they have of moments stays."""
    plain = Plain(seeded(Gpt), partial(torch.optim.AdamW, fused=True))
    model = seeded(Gpt)
    with infinity.offload(model, nvme, host_memory=least_budget(Gpt, nvme)) as offloaded:
        for step in range(6):
            for one in (model, plain.model):
                token_loss(one, step).backward()
                for index, parameter in enumerate(one.parameters()):
                    if (index + step) % 3:
                        parameter.grad = None
            offloaded.step()
            plain.step()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter, plain.masters[name], rtol=0, atol=1e-6), name


# What cannot work.


def test_inference_takes_no_steps(nvme: Path) -> None:
    for host_memory in (WHOLE, least_budget(Stack, nvme, optimizer=None)):
        model = seeded(Stack)
        with infinity.offload(model, nvme, optimizer=None, host_memory=host_memory) as offloaded:
            vector_loss(model, 0).backward()
            with pytest.raises(RuntimeError, match=r"optimizer=None.*pass infinity\.AdamW"):
                offloaded.step()


def _lbfgs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (3, TypeError, "neither infinity.AdamW"),
    "a class of ours": (infinity.AdamW, TypeError, "neither infinity.AdamW"),
    "not an optimizer": (lambda parameters: 3, TypeError, "returned int, not an Optimizer"),
    "an optimizer": (
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
        TypeError,
        "neither infinity.AdamW",
    ),
    "LBFGS": (_lbfgs, ValueError, "LBFGS"),
    "some parameters": (
        lambda parameters: torch.optim.SGD(parameters[:3], lr=1.0),
        ValueError,
        r"layers\.1\.bias is in no group",
    ),
    "other parameters": (
        lambda parameters: torch.optim.SGD([*parameters, nn.Parameter(torch.zeros(5, 7))], lr=1.0),
        ValueError,
        r"shape \(5, 7\), which is not one of those",
    ),
    "one with tiers of its own": (
        infinity.OffloadedAdamW,
        TypeError,
        r"OffloadedAdamW keeps its state on NVMe by itself.*optimizer=infinity\.AdamW",
    ),
    "a partial of such": (
        partial(infinity.OffloadedAdamW, nvme="/nowhere"),
        TypeError,
        "OffloadedAdamW keeps its state on NVMe by itself",
    ),
    "fails": (lambda parameters: 1 / 0, ZeroDivisionError, "division"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_optimizer_is_refused_before_anything_changes(name: str, nvme: Path) -> None:
    optimizer, error, message = WRONG[name]
    model = Stack()
    before = values_of(model)
    with (
        pytest.raises(error, match=message),
        infinity.offload(model, nvme, optimizer=optimizer),
    ):
        pass
    assert type(model.layer(0).weight) is nn.Parameter
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


def test_a_factory_that_makes_an_optimizer_with_own_tiers_is_refused_and_leaves_no_files(
    nvme: Path,
) -> None:
    made: list[infinity.OffloadedAdamW] = []

    def factory(parameters: list[nn.Parameter]) -> infinity.OffloadedAdamW:
        made.append(infinity.OffloadedAdamW(parameters, nvme=nvme, host_memory="64MiB"))
        return made[0]

    with pytest.raises(TypeError, match="OffloadedAdamW keeps its state on NVMe by itself"):
        infinity.offload(Stack(), nvme, optimizer=factory).__enter__()
    assert not any(nvme.iterdir())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"lr=-1\.0"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"eps": -1e-8}, "eps=-1e-08"),
        ({"weight_decay": -0.1}, r"weight_decay=-0\.1"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1\.0"),
        ({"betas": (-0.1, 0.9)}, r"betas\[0\]=-0\.1"),
        ({"state_dtype": torch.int8}, "state_dtype=torch.int8"),
    ],
)
def test_options_of_adamw_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        infinity.AdamW(**options)
