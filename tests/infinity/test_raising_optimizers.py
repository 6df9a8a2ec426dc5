"""An optimizer of the program's own that raises in a step: the step is never repeated, and what is
left of it is refused by name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import seeded
from tests.support.proof import by_turns
from tests.support.training import WHOLE, least_budget, same_values, values_of

WIDTH = 256


class _Averaged(torch.optim.Optimizer):
    """Raises once it is told to, before or after it has updated a parameter of that shape."""

    failure: Exception | None = None
    shape: torch.Size | None = None
    is_after = False

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if not _Averaged.is_after:
                    self._fail(parameter)
                state = self.state[parameter]
                if not state:
                    state["average"] = torch.zeros_like(parameter)
                state["average"].lerp_(parameter.grad, 0.1)
                parameter.sub_(group["lr"] * state["average"])
                self._fail(parameter)

    def _fail(self, parameter: torch.Tensor) -> None:
        failure = _Averaged.failure
        if failure is not None and parameter.shape == _Averaged.shape:
            _Averaged.failure = None
            raise failure


@pytest.fixture(autouse=True)
def _calm() -> None:
    _Averaged.failure = None


def _make() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 16)
    )


def _train(offloaded: infinity.OffloadedModel, number: int) -> None:
    x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(number))
    offloaded.model(x).square().mean().backward()
    offloaded.step()


def _train_and_flush(offloaded: infinity.OffloadedModel, number: int) -> None:
    _train(offloaded, number)
    offloaded.flush()


def _undisturbed(nvme: Path) -> dict[str, torch.Tensor]:
    model = seeded(_make)
    with infinity.offload(model, nvme, optimizer=_Averaged) as offloaded:
        for number in range(4):
            _train(offloaded, number)
    return values_of(model)


@pytest.mark.parametrize(("shape", "is_least"), by_turns([(WIDTH, WIDTH), (16,)], [False, True]))
@pytest.mark.parametrize("is_after", [False, True])
@pytest.mark.parametrize("failure", [RuntimeError("found it"), OSError(28, "no room", "log")])
def test_step_of_an_optimizer_that_raises_is_refused_until_a_load(
    failure: Exception,
    is_after: bool,
    shape: tuple[int, ...],
    is_least: bool,
    nvme: Path,
    tmp_path: Path,
) -> None:
    model = seeded(_make)
    host_memory = least_budget(_make, nvme, optimizer=_Averaged) if is_least else WHOLE
    options: Any = {"optimizer": _Averaged, "host_memory": host_memory}
    with infinity.offload(model, nvme, **options) as offloaded:
        for number in range(3):
            _train(offloaded, number)
        offloaded.save(tmp_path / "saved")
        _Averaged.failure, _Averaged.is_after = failure, is_after
        _Averaged.shape = torch.Size(shape)
        with pytest.raises(infinity.MixedStateError, match=r"the optimizer raised .*load a") as e:
            _train_and_flush(offloaded, 3)
        assert e.value.__cause__ is not None
        assert e.value.__cause__.__cause__ is failure
        for _ in range(2):
            with pytest.raises(infinity.MixedStateError):
                offloaded.flush()
        with pytest.raises(infinity.MixedStateError):
            _train(offloaded, 3)
        offloaded.load(tmp_path / "saved")
        _train(offloaded, 3)
    assert same_values(values_of(model), _undisturbed(nvme))


def test_block_that_ends_after_an_optimizer_raised_names_what_has_two_steps(nvme: Path) -> None:
    model = seeded(_make)

    def run() -> None:
        with infinity.offload(model, nvme, optimizer=_Averaged) as offloaded:
            _train(offloaded, 0)
            _Averaged.failure, _Averaged.shape = MemoryError("too large"), torch.Size([WIDTH] * 2)
            _Averaged.is_after = False
            _train(offloaded, 1)

    with pytest.raises(infinity.MixedStateError, match=r"\d.weight.*as before it") as caught:
        run()
    assert {*caught.value.parameters} & {"0.weight", "2.weight"}
    assert not any(parameter.is_meta for parameter in model.parameters())


def test_optimizer_that_raises_where_options_advance_is_refused(nvme: Path) -> None:
    def run() -> None:
        with infinity.offload(seeded(_make), nvme, optimizer=_Averaged) as offloaded:
            _train_and_flush(offloaded, 0)
            rule: Any = offloaded._training.rule
            rule.advance = _raise
            _train(offloaded, 1)

    with pytest.raises(infinity.MixedStateError, match="options"):
        run()


def _raise(*_: Any) -> None:
    raise RuntimeError("not again")
