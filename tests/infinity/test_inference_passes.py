"""Passes of inference over a model are the cycles that its weights are prefetched along."""

from pathlib import Path

import torch
from torch import nn

import infinity
from swap.plan.schedule import LONGEST_CYCLE, Schedule
from tests.support.models import Gpt, Stack, seeded, tokens, vectors
from tests.support.training import least_budget


def test_a_pass_of_inference_is_prefetched_along_the_one_before(nvme: Path) -> None:
    least = least_budget(Gpt, nvme, optimizer=None)
    model = seeded(Gpt)
    with (
        infinity.offload(model, nvme, optimizer=None, host_memory=least) as offloaded,
        torch.no_grad(),
    ):
        weights = offloaded._training.state.weights
        model(tokens(0)[:, :-1])
        assert not weights.schedule.plan
        model(tokens(1)[:, :-1])
        plan = weights.schedule.plan
        assert plan
        hits, unexpected = weights.hits, weights.schedule.unexpected_uses
        for number in range(6):
            model(tokens(number)[:, :-1])
        assert weights.schedule.plan == plan
        assert weights.schedule.unexpected_uses == unexpected
        assert weights.hits > hits


def test_layers_that_are_called_one_by_one_are_a_pass(nvme: Path) -> None:
    least = least_budget(Stack, nvme, optimizer=None)
    model = seeded(Stack)
    with (
        infinity.offload(model, nvme, optimizer=None, host_memory=least) as offloaded,
        torch.no_grad(),
    ):
        for _ in range(4):
            x = vectors(0)
            for layer in model.layers:
                x = torch.tanh(layer(x))
        assert len(offloaded._training.state.weights.schedule.plan) >= len(model.layers)


def test_a_decoder_that_runs_often_after_an_encoder_is_a_pass(nvme: Path) -> None:
    encoder, decoder = Stack(depth=6), Stack(depth=6)

    def make() -> nn.ModuleList:
        return nn.ModuleList([encoder, decoder])

    least = least_budget(make, nvme, optimizer=None)
    with (
        infinity.offload(make(), nvme, optimizer=None, host_memory=least) as offloaded,
        torch.no_grad(),
    ):
        encoder(vectors(0))
        for _ in range(5):
            decoder(vectors(0))
        decoded = {
            record.index for record in offloaded._training.records if record.name.startswith("1.")
        }
        assert set(offloaded._training.state.weights.schedule.plan) == decoded


def test_a_cycle_without_end_is_not_recorded_without_end() -> None:
    schedule = Schedule()
    for use in range(LONGEST_CYCLE + 10):
        schedule.record(use % 2)
    assert len(schedule._recorded) == LONGEST_CYCLE
    schedule.end_cycle()
    assert not schedule.plan
    for _ in range(2):
        schedule.record(3)
        schedule.record(4)
        schedule.end_cycle()
    assert schedule.plan == (3, 4)


def test_state_trained_in_float32_is_loaded_for_inference_in_bfloat16(
    nvme: Path, tmp_path: Path
) -> None:
    model = torch.nn.Linear(16, 16)
    with infinity.offload(model, nvme, host_memory="64MiB") as offloaded:
        model(torch.ones(1, 16)).sum().backward()
        offloaded.step()
        offloaded.save(tmp_path / "run")
    expected = model.weight.bfloat16()
    again = torch.nn.Linear(16, 16)
    with infinity.offload(
        again, nvme, optimizer=None, compute_dtype=torch.bfloat16, host_memory="64MiB"
    ) as offloaded:
        offloaded.load(tmp_path / "run")
    assert torch.equal(again.weight.bfloat16(), expected)
