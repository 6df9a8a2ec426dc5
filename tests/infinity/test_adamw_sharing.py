"""OffloadedAdamW over tensors that share memory: the same everywhere, or refused by name."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

from infinity import OffloadedAdamW
from tests.support.adamw_model import AMPLE
from tests.support.simulated_device.injected import simulated

pytestmark = pytest.mark.usefixtures("one_thread")
N = 4096


def views(base: torch.Tensor) -> list[torch.Tensor]:
    return [base, base.view(64, 64)]


def overlaps(base: torch.Tensor) -> list[torch.Tensor]:
    return [base[:3000], base[2999:]]


def contained(base: torch.Tensor) -> list[torch.Tensor]:
    return [base[10:20], torch.ones(7), base]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("share", [views, overlaps, contained])
def test_parameters_over_the_same_memory_are_refused(
    share: Callable[[torch.Tensor], list[torch.Tensor]], on_device: bool, tmp_path: Path
) -> None:
    parameters = [nn.Parameter(tensor) for tensor in share(torch.ones(N))]
    with simulated() if on_device else nullcontext():
        with pytest.raises(ValueError, match=r"\d and \d are different parameters over the same"):
            OffloadedAdamW(parameters, nvme=tmp_path, host_memory=AMPLE)
        with OffloadedAdamW(parameters[:1], nvme=tmp_path, host_memory=AMPLE) as optimizer:
            with pytest.raises(ValueError, match="are different parameters over the same"):
                optimizer.add_param_group({"params": parameters[1:]})
            assert len(optimizer.param_groups) == 1
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()


def test_parameters_that_come_to_share_memory_are_refused_by_a_step(tmp_path: Path) -> None:
    parameters = [nn.Parameter(torch.ones(N)) for _ in range(2)]
    with OffloadedAdamW(parameters, nvme=tmp_path, host_memory=AMPLE) as optimizer:
        parameters[1].data = parameters[0].data
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        with pytest.raises(ValueError, match="0 and 1 are different parameters over the same"):
            optimizer.step()
        assert torch.equal(parameters[0], torch.ones(N))
        parameters[1].grad = None  # is not changed then
        optimizer.step()
    assert optimizer.report().steps == 1


def weights_of_another(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameters[1].detach(), torch.ones(N)]


def part_of_another(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.ones(N), parameters[0].detach()[5].expand(N)]


def part_of_its_own(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.ones(N), parameters[1].detach()[7].expand(N)]


@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("share", [weights_of_another, part_of_another, part_of_its_own])
def test_gradient_in_the_memory_of_weights_is_refused_before_anything_is_changed(
    share: Callable[[list[nn.Parameter]], list[torch.Tensor]], on_device: bool, tmp_path: Path
) -> None:
    parameters = [nn.Parameter(torch.randn(N)) for _ in range(2)]
    before = [parameter.detach().clone() for parameter in parameters]
    with (
        simulated() if on_device else nullcontext(),
        OffloadedAdamW(parameters, nvme=tmp_path, host_memory=AMPLE) as optimizer,
    ):
        for parameter, gradient in zip(parameters, share(parameters), strict=True):
            parameter.grad = gradient
        with pytest.raises(ValueError, match=r"the gradient of \d shares memory with the weights"):
            optimizer.step()
    assert all(map(torch.equal, parameters, before))


def parts_of_one(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    """As views of buckets are, with gaps between them that the other fills."""
    return list(torch.randn(N, 2, generator=torch.Generator().manual_seed(1)).unbind(1))


def one_for_both(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, N)] * 2


def own_weights(parameters: list[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.detach() for parameter in parameters]


@pytest.mark.parametrize("share", [parts_of_one, one_for_both, own_weights])
def test_what_may_share_memory_has_the_bits_of_torch_everywhere(
    share: Callable[[list[nn.Parameter]], list[torch.Tensor]], tmp_path: Path
) -> None:
    def trained(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        whole = torch.randn(2 * N)  # parameters side by side share nothing
        parameters = [nn.Parameter(whole[:N]), nn.Parameter(whole[N:])]
        for parameter, gradient in zip(parameters, share(parameters), strict=True):
            parameter.grad = gradient
        optimizer = make(parameters)
        if not isinstance(optimizer, OffloadedAdamW):  # torch's reads strided gradients as dense
            for parameter in parameters:
                assert parameter.grad is not None
                parameter.grad = parameter.grad.contiguous()
        for _ in range(3):
            optimizer.step()
        if isinstance(optimizer, OffloadedAdamW):
            optimizer.close()
        return [parameter.detach().clone() for parameter in parameters]

    def ours(parameters: list[nn.Parameter]) -> OffloadedAdamW:
        return OffloadedAdamW(parameters, nvme=tmp_path, host_memory=AMPLE)

    expected = trained(lambda parameters: torch.optim.AdamW(parameters, fused=True))
    assert all(map(torch.equal, trained(ours), expected))
    with simulated():
        assert all(map(torch.equal, trained(ours), expected))
