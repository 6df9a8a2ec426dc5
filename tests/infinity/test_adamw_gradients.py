"""Gradients that torch's AdamW takes and that do not lie as their parameters do."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import infinity
from infinity import OffloadedAdamW
from infinity.adamw.local_tensors import copy_elements
from infinity.adamw.tiers import update as adamw_update
from infinity.adamw.tiers.update import TRANSFER_ELEMENTS

STRANGE: dict[str, Callable[[], torch.Tensor]] = {
    "one value": lambda: torch.tensor(0.5).expand(48),
    "every other": lambda: torch.linspace(-1, 1, 96)[::2],
    "a column": lambda: torch.linspace(-1, 1, 96).view(48, 2)[:, 1],
    "negated": lambda: torch.linspace(-1, 1, 48)._neg_view(),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_strided_gradient_of_one_dimension_is_taken(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.randn(48))
    expected = nn.Parameter(parameter.detach().clone())
    parameter.grad, expected.grad = STRANGE[kind](), STRANGE[kind]().clone()
    torch.optim.AdamW([expected], lr=0.1, fused=True).step()
    with OffloadedAdamW([parameter], lr=0.1, nvme=tmp_path, host_memory="64MiB") as optimizer:
        optimizer.step()
    assert torch.equal(parameter, expected)


@pytest.mark.parametrize("kind", STRANGE)
def test_offload_takes_a_strided_gradient_of_one_dimension(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 48)
    expected = nn.Parameter(model.bias.detach().clone())
    expected.grad = STRANGE[kind]().clone()
    torch.optim.AdamW([expected], lr=0.1, fused=True).step()
    with infinity.offload(model, tmp_path, optimizer=infinity.AdamW(lr=0.1)) as offloaded:
        model(torch.ones(2, 16)).sum().backward()
        model.bias.grad = STRANGE[kind]()
        offloaded.step()
    assert torch.equal(model.bias, expected)


def test_gradient_of_another_shape_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    first, second = (nn.Parameter(torch.ones(100)) for _ in range(2))
    with OffloadedAdamW([first, second], nvme=tmp_path, host_memory="64MiB") as optimizer:
        first.grad, second.grad = torch.ones(100), torch.ones(100)
        second.grad.resize_(40)
        with pytest.raises(ValueError, match=r"gradient of 1 has shape \(40,\)"):
            optimizer.step()
        assert torch.equal(first, torch.ones(100))
        second.grad = None
        optimizer.step()
        assert len(optimizer.state_dict()["state"]) == 1


def test_gradients_of_other_strides_are_copied_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [nn.Parameter(torch.randn(700, 600)) for _ in range(3)]
    lengths: list[int] = []
    memory: set[int] = set()

    def copied(tensor: torch.Tensor, start: int, out: torch.Tensor) -> None:
        copy_elements(tensor, start, out)
        lengths.append(len(out))
        memory.add(out.data_ptr())

    monkeypatch.setattr(adamw_update, "copy_elements", copied)
    with OffloadedAdamW(parameters, nvme=tmp_path, host_memory="64MiB") as optimizer:
        for parameter in parameters:
            parameter.grad = torch.randn(600, 700).t()
        optimizer.step()
    assert sum(lengths) == sum(parameter.numel() for parameter in parameters)
    assert max(lengths) == TRANSFER_ELEMENTS
    assert len(memory) == 1


@pytest.mark.parametrize("shape", [(7,), (1, 1), (5, 1), (4, 3, 5), (2, 1, 3, 2)], ids=str)
def test_copied_elements_are_those_of_the_flat_tensor(shape: tuple[int, ...]) -> None:
    values = torch.arange(float(torch.Size(shape).numel())).view(shape)
    strided = torch.empty(*shape[::-1]).permute(*range(len(shape))[::-1]).copy_(values)
    count = values.numel()
    for start in range(count):
        for stop in range(start + 1, count + 1):
            out = torch.empty(stop - start)
            copy_elements(strided, start, out)
            assert out.tolist() == list(map(float, range(start, stop)))
