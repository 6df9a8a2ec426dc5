"""What a parameter is inside the block: true about itself, usable anywhere, honest where it is not.

Under the least budget most weights are on the SSD whenever nobody computes with them.
"""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import infinity
from tests.support.models import Gpt, Stack, seeded, vector_loss, vectors
from tests.support.proof import by_turns
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of


def test_what_parameters_say_of_themselves_is_true(nvme: Path) -> None:
    plain = Gpt().to(torch.bfloat16)
    model = copy.deepcopy(plain).float()
    least = least_budget(Gpt, nvme, compute_dtype=torch.bfloat16)
    facts: tuple[Callable[[torch.Tensor], Any], ...] = (
        lambda p: (p.shape, p.size(), p.ndim, p.dim(), p.numel(), len(p)),
        lambda p: (p.dtype, p.itemsize, p.element_size(), p.nbytes, p.is_floating_point()),
        lambda p: (p.device, p.layout, p.is_cuda, p.is_meta, p.is_sparse),
        lambda p: (p.requires_grad, p.is_leaf, p.grad_fn, p.grad, p.retains_grad),
        lambda p: (p.stride(), p.is_contiguous(), p.is_inference()),
    )
    with infinity.offload(model, nvme, host_memory=least, compute_dtype=torch.bfloat16):
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert isinstance(ours, nn.Parameter)
            assert [fact(ours) for fact in facts] == [fact(theirs) for fact in facts], name


def test_values_can_be_read_from_wherever_a_parameter_was_found(
    host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    expected = values_of(model)
    parameters = dict(model.named_parameters())
    norm = torch.stack([value.norm() for value in expected.values()]).norm()
    with infinity.offload(model, nvme, host_memory=host_memory):
        for name, parameter in model.named_parameters():
            value = expected[name]
            assert same_bits(parameter.detach(), value)
            assert same_bits(parameter.data, value)
            assert same_bits(parameters[name] + 0, value)
            assert torch.equal(parameter, value)
            assert parameter.tolist() == value.tolist()
            assert "nan" not in repr(parameter)
            assert same_bits(copy.deepcopy(parameter), value)
            assert type(copy.deepcopy(parameter)) is nn.Parameter
        assert same_bits(torch.stack([p.norm() for p in model.parameters()]).norm(), norm)


def test_values_read_right_after_a_step_are_those_after_it(nvme: Path) -> None:
    """The update goes on in the background when ``step`` returns."""
    runs = []
    for host_memory in (WHOLE, WHOLE >> 1, least_budget(Stack, nvme)):
        model, seen = seeded(Stack), []
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(4):
                vector_loss(model, step).backward()
                offloaded.step()
                seen += [parameter.detach().clone() for parameter in model.parameters()]
            with offloaded.gathered():
                now = [parameter.detach().clone() for parameter in model.parameters()]
            assert all(map(same_bits, seen[-len(now) :], now))
        runs.append(seen)
    assert all(map(same_bits, runs[0], runs[1]))
    assert all(map(same_bits, runs[0], runs[2]))


def test_a_penalty_over_all_parameters_trains_as_in_memory(nvme: Path) -> None:
    results = []
    for host_memory in (WHOLE, least_budget(Stack, nvme)):
        model = seeded(Stack)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(3):
                penalty = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
                (vector_loss(model, step) + 1e-2 * penalty).backward()
                offloaded.step()
        results.append(values_of(model))
    assert results[0]["layers.0.weight"].isfinite().all()
    assert same_values(results[0], results[1])


class _Fused(nn.Module):
    """Uses the weights of children that are never called, several at once and one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(256, 256) for _ in range(3))
        self.steps = nn.ParameterList(torch.randn(256, 256) / 16 for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.q.weight, self.k.weight])
        a, b = F.linear(x, both).chunk(2, -1)
        first, second = self.q.weight, self.v.weight
        c = F.linear(x, first) + F.linear(x, second) + F.linear(x, first)
        for weight in self.steps:
            x = x + torch.tanh(x @ weight)
        return x + a * b.sigmoid() + c


def _make_fused() -> nn.Module:
    return nn.Sequential(*(_Fused() for _ in range(3)))


def test_weights_of_modules_that_are_not_called_are_found(nvme: Path) -> None:
    results = []
    for host_memory in (WHOLE, least_budget(_make_fused, nvme)):
        model = seeded(_make_fused)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(3):
                vector_loss(model, step).backward()
                offloaded.step()
        results.append(values_of(model))
    assert same_values(results[0], results[1])
    assert all(value.isfinite().all() for value in results[0].values())


def test_more_weights_at_once_than_fit_are_an_error_not_wrong(nvme: Path) -> None:
    model = seeded(Stack)
    least = least_budget(Stack, nvme)
    with infinity.offload(model, nvme, host_memory=least) as offloaded:
        with pytest.raises(infinity.BudgetError, match=r"give at least .* more host_memory"):
            torch.cat([layer.weight for layer in model.layers])  # type: ignore[misc]
        vector_loss(model, 0).backward()
        offloaded.step()


# Changes that must not get lost.


CHANGES: dict[str, Callable[[Stack], Any]] = {
    "init": lambda model: nn.init.ones_(model.layer(0).weight),
    "init of a small one": lambda model: nn.init.ones_(model.norm.weight),
    "no_grad": lambda model: _without_grad(lambda: model.layer(0).weight.mul_(2)),
    "data": lambda model: model.layer(0).weight.data.clamp_(-1e-3, 1e-3),
    "data of a small one": lambda model: model.norm.weight.data.fill_(3.0),
    "kept detached": lambda model: _kept(model).zero_(),
    "copy_": lambda model: _without_grad(lambda: model.layer(3).weight.copy_(torch.eye(256))),
}


COMPUTED = (None, torch.bfloat16, torch.float16)


def _without_grad(change: Callable[[], Any]) -> Any:
    with torch.no_grad():
        return change()


def _kept(model: Stack) -> torch.Tensor:
    model(vectors(3))
    return next(iter(model.parameters())).detach()


@pytest.mark.parametrize(("name", "dtype"), by_turns(CHANGES, COMPUTED))
def test_weights_changed_past_the_library_stop_the_next_step(
    name: str, dtype: torch.dtype | None, nvme: Path
) -> None:
    for least in (False, True):
        model = Stack(depth=16)
        budget = least_budget(lambda: Stack(depth=16), nvme, compute_dtype=dtype)
        with infinity.offload(
            model, nvme, host_memory=budget if least else WHOLE, compute_dtype=dtype
        ) as offloaded:
            offloaded.backward(vector_loss(model, 0))
            offloaded.step()
            offloaded.backward(vector_loss(model, 1))
            CHANGES[name](model)
            with pytest.raises(RuntimeError, match=r"gathered\(\[parameter\], modify=True\)"):
                offloaded.step()


def test_a_module_that_changes_its_weights_in_forward_is_refused(nvme: Path) -> None:
    model = nn.Sequential(nn.Embedding(64, 256, max_norm=1.0), Stack())
    with infinity.offload(model, nvme) as offloaded:
        model(torch.arange(8)).square().mean().backward()
        with pytest.raises(RuntimeError, match=r"^0\.weight was changed in place.* max_norm"):
            offloaded.step()


def test_the_data_of_a_parameter_cannot_be_replaced(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with infinity.offload(model, nvme, host_memory=host_memory):
        for parameter in model.parameters():
            with pytest.raises(RuntimeError, match=r"offloaded\.gathered"):
                parameter.data = torch.zeros_like(parameter)
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


CONVERSIONS: dict[str, Callable[[Stack], Any]] = {
    "half": lambda model: model.half(),
    "bfloat16": lambda model: model.bfloat16(),
    "double": lambda model: model.double(),
    "to a dtype": lambda model: model.to(torch.float16),
    "to meta": lambda model: model.to("meta"),
    "to_empty": lambda model: model.to_empty(device="cpu"),
    "a child": lambda model: model.layer(2).half(),
    "share_memory": lambda model: model.share_memory(),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_converting_the_model_inside_is_refused(name: str, host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with infinity.offload(model, nvme, host_memory=host_memory):
        with pytest.raises(RuntimeError, match="convert it before the block"):
            CONVERSIONS[name](model)
        vector_loss(model, 0).backward()
    assert all(same_bits(value, before[name]) for name, value in values_of(model).items())


def test_conversions_that_change_nothing_are_let_through(host_memory: int, nvme: Path) -> None:
    """Trainers move models to where they are already."""
    model = Stack()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        assert model.to("cpu").float().cpu().train().eval() is model
        assert model.to(torch.device("cpu"), torch.float32) is model
        vector_loss(model, 0).backward()
        offloaded.step()


def test_parameters_cannot_be_replaced_or_removed(nvme: Path) -> None:
    model = Stack()
    with infinity.offload(model, nvme) as offloaded:
        with pytest.raises(RuntimeError, match="cannot be replaced while the model is offloaded"):
            model.layer(0).weight = nn.Parameter(torch.zeros(256, 256))
        with pytest.raises(
            RuntimeError, match=r"as torch\.func\.functional_call does, take a copy"
        ):
            torch.func.functional_call(model.layer(0), {"weight": torch.zeros(256, 256)}, ())
        with pytest.raises(RuntimeError, match="cannot be removed while the model is offloaded"):
            del model.layer(0).weight
        model.layer(0).weight = model.layer(0).weight
        vector_loss(model, 0).backward()
        offloaded.step()


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        pickle.dumps,
        lambda model: torch.save(model, io.BytesIO()),
        lambda model: pickle.dumps([*model.parameters()]),
        lambda model: copy.deepcopy(nn.Sequential(model)),
    ],
)
def test_copying_or_pickling_the_model_names_the_remedy(
    duplicate: Callable[[nn.Module], Any], nvme: Path
) -> None:
    model = nn.Sequential(Stack())
    with (
        infinity.offload(model, nvme),
        pytest.raises(RuntimeError, match=r"offloaded\.save\(path\) or offloaded\.export"),
    ):
        duplicate(model)
    assert len([*copy.deepcopy(model).parameters()]) == len([*model.parameters()])


# State dicts.


def test_state_dicts_are_refused_by_name_and_work_gathered(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    expected = values_of(model)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for ask in (model.state_dict, model.layer(0).state_dict, model.norm.state_dict):
            with pytest.raises(RuntimeError, match=r"offloaded\.save.*offloaded\.gathered\(\)"):
                ask()
        for module, state in ((model, expected), (model.norm, {"weight": torch.ones(256)})):
            with pytest.raises(RuntimeError, match=r"offloaded\.load.*modify=True"):
                module.load_state_dict(state, strict=False)
        with pytest.raises(ValueError, match=r"offloaded\.load\(path\)"):
            offloaded.optimizer.load_state_dict({"state": {}, "param_groups": []})
        with offloaded.gathered():
            found = model.state_dict()
            assert {k: v.shape for k, v in found.items()} == {
                k: v.shape for k, v in expected.items()
            }
            assert all(same_bits(value, expected[name]) for name, value in found.items())
        with offloaded.gathered(modify=True):
            model.load_state_dict({name: value * 2 for name, value in expected.items()})
    assert all(same_bits(value, 2 * expected[name]) for name, value in values_of(model).items())


def test_a_forward_pass_needs_no_hooks_to_be_right(host_memory: int, nvme: Path) -> None:
    """``forward`` called directly runs none of a module's hooks."""
    model = seeded(Stack)
    expected = model(vectors(0)).detach()
    with infinity.offload(model, nvme, host_memory=host_memory):
        assert same_bits(model.forward(vectors(0)).detach(), expected)
        x = vectors(0)
        for layer in model.layers:
            x = x + torch.tanh(layer.forward(x))
        assert same_bits(F.layer_norm(x, (256,), model.norm.weight, model.norm.bias), expected)
