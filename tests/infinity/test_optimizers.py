"""Optimizers of PyTorch through a factory, and optimizers that cannot be taken."""

from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.torch_optimizer.rule import TorchRule
from swap.plan.layout import Segment
from swap.plan.rules import ParameterUpdate
from tests.support.models import LowGpt as Gpt
from tests.support.models import Stack, seeded, token_loss, vector_loss
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
    "ASGD": partial(torch.optim.ASGD, lr=1e-2, t0=1),
    "Adafactor": partial(torch.optim.Adafactor, lr=1e-2),
    "attributes": _Scaled,
    "eager state": _Eager,
}


COMPUTED = (None, torch.bfloat16)
USUAL = [
    *product(("SGD momentum", "AdamW fused", "ASGD", "attributes"), COMPUTED[:1]),
    *product(("Adam", "Adagrad", "Rprop", "Adafactor", "eager state"), COMPUTED[1:]),
]
"""Each kind of state once: of zeros, values, scalars, fewer dimensions, or none."""


@pytest.mark.parametrize(("name", "dtype"), matrix(product(FACTORIES, COMPUTED), usual=USUAL))
def test_optimizers_of_torch_give_their_own_bits(
    name: str, dtype: torch.dtype | None, nvme: Path
) -> None:
    """The same optimizer on float32 masters in memory, bit for bit, also with all state on NVMe."""
    plain = Plain(seeded(Gpt), FACTORIES[name], dtype=dtype)
    for step in range(3):
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
            for step in range(3):
                token_loss(model, step).backward()
                offloaded.step()
            assert (offloaded.report().read_bytes > 0) == (host_memory == least)
        for key, parameter in model.named_parameters():
            assert same_bits(parameter, plain.masters[key]), key


def _matrices() -> nn.Module:
    return nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3)))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_an_optimizer_for_matrices_alone_is_given_only_matrices(nvme: Path) -> None:
    factory = partial(torch.optim.Muon, lr=1e-2)
    plain = Plain(seeded(_matrices), factory)
    model = seeded(_matrices)
    with infinity.offload(model, nvme, optimizer=factory) as offloaded:
        for step in range(2):
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
    components = {name: torch.zeros(64) for name in ("weight", "exp_avg", "exp_avg_sq")}
    for step in (1, 2, 3):
        update = ParameterUpdate(
            parameter=0,
            step=step,
            shape=torch.Size((8, 8)),
            options={k: v for k, v in rule._optimizer.param_groups[0].items() if k != "params"},
        )
        results = []
        for _ in range(2):
            again = {name: component.clone() for name, component in components.items()}
            rule.apply(segment, update, again, gradient, 0.5)
            results.append(again)
        assert all(same_bits(results[0][name], results[1][name]) for name in components), step
        components = results[0]
    assert torch.equal(gradient, torch.linspace(-1, 1, 64)), "a retry scales it again"


def _lbfgs(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters)


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "a number": (3, TypeError, "neither infinity.AdamW"),
    "a class of ours": (infinity.AdamW, TypeError, "neither infinity.AdamW"),
    "not an optimizer": (lambda parameters: 3, TypeError, "returned int, not an Optimizer"),
    "a word": ("adamw", TypeError, "neither infinity.AdamW"),
    "an optimizer": (
        torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0),
        TypeError,
        r"a SGD that is made already.*optimizer=lambda params: SGD\(params",
    ),
    "LBFGS": (_lbfgs, ValueError, "LBFGS"),
    "some parameters": (
        lambda parameters: torch.optim.SGD(parameters[:3], lr=1.0),
        ValueError,
        r"layers\.1\.bias is in no group",
    ),
    "one twice": (
        lambda parameters: torch.optim.SGD([*parameters, parameters[0]], lr=1.0),
        ValueError,
        r"layers\.0\.weight is twice in the groups.*tied are one",
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


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
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


def test_a_parameter_that_comes_to_be_listed_twice_is_refused_by_the_step(nvme: Path) -> None:
    """Torch would update it twice. The step can be taken when it is there once."""
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        groups = offloaded.optimizer.param_groups
        groups.append({**groups[0], "params": [model.layer(3).weight]})
        vector_loss(model, 0).backward()
        with pytest.raises(ValueError, match=r"layers\.3\.weight is twice in .*param_groups"):
            offloaded.step()
        del groups[1]
        offloaded.step()
        offloaded.flush()
        assert set(offloaded._training.steps) == {1}


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


def test_group_with_a_parameter_of_another_block_is_refused_by_name(tmp_path: Path) -> None:
    first, second = nn.Linear(64, 64), nn.Linear(32, 32)
    with (
        infinity.offload(first, tmp_path, host_memory="64MiB") as offloaded,
        infinity.offload(second, tmp_path, host_memory="64MiB"),
    ):
        num_groups = len(offloaded.optimizer.param_groups)
        with pytest.raises(ValueError, match=r"^bias is of another offload block.*of its own"):
            offloaded.optimizer.add_param_group({"params": [second.bias]})
        assert len(offloaded.optimizer.param_groups) == num_groups
