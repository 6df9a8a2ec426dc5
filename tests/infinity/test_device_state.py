"""Training whose state is at home on a device, simulated: the bits of training in host memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

import infinity
from tests.support.models import Gpt, seeded, token_loss
from tests.support.proof import by_turns, matrix
from tests.support.simulated_device.injected import simulated
from tests.support.training import WHOLE, assert_same_runs, same_bits, train, values_of

MIB = 1 << 20
MEMORY: dict[str, dict[str, Any]] = {
    "all of it": {"host_memory": WHOLE, "device_memory": 64 * MIB},
    "some, some on NVMe": {"host_memory": 14 * MIB, "device_memory": 30 * MIB},
}


@pytest.mark.parametrize(
    ("memory", "state_dtype"), by_turns(MEMORY.values(), [torch.uint8, torch.float32])
)
def test_training_with_state_on_the_device_has_the_same_bits(
    memory: dict[str, Any], state_dtype: torch.dtype, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "steps": 3,
        "compute_dtype": torch.bfloat16,
        "max_grad_norm": 0.3,
        "optimizer": infinity.AdamW(state_dtype=state_dtype),
    }
    runs = {"in memory": train(Gpt, token_loss, tmp_path, host_memory=WHOLE, **options)}
    with simulated():
        runs["on the device"] = train(Gpt, token_loss, tmp_path, **memory, **options)
    assert_same_runs(runs)


def _step(offloaded: infinity.OffloadedModel, number: int) -> None:
    token_loss(offloaded.model, number).backward()
    offloaded.step()


def _program(folder: Path, **memory: Any) -> list[torch.Tensor]:
    """What a program does beside steps, and what it sees."""
    seen: list[torch.Tensor] = []
    model = seeded(Gpt)
    with infinity.offload(
        model, folder / "nvme", compute_dtype=torch.bfloat16, **memory
    ) as offloaded:
        _step(offloaded, 0)
        token_loss(model, 1).backward()
        token_loss(model, 2).backward()  # accumulates
        weight = next(p for p in model.parameters() if p.dim() == 2)
        gradient = offloaded.gradient(weight)
        assert gradient is not None
        seen.append(gradient.clone())
        offloaded.clip_grad_norm_(0.1)
        offloaded.step()
        offloaded.save(folder / "saved")
        offloaded.snapshot("before")
        _step(offloaded, 3)
        with offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        _step(offloaded, 4)
        with offloaded.gathered():
            seen += [parameter.detach().clone() for parameter in model.parameters()]
        offloaded.restore("before")
        _step(offloaded, 3)
        seen.append(offloaded.grad_norm)
        pending = offloaded.snapshot("behind", block=False)
        _step(offloaded, 5)
        pending.result()
        offloaded.load(folder / "saved")
        _step(offloaded, 6)
        seen.append(offloaded.grad_norm)
        offloaded.restore("behind")
        offloaded.export(folder / "exported")
        _step(offloaded, 7)
    return [*seen, *values_of(model).values()]


@pytest.mark.parametrize("name", matrix(MEMORY, usual=["some, some on NVMe"]))
def test_program_over_state_on_the_device_sees_what_it_sees_in_memory(
    name: str, tmp_path: Path
) -> None:
    folders = [tmp_path / name for name in ("memory", "device")]
    for folder in folders:
        (folder / "nvme").mkdir(parents=True)
    expected = _program(folders[0], host_memory=WHOLE)
    with simulated():
        found = _program(folders[1], **MEMORY[name])
    assert len(found) == len(expected)
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert same_bits(one, other), number


@pytest.mark.parametrize("memory", MEMORY.values(), ids=MEMORY)
def test_plan_and_report_say_what_is_at_home_on_the_device(
    memory: dict[str, Any], tmp_path: Path
) -> None:
    options = memory | {"compute_dtype": torch.bfloat16}
    with simulated():
        plan = infinity.plan(Gpt(), device="cpu", **options)
        with infinity.offload(Gpt(), tmp_path, **options) as offloaded:
            report = offloaded.report()
            placement = offloaded._training.state.placement
    at_home = placement.state_device_bytes + placement.gradient_device_bytes
    assert plan.bytes_by_tier["device"] == at_home > 0
    planned = report.planned_bytes
    assert planned["state on the device"] + planned["gradients on the device"] == at_home
    assert at_home <= report.resident_bytes["device"] <= memory["device_memory"]
    assert report.peak_host_bytes <= memory["host_memory"]


def test_optimizer_of_torch_keeps_its_state_off_the_device(tmp_path: Path) -> None:
    with (
        simulated(),
        infinity.offload(
            Gpt(), tmp_path, optimizer=torch.optim.SGD, **MEMORY["all of it"]
        ) as offloaded,
    ):
        assert offloaded.report().planned_bytes["state on the device"] == 0
        _step(offloaded, 0)
