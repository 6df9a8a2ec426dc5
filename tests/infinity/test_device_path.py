"""Training on a device with memory of its own, simulated: the bits of training in host memory, and
everything that streams and the host do is ordered.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Gpt, seeded, token_loss
from tests.support.proof import matrix
from tests.support.simulated_device import SimulatedDevice
from tests.support.simulated_device.injected import Make, simulated
from tests.support.training import (
    WHOLE,
    Outcome,
    assert_same_runs,
    budgets,
    least_budget,
    same_bits,
    train,
    values_of,
)

pytestmark = pytest.mark.usefixtures("one_thread")
_DEVICE_BYTES = 3 << 20
MOMENTS: dict[str, Make] = {
    "latest": SimulatedDevice,
    "earliest": lambda: SimulatedDevice(eager=True),
    **{f"seed {seed}": partial(SimulatedDevice, seed) for seed in range(2)},
}


@dataclass(frozen=True)
class Case:
    """A way to train."""

    name: str
    make: Callable[[], nn.Module] = Gpt
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1


def _frozen() -> nn.Module:
    model = Gpt()
    for parameter in [*model.blocks[0].parameters(), *model.blocks[2].parameters()]:
        parameter.requires_grad_(False)
    return model


BF16, FP16 = {"compute_dtype": torch.bfloat16}, {"compute_dtype": torch.float16}
CASES = [
    Case("bf16, clipped", options=BF16 | {"max_grad_norm": 0.3}),
    Case("fp32", options={"compute_dtype": torch.float32}),
    Case("fp16, loss scale", options=FP16 | {"max_grad_norm": 0.3}),
    Case("accumulated", options=BF16, accumulate=3),
    Case("checkpointed", partial(Gpt, recompute="non-reentrant"), BF16),
    Case("checkpointed, reentrant", partial(Gpt, recompute="reentrant"), BF16),
    Case("frozen", _frozen, BF16),
    Case("untied, dropout", partial(Gpt, tied=False, dropout=0.1), BF16),
    Case("no overlap", options=BF16 | {"overlap": False}),
    Case("verified", options=BF16 | {"verify_swap": True}),
]
USUAL = [(CASES[4], "seed 1")]


def _id(value: Any) -> str:
    return value.name if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(
    ("case", "moment"), matrix([*product(CASES, MOMENTS)], usual=USUAL), ids=_id
)
def test_training_on_a_separate_device_has_the_same_bits(
    case: Case, moment: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"steps": 6, "accumulate": case.accumulate, **case.options}
    runs: dict[str, Outcome] = {
        "in memory": train(case.make, token_loss, tmp_path, host_memory=WHOLE, **options)
    }
    with simulated(MOMENTS[moment]) as devices:
        given = case.options | {"device_memory": _DEVICE_BYTES}
        for name, host_memory in budgets(case.make, tmp_path, **given).items():
            runs[name] = train(
                case.make,
                token_loss,
                tmp_path,
                host_memory=host_memory,
                device_memory=_DEVICE_BYTES,
                **options,
            )
        assert devices[-1].num_copies > 0
    assert runs["least"].read_bytes > 0
    assert_same_runs(runs)


def test_device_budget_holds_while_weights_pass_through(tmp_path: Path) -> None:
    model = Gpt()
    with (
        simulated(),
        infinity.offload(
            model, tmp_path, host_memory=WHOLE, device_memory=_DEVICE_BYTES
        ) as offloaded,
    ):
        for step in range(3):
            token_loss(model, step).backward()
            offloaded.step()
        arena = offloaded._training.state.arena
        assert arena is not None
        assert 0 < arena.peak_bytes <= arena.nbytes <= _DEVICE_BYTES


def _program(model: nn.Module, folder: Path, **options: Any) -> list[torch.Tensor]:
    """What else a program does beside steps, and what it sees."""
    seen: list[torch.Tensor] = []

    def step(number: int) -> None:
        token_loss(model, number).backward()
        offloaded.step()

    with infinity.offload(model, folder / "nvme", **options) as offloaded:
        for number in range(3):
            step(number)
        model.eval()
        with torch.no_grad():
            seen += [token_loss(model, 9), token_loss(model, 10)]
        model.train()
        step(3)
        with pytest.raises(RuntimeError, match="of the program"):
            _fail_in_forward(model)
        step(4)
        with offloaded.gathered(modify=True), torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
        step(5)
        offloaded.save(folder / "saved")
        offloaded.snapshot("here")
        step(6)
        seen += values_in(offloaded, model)
        offloaded.restore("here")
        step(6)
        seen += values_in(offloaded, model)
        offloaded.load(folder / "saved")
        step(6)
        seen += values_in(offloaded, model)
    return [*seen, *values_of(model).values()]


def values_in(offloaded: infinity.OffloadedModel, model: nn.Module) -> list[torch.Tensor]:
    with offloaded.gathered():
        return [value.detach().clone() for value in model.parameters()]


def _fail_in_forward(model: nn.Module) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("of the program")

    handle = model.get_submodule("blocks.2").register_forward_hook(fail)
    try:
        token_loss(model, 0)
    finally:
        handle.remove()


@pytest.mark.parametrize(
    ("dtype", "moment"),
    matrix(
        [*product((torch.bfloat16, torch.float32), MOMENTS)],
        usual=[(torch.float32, "seed 1")],
    ),
)
def test_programs_on_a_separate_device_see_the_same_bits(
    dtype: torch.dtype, moment: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"compute_dtype": dtype}
    outcomes = []
    for kind in ("memory", "whole", "least"):
        folder = tmp_path / kind
        (folder / "nvme").mkdir(parents=True)
        torch.manual_seed(7)
        if kind == "memory":
            outcomes.append(_program(seeded(Gpt), folder, host_memory=WHOLE, **options))
            continue
        with simulated(MOMENTS[moment]):
            given = options | {"device_memory": _DEVICE_BYTES}
            least = least_budget(Gpt, folder / "nvme", **given)
            given["host_memory"] = WHOLE if kind == "whole" else least
            outcomes.append(_program(seeded(Gpt), folder, **given))
    for other in outcomes[1:]:
        assert all(same_bits(a, b) for a, b in zip(outcomes[0], other, strict=True))
