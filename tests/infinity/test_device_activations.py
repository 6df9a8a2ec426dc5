"""Saved tensors of a device, simulated: copied down behind what was computed, and up ahead of the
backward pass that asks for them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.activations.copies import DeviceCopies
from infinity.activations.host import HostActivations
from infinity.activations.offloading import Activations
from infinity.activations.tiers import NvmeActivations
from swap.timeline import Timeline
from tests.support.activations import CPU, KIB, MIB, Hooks, chain, gradient_of, large
from tests.support.memory import folder_in_memory
from tests.support.proof import matrix
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_device.injected import Make, simulated

tmp_path = folder_in_memory()
MOMENTS: dict[str, Make] = {
    "latest": SimulatedDevice,
    "earliest": lambda: SimulatedDevice(eager=True),
    **{f"seed {seed}": partial(SimulatedDevice, seed) for seed in range(6)},
}
LINK = 512 * KIB
BUDGETS = {"none": 4 * KIB, "some": 5 * LINK, "all": 32 * MIB}


@pytest.fixture(params=matrix(MOMENTS, usual=["latest", "seed 1"]))
def device(request: pytest.FixtureRequest) -> Iterator[SimulatedDevice]:
    made = MOMENTS[request.param]()
    yield made
    made.check()


def _made(mode: str, nbytes: int, device: SimulatedDevice, folder: Path) -> Activations:
    if mode == "host":
        return HostActivations(CPU, nbytes, device)
    return NvmeActivations(CPU, nbytes, [os.fspath(folder)], Timeline(), device)


@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_gradients_are_those_of_saved_tensors_that_stay(
    tmp_path: Path, device: SimulatedDevice, mode: str, budget: str
) -> None:
    expected = [gradient_of(partial(chain, length=20), large(seed)) for seed in range(3)]
    activations = _made(mode, BUDGETS[budget], device, tmp_path)
    with Hooks(activations):
        for seed in range(3):
            found = gradient_of(partial(chain, length=20), large(seed))
            assert torch.equal(found, expected[seed])
    activations.close()
    activations.close()


@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_graphs_that_are_dropped_or_asked_in_another_order_leave_nothing_unordered(
    tmp_path: Path, device: SimulatedDevice, mode: str
) -> None:
    inputs = [large(seed) for seed in range(4)]
    expected = [gradient_of(partial(chain, length=6), x) for x in inputs]
    activations = _made(mode, 12 * LINK, device, tmp_path)
    with Hooks(activations):
        losses: list[Any] = [chain(x, 6).sum() for x in inputs]
        for which in (1, 3, 0):
            (found,) = torch.autograd.grad(losses[which], inputs[which], retain_graph=which == 1)
            assert torch.equal(found, expected[which])
            if which == 3:
                losses[2] = None
        (again,) = torch.autograd.grad(losses[1], inputs[1])
        assert torch.equal(again, expected[1])
    del losses
    activations.close()


def test_saving_waits_for_no_copy_and_lets_memory_of_the_device_go_when_it_is_over(
    tmp_path: Path,
) -> None:
    device = SimulatedDevice()
    activations = HostActivations(CPU, 32 * MIB, device)
    with Hooks(activations):
        loss = chain(large(0), 8).sum()
    copies = activations._copies
    assert copies is not None
    assert len(copies._down) == 8  # none is over, and both ends of each are there
    for copy in [*copies._down]:
        copy.over.wait()
    copies._let_go()
    assert not copies._down
    loss.backward()
    activations.close()
    device.check()


@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_copies_up_are_begun_before_they_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    device = SimulatedDevice(eager=True)
    were_ahead: list[bool] = []
    on_device = DeviceCopies.on_device

    def noted(copies: DeviceCopies, storage: Any) -> torch.Tensor:
        were_ahead.append(storage.ahead is not None)
        return on_device(copies, storage)

    monkeypatch.setattr(DeviceCopies, "on_device", noted)
    activations = _made(mode, 32 * MIB, device, tmp_path)
    with Hooks(activations):
        gradient_of(partial(chain, length=20), large(0))
    assert were_ahead.count(False) == 1
    assert were_ahead.count(True) >= 19
    activations.close()
    device.check()


def test_storage_that_several_tensors_lie_in_is_copied_once_each_way(tmp_path: Path) -> None:
    device = SimulatedDevice(eager=True)

    def function(x: torch.Tensor) -> torch.Tensor:
        y = torch.sigmoid(x).view(3, -1)
        return torch.stack([torch.tanh(part).sum() for part in y]).sum()

    x = large(0, 3 * LINK)
    expected = gradient_of(function, x)
    activations = HostActivations(CPU, 32 * MIB, device)
    with Hooks(activations):
        found = gradient_of(function, x)
    assert torch.equal(found, expected)
    assert device.num_copies <= 2 * 4
    activations.close()
    device.check()


def _trained(folder: Path, **options: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Sigmoid())]
    model = nn.Sequential(*layers)
    with infinity.offload(model, folder, host_memory="64MiB", **options) as offloaded:
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(2048, 64, generator=generator)  # 512 KiB for each that is saved
            model(batch).square().mean().backward()
            offloaded.step()
        taken = offloaded.report().activation_bytes["in host, peak"]
        assert (taken > 0) == (options.get("activations", "keep") != "keep")
    return [parameter.detach() for parameter in model.parameters()]


@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_training_has_the_same_bits_wherever_saved_tensors_of_a_device_are(
    tmp_path: Path, mode: str
) -> None:
    expected = _trained(tmp_path)
    with simulated():
        found = _trained(tmp_path, activations=mode, device_memory=3 * MIB)
    assert all(map(torch.equal, found, expected))
