"""Gradients over ranks as programs see them: the mean, on every rank, read and changed by all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import infinity
from tests.support.models import seeded
from tests.support.rank_jobs import complaint, gpt, least_budget, loss_of, world
from tests.support.ranks import run_ranks
from tests.support.training import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


def clip_by_torch(rank: int, folder: Path, *, batches: list[list[int]], name: str) -> list[float]:
    """Two steps that ``torch.nn.utils`` clips; weights are left in ``<name>-<rank>``."""
    model = seeded(gpt)
    options: dict[str, Any] = {"optimizer": infinity.AdamW(lr=1e-2)}
    least = least_budget(gpt, folder, **options)
    norms = []
    with infinity.offload(
        model, folder, host_memory=least, process_group=world(), **options
    ) as offloaded:
        for step in range(2):
            for batch in batches[rank]:
                (loss_of(model, batch + 100 * step) / len(batches[rank])).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
            offloaded.step()
    torch.save(dict(model.state_dict()), folder / f"{name}-{rank}")
    return norms


def test_two_ranks_clipped_by_torch_have_the_bits_of_one(tmp_path: Path) -> None:
    two, one = tmp_path / "two", tmp_path / "one"
    for folder in (two, one):
        folder.mkdir()
    norms = run_ranks(clip_by_torch, two, 2, batches=[[0], [1]], name="w")
    assert norms[0] == norms[1]
    assert norms[0] == clip_by_torch(0, one, batches=[[0, 1]], name="w")
    expected = torch.load(one / "w-0", weights_only=True)
    for rank in range(2):
        values = torch.load(two / f"w-{rank}", weights_only=True)
        assert all(same_bits(value, values[key]) for key, value in expected.items())


def gradient_without_memory(rank: int, folder: Path) -> bool:
    """Whether it is refused by name, and no step is taken without it."""
    model = seeded(gpt)
    name, parameter = next(iter(model.named_parameters()))
    parameter.register_hook(lambda gradient: TwoTensor(gradient.clone(), gradient.clone()))
    with infinity.offload(
        model, folder, host_memory="1GiB", process_group=world(), optimizer=infinity.AdamW()
    ) as offloaded:
        with pytest.raises(ValueError, match=f"^the gradient of {name} is a TwoTensor without"):
            loss_of(model, rank).backward()
        with pytest.raises(RuntimeError, match=f"the gradient of {name} was lost"):
            offloaded.step()
        offloaded.optimizer.zero_grad()
    return True


def test_a_gradient_without_memory_is_refused_by_every_rank(tmp_path: Path) -> None:
    assert run_ranks(gradient_without_memory, tmp_path, 2) == [True, True]


def changed_by_rank(rank: int, folder: Path, *, change: str) -> str:
    """What a step says of gradients that each rank changes in its own way."""
    with pytest.raises(infinity.RankDifferenceError) as refused:
        _step_with_changed(rank, folder, change)
    return str(refused.value)


def _step_with_changed(rank: int, folder: Path, change: str) -> None:
    model = seeded(gpt)
    small = next(p for p in model.parameters() if p.dim() == 1)
    with infinity.offload(
        model, folder, host_memory="1GiB", process_group=world(), optimizer=infinity.AdamW()
    ) as offloaded:
        loss_of(model, rank).backward()
        assert small.grad is not None
        if change == "noise":
            values = torch.Generator().manual_seed(rank)
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(torch.randn(parameter.shape, generator=values))
        elif change == "data":
            small.grad.data = torch.full(small.shape, float(rank))
        else:
            offloaded.clip_grad_norm_(1e-3 * (1 + rank))
            if change == "clipped before":
                small.grad.mul_(2)
        offloaded.step()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("noise", "what the program made of the gradient of "),
        ("data", "what the program made of the gradient of "),
        ("clipped", "what clipping multiplies gradients by is "),
        ("clipped before", "what the program made of the gradient of "),
    ],
)
def test_a_step_with_gradients_that_each_rank_changed_in_its_own_way_is_refused(
    change: str, named: str, tmp_path: Path
) -> None:
    told = run_ranks(changed_by_rank, tmp_path, 2, change=change)
    assert all(text.startswith(named) and "on rank 1" in text for text in told)


def cleared_by_rank(rank: int, folder: Path, *, way: str) -> str:
    """What a step says of gradients that ranks have cleared, or set, at different times."""
    model = seeded(gpt)
    large = max(model.parameters(), key=torch.Tensor.numel)
    with infinity.offload(
        model, folder, host_memory="1GiB", process_group=world(), optimizer=infinity.AdamW()
    ) as offloaded:
        for number in range(2):
            loss_of(model, rank + 2 * number).backward()
            for parameter in model.parameters():
                offloaded.gradient(parameter)  # none is on its way any more
            if way == "fill_" and rank == number:
                assert large.grad is not None
                large.grad.fill_(1)
            elif way == "None" and rank == 1 and number == 0:
                large.grad = None
            elif way == "zero_grad" and rank == 1 and number == 0:
                offloaded.optimizer.zero_grad()
        with pytest.raises(infinity.RankDifferenceError) as refused:
            offloaded.step()
        offloaded.optimizer.zero_grad()
        loss_of(model, rank).backward()
        offloaded.step()
    return str(refused.value)


@pytest.mark.parametrize("way", ["None", "zero_grad", "fill_"])
def test_a_step_with_gradients_that_ranks_cleared_at_different_times_is_refused(
    way: str, tmp_path: Path
) -> None:
    """Slices of a gradient had passes that others had not, and small weights differed, unsaid."""
    told = run_ranks(cleared_by_rank, tmp_path, 2, way=way)
    assert all(text.startswith("how many gradients ") and "on rank 1" in text for text in told)


def set_behind_a_pass(rank: int, folder: Path) -> dict[str, list[str]]:
    """By the way in which a program has set the gradients, to zero or to one: weights that the step
    after that changes otherwise.
    """
    ways: dict[str, Callable[[nn.Module, infinity.OffloadedModel], object]] = {
        "optimizer": lambda _, offloaded: offloaded.optimizer.zero_grad(set_to_none=False),
        "model": lambda model, _: model.zero_grad(set_to_none=False),
        "zero_": lambda model, _: [
            p.grad.zero_() for p in model.parameters() if p.grad is not None
        ],
        "fill_": lambda model, _: [
            p.grad.fill_(1) for p in model.parameters() if p.grad is not None
        ],
    }
    changed = {}
    for name, clear in ways.items():
        model = seeded(gpt)
        before = {key: value.clone() for key, value in model.state_dict().items()}
        with infinity.offload(
            model, folder, process_group=world(), optimizer=partial(torch.optim.SGD, lr=0.5)
        ) as offloaded:
            loss_of(model, rank).backward()
            clear(model, offloaded)
            offloaded.step()
        less = 0.5 if name == "fill_" else 0.0
        after = model.state_dict()
        changed[name] = [key for key in after if not torch.equal(after[key], before[key] - less)]
    return changed


def test_a_gradient_that_is_set_behind_a_pass_has_nothing_of_that(tmp_path: Path) -> None:
    """What ranks were still to pass on was added to it, without a word."""
    for changed in run_ranks(set_behind_a_pass, tmp_path, 2):
        assert changed == {name: [] for name in ("optimizer", "model", "zero_", "fill_")}


def cleared_by_a_child(rank: int, folder: Path) -> list[int]:
    """How a forked child ended that clears a gradient, and all."""
    model = seeded(gpt)
    with infinity.offload(model, folder, process_group=world()) as offloaded:
        offloaded.backward(loss_of(model, rank))
        weight = next(model.parameters())
        ends = []
        for clear in (partial(setattr, weight, "grad", None), offloaded.optimizer.zero_grad):
            if (child := os.fork()) == 0:
                signal.alarm(20)  # it would wait for the child of no other rank
                try:
                    clear()
                except RuntimeError as refused:
                    os._exit(0 if "cannot be used in process" in str(refused) else 2)
                finally:
                    os._exit(1)
            ends.append(os.waitpid(child, 0)[1])
        offloaded.step()
    return ends


def test_a_forked_child_of_a_rank_clears_no_gradients(tmp_path: Path) -> None:
    assert run_ranks(cleared_by_a_child, tmp_path, 2) == [[0, 0], [0, 0]]


def missing_on_one(rank: int, folder: Path) -> dict[str, Any]:
    """What steps say, asked for again, where rank 1 has one small gradient less; and the weights
    that a step leaves as they were when rank 0 has cleared that gradient, too.
    """
    model = seeded(gpt)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    small = next(p for p in model.parameters() if p.dim() == 1)
    told = []
    with infinity.offload(
        model, folder, host_memory="1GiB", process_group=world(), optimizer=infinity.AdamW()
    ) as offloaded:
        loss_of(model, rank).backward()
        if rank == 1:
            small.grad = None
        for _ in range(2):
            with pytest.raises(infinity.RankDifferenceError) as refused:
                offloaded.step()
            told.append(str(refused.value))
        small.grad = None
        offloaded.step()
    after = model.state_dict()
    return {"told": told, "left": [key for key in after if torch.equal(after[key], before[key])]}


def test_a_step_that_is_refused_for_small_gradients_is_refused_again(tmp_path: Path) -> None:
    """The second one was taken without any of them, and nobody was told."""
    name = "blocks.0.attention_norm.weight"
    for found in run_ranks(missing_on_one, tmp_path, 2):
        first, second = found["told"]
        assert first == second
        assert first.startswith(f"{name} has a gradient on rank 0 and none on rank 1")
        assert found["left"] == [name]


def clipped_by_rank(rank: int, folder: Path, *, way: str) -> list[str]:
    """What clipping says, and the step behind it, of gradients that rank 1 alone has cleared."""
    model = seeded(gpt)
    large = [p for p in model.parameters() if p.dim() > 1]
    with infinity.offload(
        model, folder, host_memory="1GiB", process_group=world(), optimizer=infinity.AdamW()
    ) as offloaded:
        loss_of(model, rank).backward()
        offloaded.gradient(large[0])  # none is on its way any more
        if rank == 1:
            for parameter in {"one": large[:1], "large": large, "all": model.parameters()}[way]:
                parameter.grad = None
        told = [complaint(lambda: offloaded.clip_grad_norm_(1.0)), complaint(offloaded.step)]
        offloaded.optimizer.zero_grad()
        loss_of(model, rank).backward()
        offloaded.clip_grad_norm_(1.0)
        offloaded.step()
    return told


@pytest.mark.parametrize("way", ["one", "large", "all"])
def test_clipping_of_gradients_that_one_rank_has_cleared_is_refused(
    way: str, tmp_path: Path
) -> None:
    """What ranks sent one another had other sizes, and gloo ended the process."""
    name = next(name for name, p in gpt().named_parameters() if p.dim() > 1)
    for told in run_ranks(clipped_by_rank, tmp_path, 2, way=way):
        assert len(set(told)) == 1
        assert told[0].startswith(f"RankDifferenceError: whether {name} has a gradient is True on")


def grouped_by_rank(rank: int, folder: Path) -> str:
    """What a step says of groups that have the parameters of one another on rank 1."""
    model = seeded(gpt)

    def grouped(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        first, *others = parameters
        groups = [[first], others] if rank == 0 else [others, [first]]
        return torch.optim.SGD(
            [{"params": groups[0], "lr": 0.5}, {"params": groups[1], "lr": 0.1}], lr=0.1
        )

    with infinity.offload(model, folder, process_group=world(), optimizer=grouped) as offloaded:
        loss_of(model, rank).backward()
        return complaint(offloaded.step)


def test_a_step_with_groups_of_other_parameters_on_a_rank_is_refused(tmp_path: Path) -> None:
    """Ranks updated their parts with other learning rates, and nobody was told."""
    name = next(name for name, _ in gpt().named_parameters())
    told = f"RankDifferenceError: which parameter groups {name} is in is [0] on rank 0 and [1] on"
    assert all(text.startswith(told) for text in run_ranks(grouped_by_rank, tmp_path, 2))


def options_by_rank(rank: int, folder: Path) -> list[str]:
    """What a step says of groups with a rate that differs behind the digits that tensors show, and
    of those with an object that lies elsewhere in memory on rank 1.
    """
    model = seeded(gpt)
    marks = [object() for _ in range(2)]
    told = []
    with infinity.offload(
        model, folder, process_group=world(), optimizer=infinity.AdamW()
    ) as offloaded:
        (group,) = offloaded.optimizer.param_groups
        loss_of(model, rank).backward()
        group["lr"] = torch.tensor(1e-2 + rank * 1e-6)
        told.append(complaint(offloaded.step))
        group |= {"lr": torch.tensor(1e-2), "mark": [marks[rank]], "names": {"a", "b"}}
        told.append(complaint(offloaded.step))
    return told


def test_options_are_compared_by_all_their_digits_and_not_by_their_addresses(
    tmp_path: Path,
) -> None:
    """Ranks updated small parameters with other rates, and nobody was told."""
    for rate, mark in run_ranks(options_by_rank, tmp_path, 2):
        assert rate.startswith("RankDifferenceError: lr of parameter group 0 is tensor(0.0099999")
        assert mark == ""


def trained_without_elements(rank: int, folder: Path) -> list[list[float]]:
    """The norms that clipping by torch and a step find beside a parameter without elements, and
    its shape afterwards.
    """
    model = seeded(gpt)
    none = nn.Parameter(torch.zeros(0, 3))
    model.register_parameter("none", none)
    with infinity.offload(model, folder, process_group=world()) as offloaded:
        (loss_of(model, 0) + none.sum()).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()
        offloaded.step()
    return [[norm], [*none.shape]]


def test_parameters_without_elements_are_trained_over_ranks(tmp_path: Path) -> None:
    """The norm of a step was a ValueError of torch.cat, and the block took the values along."""
    (tmp_path / "one").mkdir()
    alone = trained_without_elements(0, tmp_path / "one")
    assert run_ranks(trained_without_elements, tmp_path / "two", 2) == [alone, alone]


def trained_without_elements_alone(rank: int, folder: Path) -> list[int]:
    """The shape, after a step, of a parameter without elements that is all that is small."""
    model = nn.Linear(200, 200, bias=False)
    nn.init.ones_(model.weight)
    none = nn.Parameter(torch.zeros(0, 3))
    model.register_parameter("none", none)
    with infinity.offload(model, folder, process_group=world()) as offloaded:
        (model(torch.ones(1, 200)).mean() + none.sum()).backward()
        offloaded.step()
    return [*none.shape]


def test_parameters_without_elements_are_trained_beside_large_ones_alone(tmp_path: Path) -> None:
    assert run_ranks(trained_without_elements_alone, tmp_path, 2) == [[0, 3]] * 2
