"""What a thread computes by (autocast, numbers next to zero) is in updates as in ``step()``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from infinity.optim.thread_settings import ThreadSettings
from infinity.optim.torch_optimizer.rule import TorchRule
from tests.support.models import seeded
from tests.support.own_optimizers import Factory, Own, has_bits_of_plain, linears, pass_back
from tests.support.training import WHOLE, least_budget


class _Multiplies(Own):
    def factor(self, p: Any, group: dict[str, Any]) -> float:
        if p.dim() == 2:
            p.sub_(p.grad @ p.grad.T @ p, alpha=0.1)
        return 1.0


class _Halves(Own):
    """Weights become so small that few of them are normal numbers."""

    def factor(self, p: Any, group: dict[str, Any]) -> float:
        p.mul_(1e-10)
        return 0.0


@contextmanager
def _flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


WIDTH = 144
"""Of weights that are updated on the thread of updates where there is little memory."""
_model = partial(linears, WIDTH)
_AUTOCAST = partial(torch.autocast, "cpu", torch.bfloat16, cache_enabled=False)


def _steps(model: nn.Module, optimizer: Any, *, around: Any, within_all: bool) -> None:
    """Each second step is taken ``around``, and the next forward pass before it is finished."""
    for number in range(4):
        with around() if within_all and number % 2 else nullcontext():
            pass_back(model, number, WIDTH)
        with around() if number % 2 else nullcontext():
            optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("factory", "around", "within_all"),
    [
        (_Multiplies, _AUTOCAST, True),
        (_Multiplies, _AUTOCAST, False),
        (torch.optim.Adafactor, _AUTOCAST, True),
        (_Halves, _flushing, False),
    ],
)
@pytest.mark.parametrize("is_least", [True, False])
def test_step_in_a_region_has_the_bits_of_plain_torch(
    factory: Factory, around: Any, within_all: bool, is_least: bool, nvme: Path
) -> None:
    host_memory = least_budget(_model, nvme, optimizer=factory) if is_least else WHOLE
    train = partial(_steps, around=around, within_all=within_all)
    assert has_bits_of_plain(_model, factory, nvme, host_memory=host_memory, train=train)


@pytest.mark.parametrize("is_least", [True, False])
def test_updates_share_sums_among_as_many_threads_as_steps(is_least: bool, nvme: Path) -> None:
    numbers: list[int] = []

    class _Sums(Own):
        def begin(self) -> None:
            numbers.append(torch.get_num_threads())

    model = seeded(_model)
    host_memory = least_budget(_model, nvme, optimizer=_Sums) if is_least else WHOLE
    before = torch.get_num_threads()
    try:
        with infinity.offload(model, nvme, optimizer=_Sums, host_memory=host_memory) as offloaded:
            for number in (before, before + 1, before):
                torch.set_num_threads(number)
                pass_back(model, 0, WIDTH)
                numbers.clear()
                offloaded.step()
                offloaded.flush()
                assert {*numbers} == {number}
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("around", [_AUTOCAST, _flushing])
def test_settings_of_a_thread_are_as_before_afterwards(
    around: partial[AbstractContextManager[None]],
) -> None:
    plain = ThreadSettings.here()
    with around():
        settings = ThreadSettings.here()
    assert plain != settings
    assert ThreadSettings.here() == plain
    with settings.set():
        assert ThreadSettings.here() == settings
        with plain.set():
            assert ThreadSettings.here() == plain
        assert ThreadSettings.here() == settings
    assert ThreadSettings.here() == plain


def test_trials_are_outside_of_autocast() -> None:
    seen: set[torch.dtype] = set()

    class _Seen(Own):
        def begin(self) -> None:
            seen.add((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)

    with _AUTOCAST():
        TorchRule(_Seen([nn.Parameter(torch.ones(2, 2))]))
    assert seen == {torch.float32}
