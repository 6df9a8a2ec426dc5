"""Functions that read weights on one thread while a step is taken on another."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import handle_torch_function, has_torch_function_unary

import infinity
from tests.support.training import same_values, values_of

TILES: dict[str, Any] = {"max_parameter_bytes": 256 << 10}


class _Reading:
    """A function of a weight that has begun, and ends when it is let go on."""

    def __init__(self, module: str) -> None:
        """``module`` is where the function seems to come from: torch's own count their changes."""
        self._began, self._go_on = threading.Event(), threading.Event()
        self.read.__func__.__module__ = module  # type: ignore[attr-defined]

    def read(self, weight: Any) -> Any:
        if has_torch_function_unary(weight):
            return handle_torch_function(self.read, (weight,), weight)
        self._began.set()
        assert self._go_on.wait(60)
        return weight.norm()

    @contextmanager
    def under_way(self, weight: Any, has_history: bool) -> Iterator[None]:
        def run() -> None:
            with torch.set_grad_enabled(has_history):
                self.read(weight)

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(run)
            try:
                assert self._began.wait(60)
                yield
            finally:
                self._go_on.set()
            reading.result()


def _make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 8))


def _loss(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 256)).square().sum()
    return loss


def _step(model: nn.Module, offloaded: infinity.OffloadedModel, path: Path) -> None:
    offloaded.step()


def _load(model: nn.Module, offloaded: infinity.OffloadedModel, path: Path) -> None:
    offloaded.save(path)
    offloaded.step()
    offloaded.load(path)


@pytest.mark.parametrize("change", [_step, _load])
@pytest.mark.parametrize("has_history", [False, True])
@pytest.mark.parametrize("module", ["torch.own", "others"])
@pytest.mark.parametrize("options", [TILES, {}], ids=["tiles", "whole"])
def test_step_beside_a_function_that_reads_a_weight_gives_the_same_bits(
    options: dict[str, Any],
    module: str,
    has_history: bool,
    change: Callable[[nn.Module, infinity.OffloadedModel, Path], None],
    nvme: Path,
    tmp_path: Path,
) -> None:
    results = []
    for is_beside in (False, True):
        model = _make()
        with infinity.offload(model, nvme, host_memory="64MiB", **options) as offloaded:
            _loss(model).backward()
            saved = tmp_path / str(is_beside)
            if is_beside:
                with _Reading(module).under_way(model[0].weight, has_history):
                    change(model, offloaded, saved)
            else:
                change(model, offloaded, saved)
            _loss(model).backward()
            offloaded.step()
        results.append(values_of(model))
    assert same_values(*results)
