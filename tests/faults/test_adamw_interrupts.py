"""Ctrl-C anywhere in the calls of an OffloadedAdamW: what it goes on with is of whole steps."""

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import checkpoint
from aio import AioError
from infinity import OffloadedAdamW
from infinity.optim.adamw import AdamRule
from swap.update.staging import Staging
from tests.support.interrupts import Lines, interrupt, sampled
from tests.support.keyboard import keyboard_of

NUM_SAMPLES = 15
SIZES = (300_000, 70_001, 5)


def make_parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    for number, parameter in enumerate(parameters):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


def optimizer_of(
    parameters: list[nn.Parameter], nvme: Path, memory: str = "64MiB"
) -> OffloadedAdamW:
    return OffloadedAdamW(parameters, lr=1e-2, nvme=nvme, host_memory=memory)


def outcome(parameters: list[nn.Parameter], optimizer: OffloadedAdamW) -> list[torch.Tensor]:
    """Weights and all state, in order, on their own."""
    state = optimizer.state_dict()["state"]
    tensors = [tensor for entry in state.values() for tensor in entry.values()]
    return [tensor.detach().clone() for tensor in (*parameters, *tensors)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


def after(steps: int, dtype: torch.dtype, nvme: Path) -> list[torch.Tensor]:
    parameters = make_parameters(dtype)
    with optimizer_of(parameters, nvme) as optimizer:
        for step in range(steps):
            give_gradients(parameters, step)
            optimizer.step()
        return outcome(parameters, optimizer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_interrupted_step_is_taken_whole_or_not_at_all(dtype: torch.dtype, tmp_path: Path) -> None:
    whole = [after(steps, dtype, tmp_path) for steps in (1, 2)]

    def run(number: int | None) -> tuple[Lines, list[torch.Tensor]]:
        parameters = make_parameters(dtype)
        with optimizer_of(parameters, tmp_path) as optimizer:
            give_gradients(parameters, 0)
            optimizer.step()
            give_gradients(parameters, 1)
            lines = interrupt(optimizer.step, number)
            return lines, outcome(parameters, optimizer)

    for number in sampled(run(None)[0].seen, NUM_SAMPLES):
        lines, found = run(number)
        assert any(same(found, expected) for expected in whole), lines.line


def test_signal_during_a_kernel_is_raised_when_the_step_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = after(2, torch.float16, tmp_path)
    parameters = make_parameters(torch.float16)
    with optimizer_of(parameters, tmp_path) as optimizer:
        give_gradients(parameters, 0)
        optimizer.step()
        give_gradients(parameters, 1)
        apply = AdamRule.apply

        def interrupted(*arguments: Any) -> None:
            apply(*arguments)
            monkeypatch.setattr(AdamRule, "apply", apply)
            os.kill(os.getpid(), signal.SIGINT)

        monkeypatch.setattr(AdamRule, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        assert optimizer.report().steps == 2
        assert same(outcome(parameters, optimizer), expected)


@pytest.mark.timeout(60)
def test_step_that_is_interrupted_twice_has_ended_when_that_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = make_parameters(torch.float16)
    was_raised = threading.Event()
    apply = AdamRule.apply

    def interrupted(*arguments: Any) -> None:
        monkeypatch.setattr(AdamRule, "apply", apply)
        keyboard.press()
        keyboard.press()
        was_raised.wait(0.2)  # in vain, unless the interrupt is raised before the end
        apply(*arguments)

    with optimizer_of(parameters, tmp_path) as optimizer, keyboard_of(signal.SIGINT) as keyboard:
        give_gradients(parameters, 0)
        monkeypatch.setattr(AdamRule, "apply", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
        at_the_interrupt = [parameter.detach().clone() for parameter in parameters]
        was_raised.set()
        optimizer.flush()
        assert same(at_the_interrupt, [parameter.detach() for parameter in parameters])
        assert optimizer.report().steps == 1


def test_save_of_another_thread_that_begins_within_a_step_is_told_of_the_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = make_parameters(torch.float16)
    seen: list[int] = []
    apply = AdamRule.apply

    def looked_at(*arguments: Any) -> None:
        seen.append(parameters[0]._version)
        apply(*arguments)

    with optimizer_of(parameters, tmp_path) as optimizer:
        give_gradients(parameters, 0)
        monkeypatch.setattr(AdamRule, "apply", looked_at)
        optimizer.step()
    assert parameters[0]._version > max(seen)


def test_interrupted_add_param_group_leaves_tables_that_agree(tmp_path: Path) -> None:
    expected = after(3, torch.float32, tmp_path)

    def run(number: int | None) -> tuple[Lines, list[torch.Tensor]]:
        parameters = make_parameters()
        with optimizer_of(parameters[:1], tmp_path) as optimizer:

            def add() -> None:
                optimizer.add_param_group({"params": parameters[2:]})

            lines = interrupt(add, number)
            if len(optimizer.param_groups) == 1:
                add()
            optimizer.add_param_group({"params": parameters[1:2]})
            for step in range(3):
                give_gradients(parameters, step)
                optimizer.step()
            return lines, outcome([*parameters], optimizer)[: len(SIZES)]

    for number in sampled(run(None)[0].seen, NUM_SAMPLES):
        lines, found = run(number)
        assert same(found, expected[: len(SIZES)]), lines.line


def test_interrupted_load_state_dict_is_whole_or_refuses_to_go_on(tmp_path: Path) -> None:
    whole = [after(steps, torch.float32, tmp_path) for steps in (1, 2)]
    parameters = make_parameters()
    states = []
    with optimizer_of(parameters, tmp_path) as optimizer:
        for step in range(2):
            give_gradients(parameters, step)
            optimizer.step()
            states.append(optimizer.state_dict())
        total = interrupt(lambda: optimizer.load_state_dict(states[0]), None).seen
        for number in sampled(total, NUM_SAMPLES):
            optimizer.load_state_dict(states[1])
            line = interrupt(lambda: optimizer.load_state_dict(states[0]), number).line
            try:
                found = outcome(parameters, optimizer)
            except RuntimeError as refusal:
                assert "load again" in str(refusal)  # noqa: PT017
                continue
            ours = found[len(SIZES) :]
            assert any(same(ours, expected[len(SIZES) :]) for expected in whole), line


# Steps that an error stops.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_memory_in_the_midst_of_a_parameter_is_finished_by_flush_exactly(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = after(2, dtype, tmp_path)
    parameters = make_parameters(dtype)
    with optimizer_of(parameters, tmp_path) as optimizer:
        give_gradients(parameters, 0)
        optimizer.step()
        give_gradients(parameters, 1)
        gradient = parameters[0].grad
        assert gradient is not None
        parameters[0].grad = torch.stack([gradient, gradient], 1)[:, 0]  # is taken in pieces
        apply, calls = AdamRule.apply, 0

        def fails_once(*arguments: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise MemoryError
            apply(*arguments)

        monkeypatch.setattr(AdamRule, "apply", fails_once)
        with pytest.raises(MemoryError):
            optimizer.step()
        assert same(outcome(parameters, optimizer), expected)


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[OffloadedAdamW], None]:
    """Takes a step that an error stops at a read."""

    def stop(optimizer: OffloadedAdamW) -> None:
        finish, calls = Staging.finish_read, 0

        def fails(staging: Staging[Any], staged: Any) -> None:
            nonlocal calls
            finish(staging, staged)
            calls += 1
            if calls == 2:
                raise AioError("cannot read", errno=5)

        monkeypatch.setattr(Staging, "finish_read", fails)
        with pytest.raises(AioError):
            optimizer.step()
        monkeypatch.setattr(Staging, "finish_read", finish)

    return stop


def test_flush_of_a_stopped_step_waits_for_guarded_saves(
    tmp_path: Path, stopped: Callable[[OffloadedAdamW], None]
) -> None:
    parameters = [nn.Parameter(torch.randn(1_000_000)) for _ in range(3)]
    with optimizer_of(parameters, tmp_path, "20MiB") as optimizer:
        for step in range(2):
            give_gradients(parameters, step)
            if step == 0:
                optimizer.step()
        stopped(optimizer)
        then = [parameter.detach().clone() for parameter in parameters]
        pending = checkpoint.save_async({"w": list(parameters)}, tmp_path / "c", guard=optimizer)
        optimizer.flush()
        assert not same([p.detach() for p in parameters], then)
        pending.result()
        assert same(checkpoint.load(tmp_path / "c")["w"], then)


def test_flush_of_a_stopped_step_counts_as_a_change_of_weights(
    tmp_path: Path, stopped: Callable[[OffloadedAdamW], None]
) -> None:
    parameters = [nn.Parameter(torch.randn(1_000_000)) for _ in range(3)]
    with optimizer_of(parameters, tmp_path, "20MiB") as optimizer:
        give_gradients(parameters, 0)
        optimizer.step()
        give_gradients(parameters, 1)
        stopped(optimizer)
        losses = [parameter.square().sum() for parameter in parameters]
        optimizer.flush()
        refused = 0
        for loss in losses:
            try:
                loss.backward()
            except RuntimeError:
                refused += 1
        assert refused
