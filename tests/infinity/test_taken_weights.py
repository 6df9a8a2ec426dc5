"""What a program takes of a parameter between passes is a copy, under every budget."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import infinity
from tests.support.models import Stack, seeded, vector_loss, vectors
from tests.support.training import same_bits, values_of

TAKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "detach": lambda p: p.detach(),
    "data": lambda p: p.data,
    "row": lambda p: p.detach()[3],
    "flat": lambda p: p.detach().view(-1),
    "array": lambda p: torch.from_numpy(p.detach().numpy()),
    "chunk": lambda p: torch.no_grad()(torch.chunk)(p, 2)[1],
    "transposed": lambda p: torch.no_grad()(torch.t)(p),
    "complex": lambda p: torch.view_as_complex(p.detach().view(256, 128, 2)).conj(),
    "inference": lambda p: torch.inference_mode()(torch.narrow)(p, 0, 1, 2),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_was_taken_between_passes_does_not_follow_steps(
    name: str, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    take = TAKEN[name]
    expected = take(seeded(Stack).layer(2).weight)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        taken = take(model.layer(2).weight)
        for step in range(2):
            vector_loss(model, step).backward()
            offloaded.step()
            assert torch.equal(taken, expected)
        assert not torch.equal(take(model.layer(2).weight), expected)


@pytest.mark.parametrize("name", [name for name in TAKEN if name != "array"])
def test_changing_what_was_taken_is_an_error_and_changes_no_weight(
    name: str, host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    before = values_of(model)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        TAKEN[name](model.layer(2).weight).mul_(2)
        with pytest.raises(RuntimeError, match=r"^layers\.2\.weight was changed in place"):
            offloaded.step()
    assert all(same_bits(value, before[key]) for key, value in values_of(model).items())


def test_all_weights_may_be_taken_at_once(host_memory: int, nvme: Path) -> None:
    """They are the program's memory then, not the budget's."""
    model = seeded(Stack)
    expected = values_of(model)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        taken = {name: parameter.detach() for name, parameter in model.named_parameters()}
        vector_loss(model, 0).backward()
        offloaded.step()
    assert all(same_bits(value, expected[name]) for name, value in taken.items())


def _averaged(model: nn.Module) -> AveragedModel:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))


def test_an_average_of_the_weights_is_that_of_plain_pytorch(host_memory: int, nvme: Path) -> None:
    model = seeded(Stack)
    averaged, expected = _averaged(model), _averaged(model)
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        for step in range(3):
            vector_loss(model, step).backward()
            offloaded.step()
            averaged.update_parameters(model)
            with offloaded.gathered():
                expected.update_parameters(copy.copy(nn.ParameterList(model.parameters())))
        outputs = averaged(vectors(0)).detach()
    assert same_bits(outputs, expected(vectors(0)).detach())


def _swap(model: nn.Module, others: AveragedModel) -> None:
    with torch.no_grad():
        for ours, theirs in zip(model.parameters(), others.parameters(), strict=True):
            kept = ours.detach().clone()
            ours.copy_(theirs)
            theirs.copy_(kept)


def test_average_weights_swapped_in_past_the_library_are_not_evaluated(
    host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    averaged = _averaged(seeded(Stack))
    with infinity.offload(model, nvme, optimizer=None, host_memory=host_memory):
        _swap(model, averaged)
        with pytest.raises(RuntimeError, match=r"^layers\.0\.weight \(and 25 more\) was changed"):
            model(vectors(0))


def test_average_weights_swapped_in_while_gathered_are_evaluated(
    host_memory: int, nvme: Path
) -> None:
    model = seeded(Stack)
    averaged = _averaged(seeded(lambda: Stack(), seed=7))
    expected, own = averaged(vectors(0)).detach(), model(vectors(0)).detach()
    with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
        with offloaded.gathered():
            _swap(model, averaged)
            assert same_bits(model(vectors(0)).detach(), expected)
        assert same_bits(model(vectors(0)).detach(), own)
        vector_loss(model, 0).backward()
        offloaded.step()
