"""float16: gradients of `loss.backward()` and of `offloaded.backward(loss)`, alone and together."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.interrupts import interrupt
from tests.support.proof import matrix

pytestmark = pytest.mark.usefixtures("one_thread")

Backward = Callable[[torch.Tensor], None]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    data = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
    return model(data.half()).float().square().mean()


class Reference:
    """Plain PyTorch: float16 weights and gradients, a float32 master under fused AdamW."""

    def __init__(self) -> None:
        self.model = make_model().half()
        self._master = [nn.Parameter(p.detach().float()) for p in make_model().half().parameters()]
        self._optimizer = torch.optim.AdamW(self._master, lr=1e-2, fused=True)
        self.norms: list[float] = []

    def step(self) -> None:
        for master, weight in zip(self._master, self.model.parameters(), strict=True):
            assert weight.grad is not None
            master.grad = weight.grad.float()
        self.norms.append(torch.nn.utils.get_total_norm([m.grad for m in self._master]).item())  # type: ignore[misc]
        self._optimizer.step()
        with torch.no_grad():
            for master, weight in zip(self._master, self.model.parameters(), strict=True):
                weight.copy_(master)
                weight.grad = None

    def weights(self) -> list[torch.Tensor]:
        return [p.detach() for p in self.model.parameters()]


def offload(folder: Path, **options: Any) -> Any:
    return infinity.offload(
        make_model().half(),
        folder,
        optimizer=infinity.AdamW(lr=1e-2),
        compute_dtype=torch.float16,
        **options,
    )


def test_plain_backward_trains_with_the_bits_of_plain_pytorch(tmp_path: Path) -> None:
    expected = Reference()
    with offload(tmp_path) as offloaded:
        for step in range(6):
            loss_of(expected.model, step).backward()
            expected.step()
            loss_of(offloaded.model, step).backward()
            offloaded.step()
            assert offloaded.grad_norm.item() == pytest.approx(expected.norms[-1], rel=1e-3)
        with offloaded.gathered():
            assert all(map(torch.equal, offloaded.model.parameters(), expected.weights()))


def test_plain_backward_is_clipped_at_the_norm_that_was_asked_for(tmp_path: Path) -> None:
    with offload(tmp_path) as offloaded:
        loss_of(offloaded.model, 0).backward()
        norm = offloaded.clip_grad_norm_(1e-3).item()
        assert norm > 1e-2
        assert offloaded.clip_grad_norm_(1.0).item() == pytest.approx(1e-3, rel=1e-2)


def test_scaled_backward_has_the_norm_of_plain_backward(tmp_path: Path) -> None:
    with offload(tmp_path) as offloaded:
        norms = []
        for backward in (offloaded.backward, torch.Tensor.backward):
            backward(loss_of(offloaded.model, 0))
            norms.append(offloaded.clip_grad_norm_(1e9).item())
            offloaded.optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-3)


@pytest.mark.parametrize("scaled_first", [True, False])
def test_gradients_of_both_kinds_accumulate_at_one_scale(
    tmp_path: Path, scaled_first: bool
) -> None:
    expected = Reference()
    for step in (0, 1):
        loss_of(expected.model, step).backward()
    expected.step()
    with offload(tmp_path) as offloaded:
        passes: list[Backward] = [offloaded.backward, torch.Tensor.backward]
        for step, backward in enumerate(passes if scaled_first else reversed(passes)):
            backward(loss_of(offloaded.model, step))
        offloaded.step()
        assert offloaded.grad_norm.item() == pytest.approx(expected.norms[-1], rel=1e-3)


def test_a_gradient_that_is_assigned_is_taken_as_it_is(tmp_path: Path) -> None:
    with offload(tmp_path) as offloaded:
        weight = offloaded.model[0].weight
        weight.grad = torch.full_like(weight, 0.5, device="cpu")
        offloaded.step()
        assert offloaded.grad_norm.item() == pytest.approx(0.5 * weight.numel() ** 0.5)


def test_gradients_that_came_with_the_model_are_taken_as_they_are(tmp_path: Path) -> None:
    model = make_model().half()
    loss_of(model, 0).backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()  # type: ignore[misc]
    with infinity.offload(model, tmp_path, compute_dtype=torch.float16) as offloaded:
        offloaded.step()
        assert offloaded.grad_norm.item() == pytest.approx(norm, rel=1e-2)


def test_an_overflow_of_scaled_gradients_alone_is_skipped(tmp_path: Path) -> None:
    with offload(tmp_path) as offloaded:
        offloaded.backward(loss_of(offloaded.model, 0) * float("inf"))
        offloaded.step()
        assert (max(offloaded._training.steps), offloaded.loss_scale) == (0, 2.0**15)
        (loss_of(offloaded.model, 0) * float("inf")).backward()
        offloaded.step()
        assert (max(offloaded._training.steps), offloaded.loss_scale) == (1, 2.0**15)


@pytest.mark.parametrize(
    ("overflows", "every"),
    matrix([(True, 1), (True, 5), (False, 3), (False, 17)], usual=[(True, 5), (False, 17)]),
)
def test_step_that_is_interrupted_and_taken_again_adapts_the_loss_scale_once(
    tmp_path: Path, overflows: bool, every: int
) -> None:
    with offload(tmp_path) as offloaded:
        scale = offloaded._training.loss_scale_state
        number, lines = 0, None
        while lines is None or lines.line:
            scale.value, scale.good_steps, scale.skipped_steps = 2.0**16, 0, 0
            offloaded.backward(loss_of(offloaded.model, 0) * (1e6 if overflows else 1.0))
            lines = interrupt(offloaded.step, number)
            offloaded.step()
            found = scale.value, scale.good_steps, scale.skipped_steps
            expected = (2.0**15, 0, 1) if overflows else (2.0**16, 1, 0)
            assert found == expected, lines.line
            number += every
        assert number > 20
