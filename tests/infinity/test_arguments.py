"""What the arguments of ``offload`` must be, and budgets that are kept."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import infinity
from tests.support.models import Gpt, Stack, Zoo, seeded, vector_loss
from tests.support.training import WHOLE, least_budget, same_bits, same_values, values_of

Errors = type[Exception] | tuple[type[Exception], ...]
WRONG: dict[str, tuple[dict[str, Any], Errors, str]] = {
    "unknown option": ({"pin_memory": True}, TypeError, "pin_memory"),
    "misspelt option": ({"host_memroy": "1GiB"}, TypeError, "host_memroy"),
    "nvme is None": ({"nvme": None}, TypeError, "nvme=None is neither a path nor a sequence"),
    "nvme is a number": ({"nvme": 3}, TypeError, "nvme=3 is neither a path nor a sequence"),
    "nvme is empty": ({"nvme": []}, ValueError, "nvme is empty"),
    "nvme holds numbers": ({"nvme": [1, 2]}, TypeError, "nvme is a int"),
    "host_memory is a float": ({"host_memory": 1.5e9}, TypeError, "host_memory=1500000000.0"),
    "host_memory is negative": ({"host_memory": -1}, ValueError, "host_memory=-1"),
    "host_memory is zero": ({"host_memory": 0}, ValueError, "host_memory=0"),
    "host_memory is a bool": ({"host_memory": True}, (ValueError, TypeError), "host_memory=True"),
    "host_memory is words": ({"host_memory": "lots"}, ValueError, "host_memory='lots'"),
    "host_memory has a wrong unit": ({"host_memory": "4GIG"}, ValueError, "host_memory='4GIG'"),
    "device_memory is words": ({"device_memory": "all"}, ValueError, "device_memory='all'"),
    "compute_dtype is int": ({"compute_dtype": torch.int8}, ValueError, "compute_dtype=torch.int8"),
    "compute_dtype is double": ({"compute_dtype": torch.float64}, ValueError, "torch.float64"),
    "compute_dtype is text": ({"compute_dtype": "bf16"}, (ValueError, TypeError), "bf16"),
    "device is elsewhere": ({"device": "mps"}, (ValueError, RuntimeError), "mps"),
    "device is nonsense": ({"device": "nowhere"}, (ValueError, RuntimeError), "nowhere"),
    "max_grad_norm is text": ({"max_grad_norm": "1.0"}, TypeError, "max_grad_norm='1.0'"),
    "max_grad_norm is a bool": ({"max_grad_norm": True}, TypeError, "max_grad_norm=True"),
    "max_grad_norm is negative": ({"max_grad_norm": -1.0}, ValueError, "max_grad_norm=-1.0"),
    "max_grad_norm is zero": ({"max_grad_norm": 0.0}, ValueError, "max_grad_norm=0.0"),
    "max_grad_norm is NaN": ({"max_grad_norm": float("nan")}, ValueError, "max_grad_norm=nan"),
    "activations": ({"activations": "disk"}, ValueError, "disk"),
    "weights are missing": ({"weights": "/nowhere/w.safetensors"}, FileNotFoundError, "/nowhere"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_argument_is_named_before_anything_changes(
    name: str, stack: Stack, nvme: Path
) -> None:
    options, error, message = WRONG[name]
    with (
        pytest.raises(error, match=message.replace("(", r"\(")),
        infinity.offload(stack, **({"nvme": nvme} | options)),
    ):
        pass


def test_options_are_keyword_only(stack: Stack, nvme: Path) -> None:
    offload: Any = infinity.offload
    with pytest.raises(TypeError, match="positional"), offload(stack, nvme, infinity.AdamW()):
        pass


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)], nn.Linear, torch.zeros(3)])
def test_what_is_no_module_is_refused(model: Any, nvme: Path) -> None:
    with pytest.raises(TypeError, match=r"not an nn\.Module"), infinity.offload(model, nvme):
        pass


def _with(parameter: torch.Tensor, *, trained: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4))
    model.register_parameter("odd", nn.Parameter(parameter, requires_grad=trained))
    return model


MODELS: dict[str, tuple[Callable[[], nn.Module], type[Exception], str]] = {
    "no parameters": (nn.ReLU, ValueError, "ReLU has no parameters"),
    "empty": (nn.Sequential, ValueError, "Sequential has no parameters"),
    "lazy": (lambda: nn.LazyLinear(4), ValueError, "weight is uninitialised"),
    "complex": (
        partial(_with, torch.zeros(4, dtype=torch.complex64), trained=True),
        ValueError,
        r"odd has dtype torch\.complex64.*requires_grad_\(False\)",
    ),
    "float8": (
        partial(_with, torch.zeros(4).to(torch.float8_e4m3fn), trained=True),
        ValueError,
        r"odd has dtype torch\.float8_e4m3fn",
    ),
    "views of one another": (
        lambda: _sharing_memory(),
        ValueError,
        "different parameters over the same memory",
    ),
    "meta without initialisation": (
        lambda: _with(torch.zeros(4, device="meta"), trained=True),
        ValueError,
        r"is on the meta device and has no reset_parameters.*weights=",
    ),
    "double with AdamW": (
        lambda: nn.Linear(4, 4, dtype=torch.float64),
        ValueError,
        r"weight is float64.*compute_dtype=torch\.float32",
    ),
}


def _sharing_memory() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, second = model
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    second.weight = nn.Parameter(first.weight.detach())
    return model


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_cannot_be_offloaded_says_why(name: str, nvme: Path) -> None:
    make, error, message = MODELS[name]
    model = make()
    with pytest.raises(error, match=message), infinity.offload(model, nvme):
        pass
    assert not model._forward_pre_hooks or name == "lazy"


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_frozen_parameters_may_have_any_dtype(dtype: torch.dtype, nvme: Path) -> None:
    """Quantised weights are frozen parameters of integers."""
    model = _with((torch.randn(100_000) * 5).to(dtype), trained=False)
    model.register_forward_hook(lambda module, args, output: output + module.odd.float().mean())
    if dtype.is_complex:
        model = _with((torch.randn(100_000) * 5).to(dtype), trained=False)
    before = values_of(model)
    with infinity.offload(model, nvme) as offloaded:
        model(torch.ones(2, 4)).sum().backward()
        offloaded.step()
    after = values_of(model)
    assert same_bits(after["odd"], before["odd"])
    assert not same_bits(after["0.weight"], before["0.weight"])


def test_odd_shapes_are_trained(nvme: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scalar = nn.Parameter(torch.tensor(0.5))
            self.empty = nn.Parameter(torch.empty(0, 3))
            self.strided = nn.Parameter(torch.randn(300, 200).t())
            self.many = nn.Parameter(torch.randn(3, 1, 40, 2, 100))
            self.stack = Stack()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stack(x) * self.scalar + self.empty.sum()
            result: torch.Tensor = x[:, :200] @ self.strided + self.many.mean()
            return result

    results = []
    for host_memory in (WHOLE, least_budget(Odd, nvme)):
        model = seeded(Odd)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(3):
                vector_loss(model, step).backward()
                offloaded.step()
        results.append(values_of(model))
    assert results[0]["empty"].shape == (0, 3)
    assert results[0]["scalar"].shape == ()
    assert same_values(results[0], results[1])


@pytest.mark.parametrize("make", [Stack, Gpt, Zoo])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_the_least_budget_is_true(
    make: Callable[[], nn.Module], dtype: torch.dtype | None, nvme: Path
) -> None:
    """One byte less is refused with the same number; ``plan`` and the error agree on it."""
    least = infinity.plan(make(), compute_dtype=dtype, host_memory=1).least_host_bytes
    for too_little in (1, least // 2, least - 1):
        model = make()
        with (
            pytest.raises(infinity.BudgetError) as error,
            infinity.offload(model, nvme, compute_dtype=dtype, host_memory=too_little),
        ):
            pass
        assert error.value.least_host_bytes == least
        assert str(least) in str(error.value)
        assert isinstance(error.value, ValueError)
    model = make()
    with infinity.offload(model, nvme, compute_dtype=dtype, host_memory=least) as offloaded:
        assert offloaded.report().peak_host_bytes <= least


def test_the_budget_is_kept_by_what_the_library_takes(nvme: Path) -> None:
    least = least_budget(Gpt, nvme)
    for host_memory in (least, least + 100_001, least + 1_234_567, least + 5_000_000):
        model = seeded(Gpt)
        with infinity.offload(model, nvme, host_memory=host_memory) as offloaded:
            for step in range(3):
                model(torch.full((2, 8), step)).square().mean().backward()
                offloaded.step()
            offloaded.flush()
            report = offloaded.report()
        assert 0 < report.peak_host_bytes <= host_memory
        assert report.budget_host_bytes == host_memory


def test_a_device_budget_on_a_cpu_is_kept_or_refused(nvme: Path) -> None:
    model = Stack()
    with (
        pytest.raises(infinity.BudgetError, match=r"device_memory=64\.00 KiB is too small"),
        infinity.offload(model, nvme, device_memory="64KiB"),
    ):
        pass
    least = least_budget(Stack, nvme)
    with infinity.offload(
        model, nvme, host_memory=least + 2_000_000, device_memory="600KiB"
    ) as offloaded:
        for step in range(3):
            vector_loss(model, step).backward()
            offloaded.step()
        assert offloaded.report().resident_bytes["device"] <= 600 * 1024


def test_nothing_but_a_model_and_a_directory_is_needed(nvme: Path) -> None:
    model = nn.Linear(3, 3)
    with infinity.offload(model, nvme) as offloaded:
        model(torch.ones(1, 3)).sum().backward()
        offloaded.step()
        assert "host memory, peak / budget" in str(offloaded.report())
