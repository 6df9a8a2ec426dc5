"""Modes of the program change nothing of an ``OffloadedAdamW``, on whatever thread they are on."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity import OffloadedAdamW
from tests.support.training import default_dtype

NUM_ELEMENTS = 100


def _gradient(step: int) -> torch.Tensor:
    return torch.randn(NUM_ELEMENTS, generator=torch.Generator().manual_seed(step))


def _train(parameter: nn.Parameter, optimizer: OffloadedAdamW, steps: range) -> None:
    for step in steps:
        parameter.grad = _gradient(step).to(parameter.dtype)
        optimizer.step()


def _optimizer_of(parameter: nn.Parameter, nvme: Path) -> OffloadedAdamW:
    return OffloadedAdamW([parameter], lr=1e-2, nvme=nvme, host_memory="64MiB")


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float64])
def test_state_dict_taken_under_a_default_dtype_resumes_bit_for_bit(
    default: torch.dtype, tmp_path: Path
) -> None:
    first = nn.Parameter(torch.ones(NUM_ELEMENTS))
    with _optimizer_of(first, tmp_path) as optimizer:
        _train(first, optimizer, range(259))  # bfloat16 has 258 and 260
        with default_dtype(default):
            state = optimizer.state_dict()
            step = optimizer.state[first]["step"]
        assert (step.dtype, step.item()) == (torch.float32, 259)
        assert state["state"][0]["step"].dtype == torch.float32
        second = nn.Parameter(first.detach().clone())
        with _optimizer_of(second, tmp_path) as resumed:
            resumed.load_state_dict(state)
            _train(second, resumed, range(259, 270))
        _train(first, optimizer, range(259, 270))
    assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_state_goes_out_and_in_on_a_thread_with_a_default_device(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    parameter = nn.Parameter(torch.ones(NUM_ELEMENTS, dtype=dtype))

    def out_and_in() -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with torch.device("meta"):
            state = optimizer.state_dict()
            entry = state["state"][0]
            optimizer.load_state_dict(state)
            without = {name: values for name, values in entry.items() if name != "master"}
            optimizer.load_state_dict({**state, "state": {0: without}})  # as torch's AdamW
            return entry, optimizer.state[parameter]["exp_avg"]

    with _optimizer_of(parameter, tmp_path) as optimizer, ThreadPoolExecutor(1) as executor:
        _train(parameter, optimizer, range(2))
        expected = optimizer.state_dict()["state"][0]
        found, exp_avg = executor.submit(out_and_in).result()
        assert {values.device.type for values in (*found.values(), exp_avg)} == {"cpu"}
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], values) for name, values in expected.items())
        assert torch.equal(exp_avg, expected["exp_avg"])
