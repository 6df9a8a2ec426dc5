"""Parameters that a program listed before the block, of layers that are in tiles inside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import infinity
from tests.support.models import seeded
from tests.support.training import WHOLE, least_budget, same_values, values_of

pytestmark = pytest.mark.usefixtures("one_thread")

BOUND = 1 << 18
FUSED = partial(torch.optim.AdamW, lr=1e-2, fused=True)


class Net(nn.Module):
    """A table and a layer that are tiled, a head that is not; ``uses``: how it has the layer.

    No gradient goes through what is tiled: it would be a sum in another order than in memory.
    """

    def __init__(self, uses: str = "module") -> None:
        super().__init__()
        self.table = nn.Embedding(1024, 96)
        self.wide = nn.Linear(96, 2048)
        self.head = nn.Linear(2048, 8)
        self.others = [self.wide]
        self.weights = [self.wide.weight, self.wide.bias]
        self.uses = uses

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.sin(tokens[:, None] * torch.arange(1, 97)).to(self.head.weight.dtype)
        if self.uses == "module":
            x = self.wide(x)
        elif self.uses == "list of weights":
            x = F.linear(x, *self.weights)
        else:
            x = F.linear(x, self.others[0].weight, self.others[0].bias)
        result: torch.Tensor = self.head(torch.relu(x))
        return result + self.table(tokens)[:, :8]


TOKENS = torch.arange(32) * 31 % 1024
Use = Callable[[list[nn.Parameter], torch.Tensor], Any]


def _nothing(_: list[nn.Parameter], loss: torch.Tensor) -> None:
    loss.backward()


def _clip_norm(params: list[nn.Parameter], loss: torch.Tensor) -> float:
    loss.backward()
    return nn.utils.clip_grad_norm_(params, 0.1).item()


def _clip_value(params: list[nn.Parameter], loss: torch.Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_value_(params, 1e-3)


def _scale_each(params: list[nn.Parameter], loss: torch.Tensor) -> list[float]:
    loss.backward()
    for param in params:
        assert param.grad is not None
        param.grad.mul_(-0.5)
        param.grad += 1e-3
    return [param.grad.norm().item() for param in params if param.grad is not None]


def _assign(params: list[nn.Parameter], loss: torch.Tensor) -> None:
    loss.backward()
    for param in params:
        param.grad = torch.ones_like(param)


def _forget(params: list[nn.Parameter], loss: torch.Tensor) -> None:
    loss.backward()
    params[1].grad = None


def _regularise(params: list[nn.Parameter], loss: torch.Tensor) -> None:
    (loss + 1e-2 * sum(param.square().sum() for param in params)).backward()


def _average(params: list[nn.Parameter], loss: torch.Tensor) -> list[float]:
    loss.backward()
    averages = [torch.zeros_like(param) for param in params]
    for average, param in zip(averages, params, strict=True):
        average.lerp_(param.detach(), 0.1)
    return [average.sum().item() for average in averages]


def _freeze(params: list[nn.Parameter], loss: torch.Tensor) -> None:
    params[1].requires_grad_(False)
    loss.backward()
    params[1].grad = None


def _run(model: Net, params: list[nn.Parameter], use: Use, step: Callable[[], Any]) -> list[Any]:
    found = []
    for _ in range(3):
        loss = model(TOKENS).square().mean() * 100
        found += [use(params, loss), loss.item()]
        step()
    return found


def _in_memory(make: Callable[[], Net], use: Use) -> tuple[Net, list[Any]]:
    model = seeded(make)
    optimizer = FUSED(model.parameters())

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return model, _run(model, [*model.parameters()], use, step)


USES = (
    *(_nothing, _clip_norm, _clip_value, _scale_each, _assign, _forget),
    *(_regularise, _average, _freeze),
)


@pytest.mark.parametrize(
    ("use", "uses"),
    [
        *((use, "module") for use in USES),
        *((_nothing, "list of modules"), (_clip_norm, "list of weights")),
    ],
)
def test_parameters_listed_before_the_block_are_those_of_a_loop_in_memory(
    use: Use, uses: str, nvme: Path
) -> None:
    plain, expected = _in_memory(partial(Net, uses), use)
    model = seeded(partial(Net, uses))
    params = [*model.parameters()]
    least = least_budget(Net, nvme, max_parameter_bytes=BOUND)
    options: Any = {"host_memory": least, "max_parameter_bytes": BOUND}
    optimizer = infinity.AdamW(lr=1e-2)
    with infinity.offload(model, nvme, optimizer=optimizer, **options) as offloaded:
        assert sum(p.numel() for p in model.parameters()) == sum(p.numel() for p in params)
        assert len(list(model.parameters())) > len(params)
        found = _run(model, params, use, offloaded.step)
        assert all(isinstance(p, nn.Parameter) for p in params)
    assert found == expected
    assert same_values(values_of(model), values_of(plain))
    assert all(p is q for p, q in zip(params, model.parameters(), strict=True))
    assert all(type(p) is nn.Parameter and not vars(p) for p in params)


def test_handle_takes_parameters_listed_before_the_block(nvme: Path) -> None:
    model, plain = seeded(Net), seeded(Net)
    params = [*model.parameters()]
    with infinity.offload(
        model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND, compute_dtype=torch.bfloat16
    ) as offloaded:
        assert {p.dtype for p in params} == {torch.bfloat16}
        model(TOKENS).float().square().mean().backward()
        for param in params:
            gradient = offloaded.gradient(param)
            assert gradient is not None
            assert param.grad is not None
            assert torch.equal(gradient, param.grad)
            assert gradient.dtype == torch.bfloat16
        with offloaded.gathered(params[:2]):
            assert params[1].float().allclose(plain.wide.weight, rtol=2**-8)
        with offloaded.gathered(params[:2], modify=True):
            params[1].data.zero_()
        offloaded.optimizer.zero_grad()
        assert [p.grad for p in params] == [None] * len(params)
    assert not model.wide.weight.any()
    assert model.wide.weight.dtype == torch.float32


def test_hooks_and_passes_by_what_is_in_tiles_are_refused_by_name(nvme: Path) -> None:
    model = seeded(Net)
    weight = model.wide.weight
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND):
        for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
            with pytest.raises(RuntimeError, match=r"^wide\.weight is in tiles .* on the tiles"):
                register(lambda _: None)
        loss = model(TOKENS).sum()
        for differentiate in (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward):
            with pytest.raises(RuntimeError, match=r"^wide\.weight is in tiles .* the tiles"):
                differentiate(loss, inputs=[weight])


def test_groups_of_what_is_in_tiles_are_refused_by_name(nvme: Path) -> None:
    model = seeded(Net)
    params = [*model.parameters()]
    options: Any = {"host_memory": WHOLE, "max_parameter_bytes": BOUND}
    with (
        pytest.raises(ValueError, match=r"^table\.weight is in tiles .*that the factory is given"),
        infinity.offload(model, nvme, optimizer=lambda _: FUSED(params), **options),
    ):
        pass
    assert all(type(p) is nn.Parameter and not vars(p) for p in params)
    assert same_values(values_of(model), values_of(seeded(Net)))
    with infinity.offload(model, nvme, **options) as offloaded:
        with pytest.raises(ValueError, match=r"^wide\.weight is in tiles"):
            offloaded.optimizer.add_param_group({"params": [params[1]]})
        assert len(offloaded.optimizer.param_groups) == 1


def test_gradient_of_tiles_that_was_cleared_is_refused_by_name(nvme: Path) -> None:
    model = seeded(Net)
    weight = model.wide.weight
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=BOUND) as offloaded:
        model(TOKENS).sum().backward()
        gradient = weight.grad
        assert gradient is not None
        offloaded.optimizer.zero_grad()
        with pytest.raises(RuntimeError, match=r"wide\.weight"):
            gradient.sum()
        with pytest.raises(RuntimeError, match=r"wide\.weight"):
            gradient.zero_()


def test_gradients_from_before_the_block_come_back_where_nothing_used_them(nvme: Path) -> None:
    model = seeded(Net)
    model(TOKENS).sum().backward()
    params = [*model.parameters()]
    before = [p.grad for p in params]
    with infinity.offload(
        model, nvme, host_memory=1 << 30, max_parameter_bytes=BOUND, compute_dtype=torch.bfloat16
    ) as offloaded:
        assert all(p.grad is not None for p in params)
        del offloaded
    assert all(p.grad is None or p.grad is g for p, g in zip(params, before, strict=True))


@torch.no_grad()
def _evaluate_averages(model: nn.Module, averages: list[torch.Tensor]) -> None:
    """Data goes to and fro, and tiles of it are put together meanwhile."""
    parameters = [*model.parameters()]
    trained = [parameter.data for parameter in parameters]
    for index, parameter in enumerate(parameters):
        parameter.data, averages[index] = averages[index], parameter.data
    model.state_dict()
    for index, parameter in enumerate(parameters):
        parameter.data, averages[index] = averages[index], parameter.data
    for parameter in parameters:
        parameter.data.mul_(2)
    model.state_dict()
    for parameter, values in zip(parameters, trained, strict=True):
        parameter.data = torch.ones_like(parameter) + parameter
        values.mul_(3)


def test_tiles_may_be_given_other_data_and_put_together(nvme: Path) -> None:
    """What a program has of before is its own then, to change inside and after."""
    model, plain = nn.Linear(256, 1500), nn.Linear(256, 1500)
    plain.load_state_dict(model.state_dict())
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=1 << 18) as offloaded:
        averages = [torch.zeros(parameter.shape) for parameter in model.parameters()]
        for _ in range(3):
            with offloaded.gathered(modify=True):
                _evaluate_averages(model, averages)
            with offloaded.gathered():
                for values in averages:
                    values += 1
        kept = averages[0].flatten()[:5].clone()
    expected = [torch.zeros(parameter.shape) for parameter in plain.parameters()]
    for _ in range(3):
        _evaluate_averages(plain, expected)
        for values in expected:
            values += 1
    assert torch.equal(kept, expected[0].flatten()[:5])
    assert torch.equal(model.weight, plain.weight)
    assert torch.equal(model.bias, plain.bias)


@torch.no_grad()
def test_weight_that_is_transposed_where_it_is(nvme: Path) -> None:
    """Rows were copied over those that were still to be read."""
    model = nn.Linear(512, 512)
    before = model.weight.clone()
    with infinity.offload(model, nvme, host_memory=WHOLE, max_parameter_bytes=1 << 18) as offloaded:
        with offloaded.gathered(modify=True):
            model.weight.t_()
        with offloaded.gathered():
            assert torch.equal(model.weight.detach(), before.t())
