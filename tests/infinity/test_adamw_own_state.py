"""An ``OffloadedAdamW`` that is given what it hands out itself, or what asks it for its state."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from infinity import OffloadedAdamW
from infinity.adamw.changes import Changes

PATIENCE_SECONDS = 20.0


def _parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(size).to(torch.float16)) for size in (1000, 7)]


def _step(optimizer: OffloadedAdamW, parameters: list[nn.Parameter]) -> None:
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.full_like(parameter, number + 1.0)
    optimizer.step()


def _by_number(optimizer: OffloadedAdamW, parameters: list[nn.Parameter]) -> Any:
    return {number: optimizer.state[parameter] for number, parameter in enumerate(parameters)}


def _by_parameter(optimizer: OffloadedAdamW, parameters: list[nn.Parameter]) -> Any:
    return optimizer.state


@pytest.mark.timeout(60)
@pytest.mark.parametrize("given", [_by_number, _by_parameter])
def test_load_state_dict_of_the_state_it_hands_out_is_that_of_its_state_dict(
    given: Callable[..., Any], tmp_path: Path
) -> None:
    parameters = _parameters()
    with OffloadedAdamW(parameters, nvme=tmp_path, host_memory="64MiB") as optimizer:
        _step(optimizer, parameters)
        groups = optimizer.state_dict()["param_groups"]
        if given is _by_parameter:
            groups = [{**optimizer.param_groups[0]}]
        expected = optimizer.state_dict()["state"]
        optimizer.load_state_dict({"state": given(optimizer, parameters), "param_groups": groups})
        found = optimizer.state_dict()["state"]
        assert found.keys() == expected.keys()
        for number, entry in expected.items():
            for name, values in entry.items():
                assert torch.equal(found[number][name], values)
        _step(optimizer, parameters)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("on_main", [True, False])
def test_change_within_a_change_is_refused_and_the_next_one_is_made(on_main: bool) -> None:
    changes = Changes()
    errors: list[str] = []

    def attempt() -> None:
        for within in (lambda: changes.make(lambda: None), changes.wait):
            try:
                changes.make(within)
            except RuntimeError as error:
                errors.append(str(error))

    if on_main:
        attempt()
    else:
        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        thread.join(PATIENCE_SECONDS)
    assert len(errors) == 2
    assert all("while that is changed" in error for error in errors)
    assert changes.make(lambda: 5) == 5
