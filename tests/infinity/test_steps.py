"""Groups, schedules, hooks and loops around the step, held against what they do in torch."""

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
from tests.support.models import LowGpt as Gpt
from tests.support.models import Stack, seeded, token_loss, vector_loss
from tests.support.proof import matrix
from tests.support.training import WHOLE, Plain, least_budget, same_bits, same_values, values_of


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


@pytest.mark.parametrize(("name", "kind"), matrix(SCHEDULED, usual=SCHEDULED[::8]))
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
                for step in range(5):
                    token_loss(model, step).backward()
                    offloaded.step()
                    rates.append(float(offloaded.optimizer.param_groups[0]["lr"]))
                    scheduler.step()
            results.append(values_of(model))
    plain = Plain(seeded(Gpt), partial(torch.optim.AdamW, lr=1e-2))
    scheduler = SCHEDULERS[name](plain.optimizer)
    model = seeded(Gpt)
    with infinity.offload(model, nvme, optimizer=optimizers[kind]) as offloaded:
        for step in range(5):
            assert rates[step] == rates[5 + step] == pytest.approx(scheduler.get_last_lr()[0])
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
    assert same_values(results[0], results[1])


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
    assert same_values(results[0], results[1])


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


def test_a_second_step_with_used_gradients_is_refused(nvme: Path) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory=WHOLE) as offloaded:
        vector_loss(model, 0).backward()
        offloaded.optimizer.step()
        for step in (offloaded.optimizer.step, offloaded.step):
            with pytest.raises(RuntimeError, match=r"gradient of layers\.0\.weight that the step"):
                step()
        offloaded.optimizer.zero_grad()
        offloaded.step()  # without gradients, as in memory


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


def test_inference_takes_no_steps(nvme: Path) -> None:
    for host_memory in (WHOLE, least_budget(Stack, nvme, optimizer=None)):
        model = seeded(Stack)
        with infinity.offload(model, nvme, optimizer=None, host_memory=host_memory) as offloaded:
            vector_loss(model, 0).backward()
            with pytest.raises(RuntimeError, match=r"optimizer=None.*pass infinity\.AdamW"):
                offloaded.step()


def test_a_group_of_parameters_of_no_offloaded_model_is_refused_and_not_added(
    nvme: Path, tmp_path: Path
) -> None:
    model = seeded(Stack)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        before = [[*group["params"]] for group in offloaded.optimizer.param_groups]
        with pytest.raises(ValueError, match=r"shape \(3,\) is none of the offloaded model"):
            offloaded.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
        after = [[*group["params"]] for group in offloaded.optimizer.param_groups]
        assert [*map(len, before)] == [*map(len, after)]
        offloaded.save(tmp_path / "saved")
